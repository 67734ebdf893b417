"""The limits of the machine: reading memory, multiplying matrices, allocating memory. `python -m perf.peers.limits SHAPE`

These bound the figures: a decoded token reads every weight once, a prompt's token multiplies with every weight once. Both are
measured in torch with the engines' number of threads; the best of several runs counts, because it is a bound. Of products in
bfloat16 and in float32 the faster one is the bound: without instructions for bfloat16, engines widen weights. A third limit is
the rate at which a process gets memory, once new and once returned and taken again. The host of a virtual machine may take
fifty times longer for new memory, and a prompt whose keys go to new pages waits for it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import torch

from perf.peers.files import token_bytes_of
from perf.peers.shapes import Shape, shape_of, tensor_shapes

READ_BYTES = 768 * 2**20  # more than any cache holds
GEMM_ROWS = 512
READ_REPEATS, GEMM_REPEATS = 7, 20
GEMM_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NEW_BYTES = 2**30
BFLOAT16_BYTES = 2


def best_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest call, after one that does not count."""
    work()
    spent_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        spent_s.append(time.perf_counter() - begin_s)
    return min(spent_s)


def read_gb_per_s() -> float:
    """A sum over float32 that no cache holds, in 10^9 bytes a second."""
    values = torch.ones(READ_BYTES // 4)
    return READ_BYTES / best_s(values.sum, READ_REPEATS) / 1e9


def given_gb_per_s() -> tuple[float, float]:
    """A byte written to each page of memory that was just asked for, huge pages if it may; handed back, and once more."""
    figures = []
    with mmap.mmap(-1, NEW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for _ in range(2):
            begin_s = time.perf_counter()
            memory[:: mmap.PAGESIZE] = bytes(NEW_BYTES // mmap.PAGESIZE)
            figures.append(NEW_BYTES / (time.perf_counter() - begin_s) / 1e9)
            memory.madvise(mmap.MADV_DONTNEED)
    return figures[0], figures[1]


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """[out, in] of one layer's distinct products, by name."""
    prefix = "model.layers.0."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): sizes
        for name, sizes in tensor_shapes(shape).items()
        if name.startswith(prefix) and len(sizes) == 2
    }


def gemm_tflops(shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """10^12 operations a second of [512, in] by [out, in] transposed, for each product of a layer and "layer": all."""
    operations, spent_s = {}, {}
    for name, (rows_out, columns_in) in matrices(shape).items():
        weight = torch.randn(rows_out, columns_in).to(dtype)
        states = torch.randn(GEMM_ROWS, columns_in).to(dtype)
        operations[name] = 2 * GEMM_ROWS * rows_out * columns_in
        spent_s[name] = best_s(partial(torch.nn.functional.linear, states, weight), GEMM_REPEATS)
    figures = {name: operations[name] / spent_s[name] / 1e12 for name in operations}
    return figures | {"layer": sum(operations.values()) / sum(spent_s.values()) / 1e12}


def weight_counts(shape: Shape) -> dict[str, int]:
    """Weights that a decoded token reads, and those that each token of a prompt is multiplied with.

    The embedding is read as the output layer, once a token; a prompt's tokens need that layer at their last one only.
    """
    tensors = tensor_shapes(shape)
    total = sum(prod(sizes) for sizes in tensors.values())
    embedding = prod(tensors["model.embed_tokens.weight"])
    return {
        "read_per_decoded_token": total if shape.tied else total - embedding,
        "multiplied_per_prompt_token": total - embedding * (1 if shape.tied else 2),
    }


def cache_bytes_per_token(shape: Shape) -> int:
    """Keys and values of all layers, in bfloat16."""
    return 2 * shape.layer_count * shape.kv_head_count * shape.head_dim * BFLOAT16_BYTES


def measured(shape: Shape, threads: int) -> dict[str, object]:
    """All limits and the counts that turn them into bounds of tokens a second."""
    torch.set_num_threads(threads)
    new, again = given_gb_per_s()  # first, before this process returns any memory
    read, counts = read_gb_per_s(), weight_counts(shape)
    gemms = {name: gemm_tflops(shape, dtype) for name, dtype in GEMM_DTYPES.items()}
    fastest = max(gemms, key=lambda name: gemms[name]["layer"])
    multiplying_s = 2 * counts["multiplied_per_prompt_token"] / (gemms[fastest]["layer"] * 1e12)
    paging_s = cache_bytes_per_token(shape) / (new * 1e9)
    return {
        "threads": threads,
        "read_gb_per_s": round(read, 2),
        "gemm_dtype": fastest,
        "gemm_tflops": {name: round(value, 3) for name, value in gemms[fastest].items()},
        "layer_tflops": {name: round(figures["layer"], 3) for name, figures in gemms.items()},
        "new_memory_gb_per_s": round(new, 2),
        "memory_again_gb_per_s": round(again, 2),
        "weights": counts,
        "cache_bytes_per_token": cache_bytes_per_token(shape),
        "decode_bound_tokens_per_s": round(read * 1e9 / (BFLOAT16_BYTES * counts["read_per_decoded_token"]), 1),
        "prefill_bound_tokens_per_s": round(1 / multiplying_s, 1),
        "prefill_to_new_memory_bound_tokens_per_s": round(1 / (multiplying_s + paging_s), 1),
    }


def measured_of_file(file: Path, threads: int) -> dict[str, object]:
    """Reading alone, which bounds decoding: what multiplies by few bits is each engine's own."""
    torch.set_num_threads(threads)
    read, size = read_gb_per_s(), token_bytes_of(file)
    bound = round(read * 1e9 / size, 1)
    return {"threads": threads, "read_gb_per_s": round(read, 2), "bytes_per_decoded_token": size, "decode_bound_tokens_per_s": bound}


def main() -> int:
    parser = argparse.ArgumentParser(description="What the machine itself can do.")
    parser.add_argument("shape", help="or a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    file = Path(options.shape)
    print(json.dumps(measured_of_file(file, options.threads) if file.is_file() else measured(shape_of(options.shape), options.threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
