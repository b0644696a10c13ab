"""Options and parameter types that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sunfleck.api import parse_target
from sunfleck.core.errors import InvalidRequest
from sunfleck.core.model import Target

F = TypeVar("F", bound=Callable[..., Any])


def pool_options(command: F) -> F:
    """--pool and --home: which pool is meant."""
    command = click.option("--home", metavar="DIR", help="Folder for pools [default: your state folder].")(command)
    return click.option("--pool", metavar="NAME", help="Name of the pool [default: default].")(command)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of a table.")(command)


class NodesRange(click.ParamType[tuple[int, int, int]]):
    """MIN:MAX, MIN:MAX:MULTIPLE, or N for exactly N."""

    name = "MIN:MAX[:MULTIPLE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)(?::(\d+)(?::(\d+))?)?", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not MIN:MAX, for example 1:8 (or 2:32:2 for even sizes)", param, ctx)
        low = int(match[1])
        return low, int(match[2] or low), int(match[3] or 1)


class TargetType(click.ParamType[Target]):
    """METRIC>=VALUE or METRIC<=VALUE."""

    name = "METRIC>=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        if isinstance(value, Target):
            return value
        try:
            return parse_target(str(value))
        except (InvalidRequest, ValueError) as error:
            self.fail(str(error), param, ctx)


class KeyValue(click.ParamType[tuple[str, str]]):
    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, sep, text = str(value).partition("=")
        if not sep or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key, text
