"""Recurrent layers of four models on the CPU, beside what bounds them: `python -m perf.recurrence [--json FILE]`.

A decode step reads and writes the states of all layers: beside it stands a pass of `add_` over as many bytes of other memory. A
prompt of 512 tokens through one layer is bound by arithmetic, and the states of a convolution are small: beside these stands a
product of bfloat16 with the layer's own projections. The two take turns, so that other programs slow both: the ratio is the median
of the pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from perf.record import machine, parser_of, record_of, write_record
from vnext.kernels.calls import ConvolutionCall, RecurrenceCall, StateRows
from vnext.kernels.cpu import native
from vnext.kernels.table import operations
from vnext.runtime.processes.thread_plan import TEAM_SPIN_US

PAIRS = 9
PROMPT = 512
LAYERS_MAX = 64
STATES_BYTES = 2**26
"""Of all layers together: far more than the caches hold."""


class Shape(NamedTuple):
    """A model's recurrent layers; `key_dim` 0: a gated convolution alone, of `value_heads` channels."""

    hidden: int
    width: int
    value_heads: int
    value_dim: int = 1
    key_heads: int = 1
    key_dim: int = 0
    is_delta: bool = False

    @property
    def inner(self) -> int:
        """Outputs of the layer's projections."""
        values, keys = self.value_heads * self.value_dim, self.key_heads * self.key_dim
        return 2 * values + 2 * keys + self.value_heads if self.key_dim else 3 * values


SHAPES = {
    "Qwen3.5-0.8B": Shape(1024, 4, 16, 128, 16, 128, True),
    "Qwen3.5-9B": Shape(4096, 4, 32, 128, 16, 128, True),
    "Granite-4-H-350M": Shape(768, 4, 48, 32, 1, 128),
    "LFM2-350M": Shape(1024, 3, 1024),
}


def layers_of(shape: Shape, rows: int, tokens: int) -> tuple[Callable[[], object], int]:
    """(one step of all layers, bytes of the states that it reads)."""
    count, values, keys = rows * tokens, shape.value_heads * shape.value_dim, shape.key_heads * shape.key_dim
    starts = torch.arange(0, count + 1, tokens, dtype=torch.int32)
    places = StateRows(starts, torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool))
    chosen, heads = operations("cpu"), shape.value_heads
    state = (heads, shape.key_dim, shape.value_dim) if shape.key_dim else (shape.width - 1, values)
    dtype = torch.float32 if shape.key_dim else torch.bfloat16
    state_bytes = rows * torch.Size(state).numel() * dtype.itemsize
    layers = max(2, min(LAYERS_MAX, STATES_BYTES // state_bytes)) if tokens == 1 else 1
    pools = [torch.zeros(rows, *state, dtype=dtype) for _ in range(layers)]
    if not shape.key_dim:
        x, weight = torch.randn(count, 3 * values).bfloat16(), torch.randn(values, shape.width).bfloat16()
        convolutions = [ConvolutionCall(weight, None, pool, places, gated=True) for pool in pools]
        return lambda: [chosen.short_convolution(x, call) for call in convolutions], len(pools) * state_bytes
    x, beside = torch.randn(count, 2 * keys + values).bfloat16(), torch.randn(count, 2 * heads).bfloat16()
    zeros, gates = torch.zeros(heads), torch.randn(count, values).bfloat16()
    norm, skips = (torch.ones(shape.value_dim), None) if shape.is_delta else (None, torch.ones(heads))
    strengths = beside[:, heads:] if shape.is_delta else None
    calls = [
        RecurrenceCall(beside[:, :heads], strengths, gates, zeros, zeros, norm, skips, 1e-6, shape.key_heads, pool, places)
        for pool in pools
    ]
    return lambda: [chosen.recur(x, call) for call in calls], len(pools) * state_bytes


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(work: Callable[[], object], bound: Callable[[], object]) -> dict[str, float]:
    """Medians, and that of each pair's bound over its work."""
    work(), bound()
    pairs = [(seconds(work), seconds(bound)) for _ in range(PAIRS)]
    return {
        "ms": round(statistics.median(pair[0] for pair in pairs) * 1e3, 3),
        "bound_ms": round(statistics.median(pair[1] for pair in pairs) * 1e3, 3),
        "of_bound": round(statistics.median(bound / work for work, bound in pairs), 3),
    }


def product_of(shape: Shape, tokens: int) -> Callable[[], object]:
    """The projections of one layer, computed for several tokens at once."""
    chosen = operations("cpu")
    weight = chosen.pack_weight(torch.randn(shape.inner + shape.hidden, shape.hidden).bfloat16())
    x = torch.randn(tokens, shape.hidden).bfloat16()
    return lambda: chosen.linear(x, weight, None)


def repeated(work: Callable[[], object]) -> None:
    for _ in range(LAYERS_MAX):
        work()


def measured(shape: Shape) -> dict[str, object]:
    found: dict[str, object] = {}
    for rows in (1, 8):
        work, state_bytes = layers_of(shape, rows, 1)
        memory, product = torch.zeros(state_bytes // 4), product_of(shape, rows)
        found[f"decode of {rows}"] = paired(work, partial(memory.add_, 1.0) if shape.key_dim else partial(repeated, product))
    shape_work, _ = layers_of(shape, 1, PROMPT)
    found[f"prompt of {PROMPT}"] = paired(shape_work, product_of(shape, PROMPT))
    return found


def main() -> int:
    options = parser_of(__doc__).parse_args()
    before, threads = machine(), len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    native.start(threads, TEAM_SPIN_US)
    shapes = {name: measured(shape) for name, shape in SHAPES.items()}
    for name, figures in shapes.items():
        for what, each in figures.items():
            print(f"{name}, {what}: {each}")
    write_record(options.json, record_of("python -m perf.recurrence", before, {"level": native.level().name, "shapes": shapes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
