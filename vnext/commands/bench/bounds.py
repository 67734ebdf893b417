"""Bounds on figures, as people write them: `ttft.p99<500ms`, `failed<=0`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from vnext.commands.bench.figures import PERCENTS
from vnext.commands.bench.server_runs import MeasurementFailed
from vnext.runtime.protocol.settings import SettingsError

BOUND = re.compile(r"\s*([A-Za-z_]\w*)(?:\.(\w+(?:\.\d+)?))?\s*(<=|>=|<|>)\s*([0-9.]+(?:e[+-]?\d+)?)\s*(us|ms|s|%)?\s*")
HOLDS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
)
IN_MS = MappingProxyType({"us": 1e-3, "ms": 1.0, "s": 1e3})
KINDS = MappingProxyType({"mean": "mean", "median": "p50", "avg": "mean"})


class Bound(msgspec.Struct, frozen=True):
    """`text` as the user wrote it; the figure of this name must hold against the value. Times are in ms."""

    text: str
    figure: str
    sign: str
    value: float
    is_time: bool


def bounds_of(texts: Sequence[str], flag: str = "--assert") -> list[Bound]:
    """From the option's texts. Raises SettingsError."""
    return [_bound(text, flag) for text in texts]


def _bound(text: str, flag: str) -> Bound:
    match = BOUND.fullmatch(text)
    try:
        name, kind, sign, number, unit = match.groups() if match else ("", None, "", "", None)
        value = float(number)
    except ValueError:
        raise SettingsError(f"{flag} has {text!r}: write a figure and its bound, as ttft.p99<500ms or failed<=0.") from None
    value *= IN_MS.get(unit or "", 0.01 if unit == "%" else 1.0)
    is_time = kind is not None
    return Bound(text, f"{name}_{KINDS.get(str(kind), kind)}_ms" if is_time else name, sign, value, is_time)


def require_measured(bounds: Sequence[Bound], flag: str = "--assert") -> None:
    """Raises SettingsError, before anything is measured, for a kind of time that no report of ours has."""
    kinds = ("mean", *(f"p{percent}" for percent in PERCENTS))
    for bound in bounds:
        if bound.is_time and bound.figure.rsplit("_", 2)[-2] not in kinds:
            raise SettingsError(f"{flag} {bound.text}: of a time there are {', '.join(kinds)}.")


def broken(bounds: Sequence[Bound], figures: Mapping[str, float], flag: str = "--assert") -> list[str]:
    """A sentence on each bound that does not hold. Raises MeasurementFailed for a figure that the report lacks."""
    for bound in bounds:
        if bound.figure not in figures:
            raise MeasurementFailed(f"{flag} {bound.text}: there is no figure {bound.figure}; there are {', '.join(figures)}.")
    wrong = [bound for bound in bounds if not HOLDS[bound.sign](figures[bound.figure], bound.value)]
    return [f"{bound.text} does not hold: {bound.figure} is {figures[bound.figure]:,}" for bound in wrong]
