"""Split products: from how many rows on a row-parallel product is computed in two parts, so that one's sum travels meanwhile.

Owns the measurement at a rank's start, on the model's own weights. Every rank takes part, and rank 0's choice holds for all: ranks
that split differently would wait for each other's sums for ever. The choice changes no bit, so a busy machine costs time only.
Ranks that follow lost ones take the choice of those, which rank 0 has left in its engine's folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from vnext.models.layers.layers import Attention, GatedMlp, Linear, Step, operations, row
from vnext.models.layers.sharding import Parallel

ROWS = (512, 128)
"""Falling: where the larger one does not pay, the smaller one is not measured."""
ROUNDS = 6
RATIO_MAX = 0.95
"""Of the time in two parts to that of the whole. A gain of less is within what a start on a busy machine can measure."""
NEVER, UNKNOWN = sys.maxsize, -1
_choices = msgspec.json.Decoder(list[tuple[tuple[int, int], int]])


def measured(params: Any, dtype: torch.dtype, parallel: Parallel, known: Path) -> Parallel:
    """The group with `beside_rows_min` of every shape among the row-parallel weights of these tensors; every rank calls it. As it
    is where a part's bits are not those of the whole. `known`: rank 0's file of what was chosen before. Raises RankLost."""
    if not parallel.is_exact:
        return parallel
    before = dict(_choices.decode(known.read_bytes())) if parallel.rank == 0 and known.exists() else {}
    found = {tuple(linear.weight.shape): linear for linear in row_parallel(params)}
    chosen = {shape: _rows_min(linear, dtype, parallel, before.get(shape, UNKNOWN)) for shape, linear in found.items()}
    if parallel.rank == 0:
        draft = known.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(list(chosen.items())))
        draft.replace(known)
        print(f"vnext: sums     products in two parts, one's sum beside the other: {describe(chosen)}", file=sys.stderr)
    return replace(parallel, beside_rows_min=chosen)


def row_parallel(params: Any) -> Iterator[Linear]:
    """The row-parallel products of a tree of parameters, but for experts', which are summed whole."""
    if isinstance(params, Attention | GatedMlp):
        yield params.output if isinstance(params, Attention) else params.down
    elif isinstance(params, tuple):
        for each in params:
            yield from row_parallel(each)


def describe(chosen: dict[tuple[int, int], int]) -> str:
    """The choice, for people."""
    words = [f"of [{out}, {inputs}] from {rows} rows on" for (out, inputs), rows in chosen.items() if rows < NEVER]
    return ", ".join(words) or "none, since none was faster so"


def _rows_min(linear: Linear, dtype: torch.dtype, parallel: Parallel, before: int) -> int:
    if (rows_min := _of_rank_0(parallel, before)) != UNKNOWN:
        return rows_min
    rows_min = NEVER
    for rows in ROWS:
        if not _of_rank_0(parallel, ratio(linear, rows, dtype, parallel) <= RATIO_MAX):
            break
        rows_min = rows
    return rows_min


def _of_rank_0(parallel: Parallel, number: int) -> int:
    return int(parallel.all_gather(torch.tensor([number]), 0)[0])


def ratio(linear: Linear, rows: int, dtype: torch.dtype, parallel: Parallel) -> float:
    """The shortest time in two parts to the shortest of the whole: what disturbs a measurement only lengthens it."""
    out, inputs = linear.weight.shape
    x = torch.ones(rows, inputs, dtype=dtype)
    split, whole = (step_of(replace(parallel, beside_rows_min={(out, inputs): least})) for least in (0, NEVER))
    seconds = [(_seconds(x, linear, split), _seconds(x, linear, whole)) for _ in range(ROUNDS)]
    return min(each for each, _ in seconds) / min(each for _, each in seconds)


def _seconds(x: torch.Tensor, linear: Linear, step: Step) -> float:
    step.parallel.all_reduce(torch.zeros(1))  # ranks begin together
    began_s = time.perf_counter()
    row(x, linear, step)
    return time.perf_counter() - began_s


def step_of(parallel: Parallel) -> Step:
    """What a row-parallel product on a CPU needs of a step."""
    nothing: Any = None
    return Step(operations("cpu"), nothing, parallel, nothing, None, None, None, 1.0, 0)
