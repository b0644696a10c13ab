"""PURE. Policies by name, made from plain options, so that commands and files can name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from sunfleck.core.errors import InvalidRequest

from .base import Policy
from .optimum import Optimum, OptimumOptions
from .profiler import ProfilerOptions

DEFAULT = "optimum"


def _options(kind: type[Any], given: dict[str, Any]) -> Any:
    """Options of a policy; those of the profiler may be given flat. Raises InvalidRequest for unknown names."""
    own = {f.name for f in fields(kind)}
    inner = {f.name for f in fields(ProfilerOptions)} if "profiler" in own else set()
    for name in given:
        if name not in own | inner:
            known = ", ".join(sorted((own | inner) - {"profiler"}))
            raise InvalidRequest(f"unknown policy option `{name}`; the options are: {known}")
    profiling = {name: value for name, value in given.items() if name in inner}
    if profiling:
        given = {name: value for name, value in given.items() if name not in inner}
        given["profiler"] = ProfilerOptions(**profiling)
    return kind(**given)


def _optimum(options: dict[str, Any]) -> Policy:
    return Optimum(_options(OptimumOptions, options))


_MAKERS: dict[str, Callable[[dict[str, Any]], Policy]] = {"optimum": _optimum}


def names() -> tuple[str, ...]:
    """Every policy there is, the default first."""
    return tuple(_MAKERS)


def make(name: str = DEFAULT, **options: Any) -> Policy:
    """The policy of that name. Raises InvalidRequest for an unknown name, option or value."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise InvalidRequest(f"unknown policy `{name}`; the policies are: {', '.join(_MAKERS)}")
    try:
        return maker(options)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"policy `{name}`: {error}") from error
