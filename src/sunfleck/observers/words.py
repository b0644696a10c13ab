"""PURE. Numbers, times and names as a person reads them; terminal and report speak alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sunfleck.core.model import NodeName


def duration(seconds: float) -> str:
    """As squeue writes it: M:SS, H:MM:SS or D-HH:MM:SS."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def quantity(value: float | None, digits: int = 3) -> str:
    """`digits` significant ones, thousands as k, M, G; - for nothing."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    for from_, factor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= from_:
            scaled = value / factor
            return f"{scaled:.0f}{letter}" if abs(scaled) >= 100 else f"{scaled:.{digits}g}{letter}"
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def short_time(seconds: float | None) -> str:
    """Milliseconds below a second; - for nothing."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 99.95 else f"{seconds:.0f} s"


def node_list(nodes: Sequence[NodeName], limit: int = 8) -> str:
    """Names in natural order, the first `limit` of them."""
    if not nodes:
        return "none"
    names = sorted(nodes, key=lambda name: (len(name), name))
    more = len(names) - limit
    return " ".join(names) if more <= 0 else f"{' '.join(names[:limit])} and {more} more"


def one_line(text: str) -> str:
    """Whatever the line ends in it."""
    return " ".join(text.split())
