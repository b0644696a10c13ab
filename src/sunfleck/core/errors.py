"""PURE. Errors say what happened, to which node or job, and what to do about it."""

from __future__ import annotations


class SunfleckError(Exception):
    """Base of every error meant for a user: one line that names the fix. `exit_code` is the command's."""

    exit_code = 1


class InvalidRequest(SunfleckError):
    """The request can never work as it stands (permanent)."""

    exit_code = 2


class PoolUnavailable(SunfleckError):
    """No controller answers (transient: start or restart the pool)."""

    exit_code = 3


class InvalidTransition(SunfleckError):
    """A state machine was asked for a move that its table does not have. Always a bug of ours; tells its story."""


class JournalUnavailable(SunfleckError):
    """Events cannot be written right now (transient). They stay in memory, are written with the next commit that
    succeeds, and training goes on meanwhile: warn, and keep going."""

    exit_code = 4
