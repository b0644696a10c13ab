"""PURE. The ledger of a job: what its SamplesCommitted events prove about every sample of every epoch.

Rules of the fold:

- Entries of one round may be reported more than once, whole or in other pieces (a survivor repeats what a dead rank
  0 may not have said). Within a round only a tiling of its steps counts, so repetition is harmless.
- A later round that starts at a step below what an earlier one reached voids the earlier steps from there on: their
  effect was lost with their workers, and the later round trains them anew.
- What remains must cover the positions of each epoch once: a gap is lost samples, an overlap repeated ones. The last
  epoch may be unfinished. Of a whole epoch the index hashes must also add up to the dataset's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sunfleck.core.events import DatasetDescribed, SamplesCommitted

_MODULUS = 1 << 63


@dataclass(frozen=True)
class Piece:
    """Part of an entry that counts. `exact` is False when an entry had to be cut, so that its sums do not apply."""

    epoch: int
    cursor_from: int
    cursor_to: int
    n_samples: int
    index_hash: int
    exact: bool


@dataclass(frozen=True)
class Verdict:
    """Outcome of `verify`. `problems` says in words where samples were lost or repeated."""

    lost: int
    repeated: int
    n_samples: int
    """Samples whose training counts."""
    n_epochs_proved: int
    """Whole epochs whose index hash was checked and fits."""
    problems: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[int]:
        """So that `lost, repeated = verify(...)` reads well."""
        return iter((self.lost, self.repeated))

    @property
    def clean(self) -> bool:
        return not self.problems


def verify(spans: Iterable[SamplesCommitted], described: DatasetDescribed | None = None) -> Verdict:
    """Fold the ledger entries of one job, in any order, into what was lost and what was repeated.

    Without `described` the end of an epoch is known only from the largest cursor seen and hashes cannot be checked.
    """
    pieces = _pieces(spans, described.batch if described else None)
    by_epoch: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_epoch[piece.epoch].append(piece)
    if not by_epoch:
        return Verdict(lost=0, repeated=0, n_samples=0, n_epochs_proved=0)
    n = described.n_samples if described else max(p.cursor_to for p in pieces)
    problems: list[str] = []
    lost = repeated = n_proved = 0
    last = max(by_epoch)
    for epoch in range(last + 1):
        epoch_pieces = sorted(by_epoch.get(epoch, []), key=lambda p: (p.cursor_from, p.cursor_to))
        end = n if epoch < last else max((p.cursor_to for p in epoch_pieces), default=0)
        epoch_lost, epoch_repeated = _coverage(epoch_pieces, end)
        if epoch_lost or epoch_repeated:
            problems.append(f"epoch {epoch}: {epoch_lost} lost, {epoch_repeated} repeated")
        elif described and end == n and described.epoch_hash and all(p.exact for p in epoch_pieces):
            total = sum(p.index_hash for p in epoch_pieces) % _MODULUS
            if total == described.epoch_hash:
                n_proved += 1
            else:
                epoch_lost = epoch_repeated = 1
                problems.append(f"epoch {epoch}: the samples fetched are not the dataset's (index hash differs)")
        lost += epoch_lost
        repeated += epoch_repeated
    return Verdict(
        lost=lost,
        repeated=repeated,
        n_samples=sum(p.cursor_to - p.cursor_from for p in pieces),
        n_epochs_proved=n_proved,
        problems=tuple(problems),
    )


def _coverage(pieces: list[Piece], end: int) -> tuple[int, int]:
    lost = repeated = 0
    position = 0
    for piece in pieces:
        lost += max(0, piece.cursor_from - position)
        repeated += max(0, min(position, piece.cursor_to) - piece.cursor_from)
        position = max(position, piece.cursor_to)
        if piece.exact:
            width = piece.cursor_to - piece.cursor_from
            lost += max(0, width - piece.n_samples)
            repeated += max(0, piece.n_samples - width)
    lost += max(0, end - position)
    return lost, repeated


def _pieces(spans: Iterable[SamplesCommitted], batch: int | None) -> list[Piece]:
    rounds: dict[int, list[SamplesCommitted]] = defaultdict(list)
    for span in spans:
        if span.step_to > span.step_from:
            rounds[span.round].append(span)
    pieces: list[Piece] = []
    void_from: float = float("inf")
    for number in sorted(rounds, reverse=True):
        entries = rounds[number]
        pieces.extend(_tile(entries, void_from, batch))
        void_from = min(void_from, min(s.step_from for s in entries))
    return pieces


def _tile(entries: list[SamplesCommitted], end: float, batch: int | None) -> list[Piece]:
    """Cover the steps of one round below `end`, each once, with whole entries where they fit and cut ones elsewhere."""
    pieces: list[Piece] = []
    step: float = min(s.step_from for s in entries)
    while step < end:
        starting = [s for s in entries if s.step_from == step and s.step_to <= end]
        if starting:
            whole = max(starting, key=lambda s: s.step_to)
            pieces.append(
                Piece(whole.epoch, whole.cursor_from, whole.cursor_to, whole.n_samples, whole.index_hash, exact=True)
            )
            step = whole.step_to
            continue
        covering = [s for s in entries if s.step_from <= step < s.step_to]
        if covering:
            cut = max(covering, key=lambda s: s.step_to)
            stop = min(end, cut.step_to)
            low, high = _cursor_at(cut, step, batch), _cursor_at(cut, stop, batch)
            pieces.append(Piece(cut.epoch, low, high, high - low, 0, exact=False))
            step = stop
            continue
        later = [s.step_from for s in entries if s.step_from > step]
        if not later:
            break
        step = min(later)
    return pieces


def _cursor_at(span: SamplesCommitted, step: float, batch: int | None) -> int:
    """Cursor at a step inside a span: every step takes `batch` positions, the last one of an epoch what is left."""
    n_steps = span.step_to - span.step_from
    per_step = batch or -(-(span.cursor_to - span.cursor_from) // n_steps)
    return min(span.cursor_to, span.cursor_from + int(step - span.step_from) * per_step)
