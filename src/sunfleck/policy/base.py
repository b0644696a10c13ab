"""PURE. What a policy is: a function from a snapshot of the pool to a plan."""

from __future__ import annotations

from typing import Protocol

from sunfleck.core.model import Plan, Snapshot


class Policy(Protocol):
    """Decides who gets which nodes.

    `plan` is pure (equal snapshots give equal plans; no clock, file or random source), bounded in time, and total: it
    answers every valid snapshot with a plan that a controller can apply as it stands. Every plan of every policy keeps
    these promises, which the property tests check:

    - a node is given to at most one job, and only nodes of the snapshot are given;
    - a job gets no node, or a size its `JobSpec.sizes` allows;
    - a job only adds nodes to those it holds or only drops some of them (no migration);
    - a solver that ran out of time keeps what runs: "no solution" is never applied as "no nodes".
    """

    name: str

    def plan(self, snapshot: Snapshot) -> Plan: ...
