"""The ranks of overlap.py: `python -m perf.overlap_ranks RANK LINK MEETING ROUNDS`; rank 0 prints seconds as JSON.

One thread a rank, bfloat16, sums in float32. Ranks run the same cases in the same order and meet before each measurement. Layers
are taken in turn, so that weights come from memory as in a step.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from vnext.models.layers.layers import Linear, Step, operations, row, summed_beside
from vnext.models.layers.sharding import Parallel
from vnext.runtime.rank.loading import start_threads
from vnext.runtime.transport.collectives.group import StoreAddress, join_group, leave_group

SHAPES = {"135M": ((288, 576), (768, 576)), "0.6B": ((1024, 1024), (1536, 1024))}
"""(inputs on one of two ranks, outputs) of a layer's row-parallel products: behind attention, of the MLP."""
ROWS, LAYERS, WARMUPS = (1, 32, 512), 8, 2


def main() -> None:
    """Take part in every case."""
    rank, link, meeting, rounds = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    start_threads(1)
    parallel = join_group(rank, 2, Path(meeting) if link == "memory" else StoreAddress(meeting, "127.0.0.1"))
    with ThreadPoolExecutor(1) as beside:
        if link == "memory":
            parallel = replace(parallel, begin_all_reduce=lambda tensor: beside.submit(parallel.all_reduce, tensor).result)
        found = {shape: {rows: measured(parallel, sizes, rows, rounds) for rows in ROWS} for shape, sizes in SHAPES.items()}
    leave_group()
    if rank == 0:
        print(json.dumps(found))


def measured(parallel: Parallel, sizes: tuple[tuple[int, int], ...], rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds that a layer's row-parallel products take in each form, of each round; the forms are asked in turn, to and fro."""
    torch.manual_seed(parallel.rank)
    step: Any = Step(operations("cpu"), None, parallel, None, None, None, None, 1.0, 0)  # type: ignore[arg-type]
    layers = [[_given(rows, *size) for size in sizes] for _ in range(LAYERS)]
    forms = _forms(step, rows)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    turns = itertools.cycle(layers)
    for round_ in range(rounds + WARMUPS):
        for name in list(forms)[:: 1 if round_ % 2 else -1]:
            layer = next(turns)
            parallel.all_reduce(torch.zeros(1))
            began_s = time.perf_counter()
            for x, linear in layer:
                forms[name](x, linear)
            seconds[name].append(time.perf_counter() - began_s)
    return {name: taken[WARMUPS:] for name, taken in seconds.items()}


def _forms(step: Step, rows: int) -> dict[str, Callable[[torch.Tensor, Linear], Any]]:
    """What is done with x and a weight, by name."""
    chosen, parallel, half = step.operations, step.parallel, -(-rows // 2)
    whole = step._replace(parallel=replace(parallel, begin_all_reduce=None))
    forms: dict[str, Callable[[torch.Tensor, Linear], Any]] = {
        "product": lambda x, linear: chosen.sums(x, linear.weight),
        "sum": lambda x, linear: parallel.all_reduce(torch.zeros(rows, linear.weight.shape[0])),
        "whole": lambda x, linear: row(x, linear, whole),
    }
    if rows > 1:
        forms["split"] = lambda x, linear: summed_beside(x.split(half), linear.weight, step)
    return forms


def _given(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, Linear]:
    weight = operations("cpu").pack_weight(torch.randn(outputs, inputs, dtype=torch.bfloat16), "plain", 1)
    return torch.randn(rows, inputs, dtype=torch.bfloat16), Linear(weight, None)


if __name__ == "__main__":
    main()
