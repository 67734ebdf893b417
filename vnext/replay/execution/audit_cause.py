"""What explains tokens that a model does not give again: one changed token, another parameter, or other numbers.

Owns the hypotheses. Each is tried on the whole answer of a request, alone: it explains the answer if every token then comes out
again. A seed or a prompt leaves nothing to try, and is what remains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vnext.replay.execution.execution import numerics_of
from vnext.replay.execution.recorded import Walk
from vnext.replay.rerun.numerics import CannotRun
from vnext.state.params import DEFAULTS, Sampling

if TYPE_CHECKING:
    from vnext.replay.execution.execution import ModelChoice, TokenDifference
    from vnext.replay.execution.recorded import Reported
    from vnext.replay.rerun.alone import Alone
    from vnext.replay.rerun.machine import Machine

EXPLAINED = 4
"""Requests that are looked at in detail."""
TEMPERATURES = tuple(tenth / 10 for tenth in range(21))
NUMERICS: tuple[dict[str, object], ...] = (
    {"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}, {"quantization": "none"},
    {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "auto"},
)  # fmt: skip
replace = msgspec.structs.replace


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """As audit.Finding."""

    field: str
    message: str
    recorded: str
    found: str
    request: int
    position: int
    step: int


def causes_of(
    differences: list[TokenDifference], walk: Walk, machine: Machine, chosen: ModelChoice, sampled: int
) -> list[Cause]:
    """A cause for each of the first requests that differ, the earliest token first. `sampled` requests were compared."""
    from vnext.replay.rerun.alone import Alone

    firsts: dict[int, TokenDifference] = {}
    for found in sorted(differences, key=lambda each: (each.step, each.position)):
        firsts.setdefault(found.request, found)
    alone = Alone(machine, walk.first.config)
    causes = [_cause(found, walk, alone) for found in list(firsts.values())[:EXPLAINED]]
    unknown = [firsts[cause.request] for cause in causes if cause.field == UNKNOWN]
    if unknown and (found := _numerics(unknown, walk, machine, chosen)):
        return [found]
    if len(unknown) == len(causes) and 2 * len(firsts) >= sampled and unknown:
        message = "most requests differ: the weights, the configuration or the numbers of the model are not those of the log"
        first = unknown[0]
        return [_made(first, "model or numerics", message, str(first.recorded), str(first.again), first.position), *causes]
    return causes


UNKNOWN = "seed, prompt or another parameter"


def _cause(first: TokenDifference, walk: Walk, alone: Alone) -> Cause:
    reported = walk.reported[first.request]
    for field, recorded, found, position in (*_token(reported, alone), *_parameters(reported, alone)):
        message = f"with {field} {found} instead of {recorded}, every token of request {first.request} comes out again"
        where = first.position if position < 0 else position
        return _made(first, field, message, recorded, found, where)
    message = (
        f"request {first.request} has token {first.recorded} at position {first.position} where the model gives {first.again}, and "
        "neither one changed token nor a usual value of a parameter explains it"
    )
    return _made(first, UNKNOWN, message, str(first.recorded), str(first.again), first.position)


def _made(first: TokenDifference, field: str, message: str, recorded: str, found: str, position: int) -> Cause:
    return Cause(
        field=field, message=message, recorded=recorded, found=found, request=first.request, position=position, step=first.step
    )


Hypothesis = tuple[str, str, str, int]
"""The field, its recorded value, the value that explains the answer, and the position or -1."""


def _token(reported: Reported, alone: Alone) -> Iterator[Hypothesis]:
    """The first token that differs was another one."""
    tokens, sampling = np.array(reported.tokens, dtype=np.int32), reported.request.sampling
    wrong = next(_wrong(reported, tokens, sampling, alone), None)
    if wrong is None:
        return
    position, again = wrong
    changed = tokens.copy()
    changed[position] = again
    if next(_wrong(reported, changed, sampling, alone), None) is None:
        yield "token", str(tokens[position]), str(again), position


def _parameters(reported: Reported, alone: Alone) -> Iterator[Hypothesis]:
    """A parameter had another value."""
    tokens, recorded = np.array(reported.tokens, dtype=np.int32), reported.request.sampling
    for name, value in _values(recorded):
        if next(_wrong(reported, tokens, replace(recorded, **{name: value}), alone), None) is None:
            yield name, str(getattr(recorded, name)), str(value), -1
            return


def _values(recorded: Sampling) -> Iterator[tuple[str, object]]:
    yield from (("temperature", each) for each in TEMPERATURES if each != recorded.temperature)
    usual = {name: value for name, value in DEFAULTS.items() if name != "temperature"}
    yield from ((name, value) for name, value in (usual | {"logit_bias": ()}).items() if getattr(recorded, name) != value)
    yield from (("top_p", each) for each in (0.9, 0.95, 0.8) if each != recorded.top_p)
    yield from (("top_k", each) for each in (20, 40, 50) if each != recorded.top_k)


def _wrong(reported: Reported, tokens: np.ndarray, sampling: Sampling, alone: Alone) -> Iterator[tuple[int, int]]:
    """(position, the model's token) of each token of the answer that differs."""
    request = replace(reported.request, sampling=sampling)
    for begin, end, weights in reported.spans(request.prompt_length):
        if not alone.versions.is_here(weights):
            continue
        alone.versions.take(weights)
        for position, again, _ in alone.answers(request, tokens[:end], begin):
            if again != tokens[position]:
                yield position, again


def _numerics(unknown: list[TokenDifference], walk: Walk, machine: Machine, chosen: ModelChoice) -> Cause | None:
    """Whether the model computed with other numbers than the log says: those that explain all these requests."""
    from vnext.replay.rerun.alone import Alone
    from vnext.replay.rerun.machine import open_machine

    started, first = walk.log.header.started, unknown[0]
    for change in NUMERICS:
        if all(getattr(machine.numerics, name) == value for name, value in change.items()):
            continue
        try:
            numerics = numerics_of(walk, chosen.changes | change)
            other = open_machine(started, chosen.model, numerics, chosen.any_model, walk.adapter_folders(), chosen.weights)
        except CannotRun:
            continue
        alone, (field, value) = Alone(other, walk.first.config), next(iter(change.items()))
        if all(_comes_out(walk.reported[found.request], alone) for found in unknown):
            recorded = str(getattr(machine.numerics, field))
            message = f"with {field} {value} instead of {recorded}, requests that differ come out again"
            return _made(first, field, message, recorded, str(value), first.position)
    return None


def _comes_out(reported: Reported, alone: Alone) -> bool:
    tokens = np.array(reported.tokens, dtype=np.int32)
    return next(_wrong(reported, tokens, reported.request.sampling, alone), None) is None
