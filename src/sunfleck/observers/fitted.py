"""PURE. A table that fits its terminal: the least needed columns go first, remarks move below when there is no room.

Rich alone would squeeze every column to an ellipsis; a table of ellipses says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Cells between columns: one of padding, one that the box's divider takes."""
_LEAST_REMARK = 24
"""Characters; a narrower remark column would say nothing."""


class Column(NamedTuple):
    """`rank`: columns of the highest rank are dropped first; 0 stays for ever. `most`: cut beyond this width."""

    title: str
    rank: int = 0
    right: bool = False
    most: int = 40


class Fitted:
    """Rows of cells with an optional remark each. The remark fills the rest of the line, or follows the table as
    `keys: remark` lines (a key is a row's first cell)."""

    def __init__(self, columns: Sequence[Column], remark: str = "") -> None:
        self._columns = columns
        self._remark = remark
        self._rows: list[tuple[list[Text], str]] = []

    def add(self, *cells: str | Text, remark: str = "") -> None:
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append(([cell if isinstance(cell, Text) else Text(cell) for cell in cells], remark))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        keep, widths = self._fit(options.max_width)
        remark_width = options.max_width - sum(widths[i] + _GAP for i in keep)
        said = bool(self._remark) and any(remark for _, remark in self._rows)
        inline = said and remark_width >= _LEAST_REMARK
        table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False, pad_edge=False)
        for i in keep:
            column = self._columns[i]
            table.add_column(
                column.title, justify="right" if column.right else "left", width=widths[i], no_wrap=True,
                overflow="ellipsis",
            )  # fmt: skip
        if inline:
            table.add_column(self._remark, width=remark_width, no_wrap=True, overflow="ellipsis")
        for cells, remark in self._rows:
            table.add_row(*(cells[i] for i in keep), *([remark] if inline else []))
        yield table
        if said and not inline:
            keys: dict[str, list[str]] = {}
            for cells, remark in self._rows:
                if remark:
                    keys.setdefault(remark, []).append(cells[0].plain)
            for remark, of in keys.items():
                yield Text.assemble((f"{' '.join(of)}: ", "bold"), remark)

    def _fit(self, width: int) -> tuple[list[int], list[int]]:
        """Columns that stay, and the width of every column."""
        widths = [
            min(column.most, max(cell_len(column.title), *(cells[i].cell_len for cells, _ in self._rows), 0))
            for i, column in enumerate(self._columns)
        ]
        keep = list(range(len(self._columns)))
        while sum(widths[i] + _GAP for i in keep) - _GAP > width:
            droppable = [i for i in keep if self._columns[i].rank > 0]
            if not droppable:
                break
            keep.remove(max(droppable, key=lambda i: self._columns[i].rank))
        return keep, widths
