"""PURE. What a worker knows of its training's progress: its place, its ledger, and its throughput."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sunfleck.executor.launch.wire import Span

_MAX_ENTRIES = 256
_WARM_UP_STEPS = 2
_WARM_UP_S = 0.25


@dataclass
class Place:
    """Where the model's lineage stands. `cursor` counts positions of the epoch's permutation; `samples` all trained."""

    step: int = 0
    epoch: int = 0
    cursor: int = 0
    samples: int = 0

    def to_plain(self) -> dict[str, int]:
        return {"step": self.step, "epoch": self.epoch, "cursor": self.cursor, "samples": self.samples}

    @classmethod
    def from_plain(cls, plain: dict[str, int]) -> Place:
        return cls(**plain)

    def advance(self, n_samples: int) -> None:
        self.step += 1
        self.cursor += n_samples
        self.samples += n_samples

    def next_epoch(self) -> None:
        self.epoch += 1
        self.cursor = 0


@dataclass
class Book:
    """Ledger of the lineage: committed spans by round. It travels with the state, so that whoever survives can repeat
    what a dead rank 0 may not have reported. `fresh` holds what has not been reported yet."""

    entries: list[tuple[int, Span]] = field(default_factory=list)
    fresh: list[Span] = field(default_factory=list)

    def commit(self, round_number: int, span: Span) -> None:
        if self.entries and self.entries[-1][0] == round_number:
            merged = _merge(self.entries[-1][1], span)
            if merged is not None:
                self.entries[-1] = (round_number, merged)
            else:
                self.entries.append((round_number, span))
        else:
            self.entries.append((round_number, span))
        del self.entries[:-_MAX_ENTRIES]
        merged = _merge(self.fresh[-1], span) if self.fresh else None
        if merged is not None:
            self.fresh[-1] = merged
        else:
            self.fresh.append(span)

    def take(self) -> tuple[Span, ...]:
        """Spans since last taken."""
        fresh, self.fresh = tuple(self.fresh), []
        return fresh

    def to_plain(self) -> list[list[int]]:
        return [
            [r, s.epoch, s.step_from, s.step_to, s.cursor_from, s.cursor_to, s.n_samples, s.index_hash]
            for r, s in self.entries
        ]

    @classmethod
    def from_plain(cls, plain: list[list[int]]) -> Book:
        return cls(
            entries=[
                (
                    r,
                    Span(
                        epoch=epoch,
                        step_from=step_from,
                        step_to=step_to,
                        cursor_from=cursor_from,
                        cursor_to=cursor_to,
                        n_samples=n_samples,
                        index_hash=index_hash,
                    ),
                )
                for r, epoch, step_from, step_to, cursor_from, cursor_to, n_samples, index_hash in plain
            ]
        )


def _merge(a: Span, b: Span) -> Span | None:
    """One span for two that follow each other in one epoch, else None."""
    if a.epoch != b.epoch or a.step_to != b.step_from or a.cursor_to != b.cursor_from:
        return None
    return Span(
        epoch=a.epoch,
        step_from=a.step_from,
        step_to=b.step_to,
        cursor_from=a.cursor_from,
        cursor_to=b.cursor_to,
        n_samples=a.n_samples + b.n_samples,
        index_hash=(a.index_hash + b.index_hash) % (1 << 63),
    )


@dataclass
class Meter:
    """Throughput over intervals without rescale, warm-up, evaluation or saving. All times are monotonic seconds."""

    since_s: float = 0.0
    n_samples: int = 0
    n_steps: int = 0
    warming_until_s: float = 0.0
    warming_steps: int = 0
    disturbed: bool = False
    sums: dict[str, list[float]] = field(default_factory=dict)

    def restart(self, now_s: float, *, warm_up: bool) -> None:
        """A new interval begins now; after a change of size the first steps do not count."""
        self.since_s, self.n_samples, self.n_steps, self.disturbed = now_s, 0, 0, False
        if warm_up:
            self.warming_steps, self.warming_until_s = _WARM_UP_STEPS, now_s + _WARM_UP_S

    def step(self, now_s: float, n_samples: int) -> None:
        if self.warming_steps > 0 or now_s < self.warming_until_s:
            self.warming_steps -= 1
            self.since_s = now_s
            return
        self.n_samples += n_samples
        self.n_steps += 1

    def add_metric(self, name: str, total: float, weight: float) -> None:
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += weight

    def take_metrics(self) -> dict[str, float]:
        """Weighted means since last taken."""
        taken = {name: total / weight for name, (total, weight) in self.sums.items() if weight > 0}
        self.sums.clear()
        return taken

    def rate(self, now_s: float) -> tuple[float, float | None, float]:
        """(dt_s, samples_per_s or None, step_s) of the interval so far."""
        dt_s = max(0.0, now_s - self.since_s)
        if self.disturbed or self.n_steps == 0 or dt_s <= 0:
            return dt_s, None, 0.0
        return dt_s, self.n_samples / dt_s, dt_s / self.n_steps


def number(name: str, value: Any) -> float:
    """A metric as a float. Raises TypeError or ValueError that name the metric."""
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"run.report({name}=...): {value!r} is not a number")
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"run.report({name}=...): a {type(value).__name__} is not one number") from error
