"""A worker's view of its job's membership: what it was told, how it meets the others, how it says what happened."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from sunfleck.executor.launch.wire import (
    Announce,
    AnyWorkerMessage,
    EndProgram,
    FormRound,
    PeerLost,
    Ready,
    SaveNow,
    Status,
)

from .comm import Comm, CommFailed, Superseded, connect_store
from .link import AgentGone, Link

_WAIT_S = 60.0


class Rounds:
    """Commands are only read here. `comm` is the round in force; round -1 means none yet."""

    def __init__(self, link: Link | None, worker: str, job: str, device: Any) -> None:
        self.link = link
        self.worker = worker
        self.job = job
        self.device = device
        self.number = -1
        self.members: tuple[str, ...] = (worker,)
        self.comm = Comm(0, 1, device)
        self.told: FormRound | None = None
        self.end: EndProgram | None = None
        self.save_wanted = False
        self.waiting: Ready | None = None
        self.step: Callable[[], int] = lambda: 0
        self.repeat: Callable[[], None] = lambda: None
        """Says the ledger again: what was on its way to a controller that died may never have been recorded."""

    # -- hearing ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read what the agent passed on. A worker without its agent ends at once: nobody could end it later."""
        if self.link is None:
            return
        try:
            commands = self.link.read(timeout_s)
        except AgentGone as error:
            print(f"sunfleck: {self.worker} ends: {error}", file=sys.stderr, flush=True)
            os._exit(70)
        for command in commands:
            match command:
                case FormRound():
                    if command.round > self.number and (self.told is None or command.round > self.told.round):
                        self.told = command
                case EndProgram():
                    self.end = command
                case SaveNow():
                    self.save_wanted = True
                case Announce():
                    self._introduce()

    def newer(self) -> bool:
        """Whether a round after the one in force was announced (reads the socket)."""
        self.poll()
        return self.told is not None or self.end is not None

    def urgent(self) -> bool:
        """Whether the newest announced round does without one of us, or the end was announced. That cannot wait;
        newcomers can (reads the socket)."""
        return self.newer() and (
            self.end is not None or self.told is None or not set(self.members) <= set(self.told.members)
        )

    def newer_than(self, number: int) -> bool:
        self.poll()
        return self.end is not None or (self.told is not None and self.told.round > number)

    def ahead(self) -> int:
        """How many rounds ahead of the one in force the newest announced one is."""
        return 0 if self.told is None else self.told.round - self.number

    def wait(self, after: int) -> FormRound | EndProgram:
        """Block until a round later than `after` is announced, or the end."""
        while not self.newer_than(after):
            self.poll(_WAIT_S)
        return self.end if self.end is not None else self.told  # type: ignore[return-value]

    # -- saying ----------------------------------------------------------------------------------------------------

    def say(self, message: AnyWorkerMessage) -> None:
        if self.link is not None:
            try:
                self.link.send(message)
            except AgentGone:
                self.poll()

    def say_ready(self, ready: Ready) -> None:
        self.waiting = ready
        self.say(ready)

    def say_failed(self, number: int, step: int, error: str, ready: Ready) -> None:
        self.waiting = ready
        self.say(PeerLost(round=number, step=step, error=error))

    def _introduce(self) -> None:
        if self.waiting is not None:
            self.say(self.waiting)
        elif self.number >= 0:
            self.say(Status(round=self.number, members=self.members, step=self.step()))
        if self.number >= 0 and self.comm.rank == 0:
            self.repeat()

    # -- meeting ---------------------------------------------------------------------------------------------------

    def meet(self, form: FormRound, mine: dict[str, Any]) -> tuple[Comm, list[dict[str, Any]]]:
        """Meet the members of `form` at its store: a new comm, and what each member says of itself, by rank.

        Nothing blocks for long: while members are missing, a newer round ends the wait (Superseded). Raises CommFailed
        when the store cannot be reached, or when members stay away for the round's timeout; a newcomer without state
        waits on, because those who train may come late, from a long evaluation.
        """
        rank, world = form.members.index(self.worker), len(form.members)
        if world == 1:
            return Comm(0, 1, self.device), [mine]
        store = connect_store(form.store_host, form.store_port)
        prefix = f"{self.job}/{form.round}"
        keys = [f"{prefix}/here/{r}" for r in range(world)]
        deadline = time.monotonic() + form.timeout_s
        pause_s = 0.0005
        try:
            store.set(keys[rank], json.dumps(mine))
            while not store.check(keys):
                if self.newer_than(form.round):
                    raise Superseded
                if mine["exists"] and time.monotonic() > deadline:
                    here = [m for m, k in zip(form.members, keys, strict=True) if not store.check([k])]
                    raise CommFailed(f"round {form.round}: {', '.join(here)} did not come within {form.timeout_s} s")
                time.sleep(pause_s)
                pause_s = min(0.01, pause_s * 1.5)
            said = [json.loads(value) for value in store.multi_get(keys)]
        except RuntimeError as error:
            if isinstance(error, CommFailed):
                raise
            raise CommFailed(f"the store at {form.store_host}:{form.store_port} failed: {error}") from error
        own_host = mine.get("host") or "localhost"
        comm = Comm(rank, world, self.device, store, prefix, own_host, form.timeout_s)
        return comm, said

    def adopt(self, form: FormRound, comm: Comm) -> Comm:
        """The round of `form` is in force. Returns the comm of the one before, to be closed."""
        old, self.comm = self.comm, comm
        self.number, self.members = form.round, form.members
        self.waiting = None
        if self.told is not None and self.told.round <= form.round:
            self.told = None
        return old

    def forget_old_keys(self, previous: int, n_previous: int) -> None:
        """Delete what an earlier round left in the store. Best effort: it may have used another node's store."""
        store = self.comm.store
        if previous < 0 or store is None:
            return
        try:
            for rank in range(n_previous):
                store.delete_key(f"{self.job}/{previous}/here/{rank}")
                store.delete_key(f"{self.job}/{previous}/0/{rank}")
        except RuntimeError:
            return
