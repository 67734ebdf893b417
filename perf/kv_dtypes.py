"""Decode attention from caches of int8 beside caches of bfloat16: `python -m perf.kv_dtypes --json RECORD`.

Owns the pairing. Both caches hold the same numbers, in pages of several layers as the engine keeps them, and exceed the last-level
cache. A round reads all layers of each once, in turns; medians of the thread's processor time count. GB/s are those of the bytes
that a cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from vnext.commands.machine import machine
from vnext.kernels import mxint8
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cpu import attention, native
from vnext.kernels.cpu.memory import huge

BLOCK_SIZE = 16
CONTEXT = 8192


class Case(NamedTuple):
    """Rows of one query each; `group` query heads share a key head."""

    rows: int
    group: int
    head_dim: int
    kv_heads: int


def pages_of(case: Case, pages: int, layers: int, dtype: torch.dtype) -> torch.Tensor:
    """[pages, layers, 2, kv_heads, BLOCK_SIZE, W], the same numbers in every dtype, in huge pages."""
    width = mxint8.packed_width(case.head_dim) if dtype is torch.int8 else case.head_dim
    shape = (pages, layers, 2, case.kv_heads, BLOCK_SIZE, width)
    memory = torch.from_numpy(huge(int(np.prod(shape)) * dtype.itemsize)).view(dtype).view(shape)
    for page in range(0, pages, 64):
        part = memory[page : page + 64]
        generator = torch.Generator().manual_seed(page)
        numbers = mxint8.pack(torch.randn(*part.shape[:-1], case.head_dim, generator=generator))
        part[:] = numbers if dtype is torch.int8 else mxint8.unpack(numbers, case.head_dim).to(dtype)
    return memory


def reader(case: Case, layers: int, dtype: torch.dtype) -> tuple[Callable[[], torch.Tensor], int]:
    """What attends in all layers and returns the last result; the bytes that it reads."""
    pages = case.rows * CONTEXT // BLOCK_SIZE
    memory = pages_of(case, pages, layers, dtype)
    table = torch.from_numpy(np.random.default_rng(0).permutation(pages).astype(np.int32)).view(case.rows, -1)
    heads = case.group * case.kv_heads
    query = torch.randn(case.rows, heads, case.head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    lengths = np.full(case.rows, CONTEXT)
    step = attention.plan(AttentionStep(np.arange(case.rows + 1), lengths, table, BLOCK_SIZE, case.kv_heads), heads)

    def attend() -> torch.Tensor:
        for layer in range(layers):
            found = attention.paged_attention(query, AttentionCall(memory[:, layer, 0], memory[:, layer, 1], step, case.head_dim**-0.5))
        return found

    return attend, memory.nbytes


def measure(case: Case, rounds: int, threads: int, megabytes: int) -> dict[str, float]:
    layer_bytes = 2 * case.rows * CONTEXT * case.kv_heads * mxint8.packed_width(case.head_dim)
    layers = -(-megabytes * 2**20 // layer_bytes)
    readers = {dtype: reader(case, layers, dtype) for dtype in (torch.bfloat16, torch.int8)}
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in readers}
    results = [attend() for attend, _ in readers.values()]
    assert torch.equal(*results), "the two caches give different results"
    for _ in range(rounds):
        for dtype, (attend, _) in readers.items():
            began = clock()
            attend()
            seconds[dtype].append(clock() - began)
    medians = {dtype: statistics.median(found) for dtype, found in seconds.items()}
    speeds = {f"{str(dtype)[6:]}_gb_per_s": round(size / medians[dtype] / 1e9, 1) for dtype, (_, size) in readers.items()}
    return {**speeds, "times_as_fast": round(medians[torch.bfloat16] / medians[torch.int8], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 3, 4, 8], help="query heads of a key head")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--levels", nargs="+", default=[level.name for level in native.Level if level <= native.best_level()])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=70, help="of the smaller cache at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    native.start(options.threads, 200)
    before, found = machine(), []
    for level, head_dim, group, rows in product(options.levels, options.head_dims, options.groups, options.rows):
        native.set_level(native.Level[level])
        case = Case(rows, group, head_dim, options.kv_heads)
        found.append({"level": level, **case._asdict(), **measure(case, options.rounds, options.threads, options.megabytes)})
        print(json.dumps(found[-1]), flush=True)
    if options.json:
        record = {"command": "python -m perf.kv_dtypes " + " ".join(sys.argv[1:]), "context": CONTEXT, "threads": options.threads}
        record |= {"machine": msgspec.to_builtins(before), "load_at_the_end": msgspec.to_builtins(machine()), "cases": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
