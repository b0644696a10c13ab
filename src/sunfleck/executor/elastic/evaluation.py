"""Evaluation among the workers of a run, and what ranks do that join in the middle of one.

Ranks do not always do the same: a newcomer joins at the boundary its script reaches first, while the others may be in
the middle of an evaluation. So before each evaluation, and before the first step of each round, all ranks announce
what they are about to do; rank 0 (a survivor whenever there is one) sets the pace, and the others lend their hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sunfleck.core.errors import InvalidRequest

from .comm import CommFailed, Superseded
from .loader import ElasticLoader
from .session import Session

_STEP = 0
"""What a rank is about to do, as announced: a training step, or (any other number) the evaluation of that call site."""
_SLOTS = 16


class Evaluator:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._announced_round = -2
        session.before_first_step = self.assist

    def evaluate(self, judge: Callable[[Any], dict[str, Any]], loader: ElasticLoader, site: int) -> dict[str, float]:
        """See Run.evaluate. `site` names the call in the script, alike in every worker."""
        session = self._session
        session.settle()
        session.report_now()
        lineage, index = session.lineage, session.n_evaluations
        session.n_evaluations += 1
        lineage.evaluating = True
        try:
            while index >= len(lineage.evaluations):
                try:
                    lineage.arrive_at_evaluation(index)
                    result = self._evaluate_once(judge, loader, site)
                    lineage.evaluations.append(result)
                except CommFailed as error:
                    session.recover(error)
                except Superseded:
                    session.enter_newest()
        finally:
            lineage.evaluating = False
        session.meter.restart(time.monotonic(), warm_up=False)
        return dict(lineage.evaluations[index])

    def _evaluate_once(
        self, judge: Callable[[Any], dict[str, Any]], loader: ElasticLoader, site: int
    ) -> dict[str, float]:
        rounds = self._session.rounds
        comm = rounds.comm
        if rounds.urgent():
            raise Superseded
        doing = self._announce(site)
        while doing[0] != site:
            if doing[0] == _STEP:
                raise InvalidRequest("run.evaluate() was not called by every worker")
            self._reduce_sums({})
            comm.part()
            doing = self._announce(site)
        sums: dict[str, float] = {}
        part = [r for r, what in enumerate(doing) if what == site]
        modes = [(m, m.training) for m in self._session.lineage.models]
        try:
            for model, _ in modes:
                model.eval()
            with torch.no_grad():
                for batch in loader.shares_of(part.index(comm.rank), len(part)):
                    for name, value in judge(batch).items():
                        sums[name] = sums.get(name, 0.0) + float(value)
                    if rounds.urgent():
                        raise Superseded
        finally:
            for model, was_training in modes:
                model.train(was_training)
        sums = self._reduce_sums(sums)
        comm.part()
        n = sums.pop("n", None)
        return {name: total / n if n else total for name, total in sums.items()}

    def _announce(self, what: int) -> list[int]:
        """What every rank is about to do, by rank. Waits for all of them."""
        rounds = self._session.rounds
        comm = rounds.comm
        if what == _STEP:
            self._announced_round = rounds.number
        if comm.world == 1:
            return [what]
        said = torch.zeros(comm.world, dtype=torch.int64)
        said[comm.rank] = what
        comm.wait(comm.all_reduce(said), rounds.urgent)
        return [int(x) for x in said]

    def assist(self) -> None:
        """Before the first step of a round: those who joined in the middle of somebody's evaluation lend their hand to
        its sums (with nothing of their own) until everybody wants to train."""
        while self._announced_round != self._session.rounds.number:
            while self._announce(_STEP)[0] != _STEP:
                self._reduce_sums({})
                self._session.rounds.comm.part()

    def _reduce_sums(self, sums: dict[str, float]) -> dict[str, float]:
        rounds = self._session.rounds
        comm = rounds.comm
        if len(sums) > _SLOTS:
            raise InvalidRequest(f"judge returned {len(sums)} metrics; at most {_SLOTS} are summed")
        if comm.world == 1:
            return sums
        names = sorted(sums)
        vector = torch.zeros(_SLOTS, dtype=torch.float64)
        for slot, name in enumerate(names):
            vector[slot] = sums[name]
        comm.wait(comm.all_reduce(vector), rounds.urgent)
        return {name: float(vector[slot]) for slot, name in enumerate(names)}
