"""PURE. Policies by name, made from plain options, so that commands and files can name them.

| name | allocation | curves | costs it believes in | profiles |
|---|---|---|---|---|
| optimum | exact, number of running jobs included | measured online | measured, starts included | as needed |
| paper-milp | the node-indexed MILP as published | as given, or measured | starts free | no |
| equal-share | nodes / jobs | none | none | no |
| greedy | steepest ascent | as given, or measured | none | no |
| rigid | fixed sizes in the holes | none | none | no |
| oracle | exact | true | none | no |
| freetrain-true, -linear, -noisy | exact | a user's: true, linear, +-30 % | starts free | no |
| malletrain | exact | measured online | starts free | 20 s at each of 4 scales |

The freetrain and malletrain policies solve the published problem exactly instead of within a solver's gap, which can
only flatter them. `curves` (a CurveSource) is needed by those marked true, linear or noisy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from sunfleck.core.errors import InvalidRequest

from . import curves
from .base import Policy
from .baselines import EqualShare, EqualShareOptions, Greedy, GreedyOptions, Rigid, RigidOptions
from .optimum import Optimum, OptimumOptions
from .profiler import ProfilerOptions

DEFAULT = "optimum"
PUBLISHED_RUNNING = 10
PUBLISHED_T_FWD_S = 120.0
PUBLISHED_HOLD_S = 20.0
_OFF = {"n_scales": 0}


def _options(kind: type[Any], given: dict[str, Any]) -> Any:
    """Options of a policy; those of the profiler may be given flat. Raises InvalidRequest for unknown names."""
    own = {f.name for f in fields(kind)}
    inner = {f.name for f in fields(ProfilerOptions)} if "profiler" in own else set()
    for name in given:
        if name not in own | inner:
            known = ", ".join(sorted((own | inner) - {"profiler"}))
            raise InvalidRequest(f"unknown policy option `{name}`; the options are: {known}")
    profiling = {name: value for name, value in given.items() if name in inner}
    given = {name: value for name, value in given.items() if name not in inner}
    if "t_fwd_s" in given and given["t_fwd_s"] == "auto":
        given["t_fwd_s"] = None
    options = kind(**given)
    if not profiling:
        return options
    return replace(options, profiler=replace(options.profiler, **profiling))


def _optimum(given: dict[str, Any]) -> Policy:
    return Optimum(_options(OptimumOptions, given))


def _oracle(given: dict[str, Any]) -> Policy:
    _needs_curves("oracle", given)
    fixed = {**_OFF, "free_rescale": True, "forecast": False}
    return Optimum(_options(OptimumOptions, {"t_fwd_s": PUBLISHED_T_FWD_S, **given, **fixed}), "oracle")


def _published(name: str, given: dict[str, Any]) -> Policy:
    defaults = {"t_fwd_s": PUBLISHED_T_FWD_S, "max_running": PUBLISHED_RUNNING}
    return Optimum(_options(OptimumOptions, {**defaults, **given, "free_start": True, "forecast": False}), name)


def _freetrain_true(given: dict[str, Any]) -> Policy:
    _needs_curves("freetrain-true", given)
    return _published("freetrain-true", {**given, **_OFF})


def _freetrain_linear(given: dict[str, Any]) -> Policy:
    source = curves.linear(given.get("curves"))
    return _published("freetrain-linear", {**given, **_OFF, "curves": source})


def _freetrain_noisy(given: dict[str, Any]) -> Policy:
    _needs_curves("freetrain-noisy", given)
    given = dict(given)
    source = curves.noisy(given["curves"], given.pop("noise", 0.3), given.pop("seed", 0))
    return _published("freetrain-noisy", {**given, **_OFF, "curves": source})


def _malletrain(given: dict[str, Any]) -> Policy:
    given = {name: value for name, value in given.items() if name != "curves"}
    hold = {"tolerance": 0.0, "max_hold_s": PUBLISHED_HOLD_S, "alone_after_s": 0.0}
    return _published("malletrain", {**hold, **given})


def _paper_milp(given: dict[str, Any]) -> Policy:
    try:
        from .paper_milp import PaperMilp, PaperMilpOptions
    except ImportError as error:
        raise InvalidRequest("policy `paper-milp` needs HiGHS: pip install 'sunfleck[milp]'") from error
    return PaperMilp(_options(PaperMilpOptions, given))


def _equal_share(given: dict[str, Any]) -> Policy:
    return EqualShare(_options(EqualShareOptions, given))


def _greedy(given: dict[str, Any]) -> Policy:
    return Greedy(_options(GreedyOptions, given))


def _rigid(given: dict[str, Any]) -> Policy:
    return Rigid(_options(RigidOptions, given))


def _needs_curves(name: str, given: dict[str, Any]) -> None:
    if given.get("curves") is None:
        raise InvalidRequest(f"policy `{name}` needs the jobs' true scaling curves, which only a simulation has")


_MAKERS: dict[str, Callable[[dict[str, Any]], Policy]] = {
    "optimum": _optimum,
    "paper-milp": _paper_milp,
    "equal-share": _equal_share,
    "greedy": _greedy,
    "rigid": _rigid,
    "oracle": _oracle,
    "freetrain-true": _freetrain_true,
    "freetrain-linear": _freetrain_linear,
    "freetrain-noisy": _freetrain_noisy,
    "malletrain": _malletrain,
}


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
