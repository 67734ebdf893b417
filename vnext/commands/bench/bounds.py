"""Bounds on figures, as people write them: `ttft.p99<500ms`, `failed<=0`, and which figures each command has.

A bound on a figure that a command has not is refused before anything is measured.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import isinf
from types import MappingProxyType

import msgspec

from vnext.base.spelling import close_to
from vnext.commands.bench import energy
from vnext.commands.bench.figures import PERCENTS, rates, server_figures, spread_ms
from vnext.commands.bench.load.events import Piece
from vnext.commands.bench.load.generator import Timeline
from vnext.commands.bench.server_runs import MeasurementFailed
from vnext.options.parser import Given
from vnext.runtime.protocol.settings import SettingsError

BOUND = re.compile(r"\s*([A-Za-z_]\w*)(?:\.(\w+(?:\.\d+)?))?\s*(<=|>=|<|>)\s*([0-9.]+(?:e[+-]?\d+)?)\s*(us|ms|s|%)?\s*")
HOLDS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
)
IN_MS = MappingProxyType({"us": 1e-3, "ms": 1.0, "s": 1e3})
KINDS = MappingProxyType({"mean": "mean", "median": "p50", "avg": "mean"})

_ANSWER = Timeline(
    intended_s=0.0, sent_s=1.0, pieces=(Piece(1.0, 1), Piece(2.0, 1)), input_tokens=1, output_tokens=2, ended_s=2.0, error=""
)
_TIMES, _SHAPED = tuple(server_figures([_ANSWER], 1.0)), ("rate_asked_per_s", "rate_reached_per_s")
_SERVED = (*_TIMES, *_SHAPED, "client_late_p99_ms", "client_cores")
_SIZED = ("gpus_each", "replicas", "gpus", "price", "max_num_seqs", "blocks", "cache_tokens")
FIGURES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "serve": (*_SERVED, *energy.FIGURES),
    "sweep": ("knee_request_rate", "knee_concurrency", "good_share", *_SERVED), "throughput": _SERVED,
    "latency": (
        "repeats", "batch", "output_tokens_a_batch", *spread_ms([0.0], "batch"), *spread_ms([0.0], "step"), "weights_mb_a_step",
        "memory_read_gb_per_s", "share_of_memory_bound",
    ),
    "startup": ("starts", "first_start_ms", *spread_ms([0.0], "ready"), *spread_ms([0.0], "first_token")),
    "cache": ("gain_{hit_rates}", "hit_share_{hit_rates}", "saved_{hit_rates}"),
    "allreduce": (
        "switch_kib_{ranks}", *(f"{form}_us_{{ranks}}_{{sizes}}" for form in ("library", "one_shot", "two_shot"))
    ),
    "comm": tuple(f"{name}_{form}_{{batches}}" for form in ("incremental", "full") for name in ("bytes", "total_us")),
    "sched": ("schedule_us_{batches}", "broadcast_us_{batches}", "idle_share_ahead_{batches}"),
    "overlap": ("hidden_share_{batches}", "control_us_{batches}", "exposed_us_{batches}"),
    "size": (*_SIZED, *_TIMES, *_SHAPED),
    "simulate": ("knee_request_rate", "good_share", "price", *_TIMES, *_SHAPED),
})  # fmt: skip
"""By command. {option}: once for each number of this option."""
LISTED = re.compile(r"\{(\w+)\}")


class UnknownFigure(Exception):
    """A bound on a figure that a command does not have: one sentence."""


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


def require_measured(bounds: Sequence[Bound], given: Given, flag: str = "--assert") -> None:
    """Raises SettingsError or UnknownFigure, before anything is measured, for a figure that the command does not have."""
    kinds, known = ("mean", *(f"p{percent}" for percent in PERCENTS)), list(figures_of(given))
    for bound in bounds:
        if bound.is_time and bound.figure.rsplit("_", 2)[-2] not in kinds:
            raise SettingsError(f"{flag} {bound.text}: of a time there are {', '.join(kinds)}.")
        if bound.figure not in known:
            none = f"{flag} {bound.text}: {given.command} has no figure {bound.figure} here"
            close = close_to(bound.figure, known, cutoff=0.85)
            raise UnknownFigure(f"{none}: did you mean {close}?" if close else f"{none}; it has {', '.join(known)}.")


def figures_of(given: Given) -> Iterator[str]:
    """The names of the figures that a command may have with its options. A server may leave some of them out."""
    command, values = given.command, given.values
    if command == "throughput" and not values["url"]:
        yield from rates(1, 1, 1, 1.0)
        return
    rate = 0.0 if values.get("concurrencies") or values.get("dataset_name") == "agent" else values.get("request_rate", 1.0)
    has_rate = rate and not isinf(rate)
    absent = {"knee_request_rate" if values.get("concurrencies") else "knee_concurrency", *(() if has_rate else _SHAPED)}
    absent |= set() if values.get("goodput") else {"good_share"}
    absent |= set() if values.get("energy") else {*energy.FIGURES}
    for name in FIGURES[command]:
        numbers = product(*([word.strip() for word in values[option].split(",")] for option in LISTED.findall(name)))
        yield from (LISTED.sub("{}", name).format(*each) for each in numbers if name not in absent)


def broken(bounds: Sequence[Bound], figures: Mapping[str, float], flag: str = "--assert") -> list[str]:
    """A sentence on each bound that does not hold. Raises MeasurementFailed for a figure that the report lacks."""
    for bound in bounds:
        if bound.figure not in figures:
            raise MeasurementFailed(f"{flag} {bound.text}: there is no figure {bound.figure}; there are {', '.join(figures)}.")
    wrong = [bound for bound in bounds if not HOLDS[bound.sign](figures[bound.figure], bound.value)]
    return [f"{bound.text} does not hold: {bound.figure} is {figures[bound.figure]:,}" for bound in wrong]
