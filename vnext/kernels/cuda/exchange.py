"""Sums and joins over ranks through memory that all of them map: launches of `cuda/all_reduce.cu`.

Knows addresses, no processes: who maps what is vnext/runtime/transport/collectives/device_memory.py. All launches of a rank go
to one stream, and every rank launches the same ones in the same order with equal shapes. What they give means nothing once the
rank's watch says so: the caller looks at it after the work is done.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from vnext.kernels.cuda.backends import kernel_for
from vnext.kernels.cuda.interface import SCALARS

SOURCE = "all_reduce.cu"
RANKS_MAX, TURNS_MAX, SETS = 8, 64, 2
SIGNALS_BYTES = 8192
CAPACITY_MULTIPLE_BYTES = 16
WATCH_WORDS = 1 + 2 * RANKS_MAX
"""The host's words: whether it calls the waiting off, which ranks were missing, which came for something else."""
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
THREADS, WARP = 512, 32
TURN_BYTES = 12
CHUNK_BYTES = 16
UNITS_BYTES = (16, 4, 2, 1)


def memory_bytes(capacity_bytes: int) -> int:
    """What each rank gives to the others to map, zeroed: signals, then two sets of one slot."""
    return SIGNALS_BYTES + SETS * capacity_bytes


def sum_over_ranks(
    x: torch.Tensor, memories: torch.Tensor, rank: int, capacity_bytes: int, one_shot_bytes_max: int, timeout_ms: int
) -> torch.Tensor:
    """The sum over ranks of x (float32, bfloat16, float16), dense, in rank order in float32, rounded once.

    `memories` int64[ranks + 1] on x's device: the address of each rank's memory here, then that of the own watch. Goes in
    pieces of a slot; pieces up to `one_shot_bytes_max` by one meeting. Who does not come within `timeout_ms` is missing.
    """
    x = x.contiguous()
    total = torch.empty_like(x)
    flat, flat_total = x.view(-1), total.view(-1)
    piece = capacity_bytes // x.element_size()
    for begin in range(0, flat.shape[0], piece):
        one, out = flat[begin : begin + piece], flat_total[begin : begin + piece]
        _sum_piece(out, one, memories, rank, capacity_bytes, one_shot_bytes_max, timeout_ms)
    return total


def _sum_piece(
    out: torch.Tensor, x: torch.Tensor, memories: torch.Tensor, rank: int, capacity_bytes: int, one_shot_bytes_max: int,
    timeout_ms: int,
) -> None:  # fmt: skip
    is_one_shot = x.nbytes <= one_shot_bytes_max
    name = "sum_one_shot" if is_one_shot else "sum_two_shot"
    world_size = memories.shape[0] - 1
    kernel = kernel_for(x.device, SOURCE, name, (("SCALAR", SCALARS[x.dtype]), ("WORLD", str(world_size))))
    aligned = (x.data_ptr() | out.data_ptr()) % CHUNK_BYTES == 0
    arguments: tuple[torch.Tensor | np.generic, ...] = (
        out, x, memories, *_group(rank, capacity_bytes, timeout_ms), np.int32(x.shape[0]),
        ticket(x.shape[0], SUMMED.index(x.dtype), is_one_shot), np.int32(aligned),
    )  # fmt: skip
    grid, block = shape_of(-(-x.nbytes // CHUNK_BYTES))
    kernel(grid, block, arguments, shared_mem=TURN_BYTES)


def join_over_ranks(
    x: torch.Tensor, dim: int, memories: torch.Tensor, rank: int, capacity_bytes: int, timeout_ms: int
) -> torch.Tensor:
    """The ranks' x of any dtype joined along `dim` in rank order; the rest as sum_over_ranks."""
    x = x.contiguous()
    world_size = memories.shape[0] - 1
    shape, dim = list(x.shape), dim % x.dim()
    shape[dim] *= world_size
    joined = torch.empty(shape, dtype=x.dtype, device=x.device)
    row_bytes = math.prod(x.shape[dim:]) * x.element_size()
    unit = next(size for size in UNITS_BYTES if row_bytes % size == 0)  # by shape alone: the same on every rank
    x = x if x.data_ptr() % unit == 0 else x.clone()
    defines = (("SCALAR", "float"), ("WORLD", str(world_size)))
    piece = capacity_bytes // unit
    for done in range(0, x.nbytes // unit, piece):
        count = min(piece, x.nbytes // unit - done)
        arguments: tuple[torch.Tensor | np.generic, ...] = (
            joined, x, memories, *_group(rank, capacity_bytes, timeout_ms), np.int64(done), np.int32(count),
            np.int64(row_bytes // unit), np.int32(unit), ticket(count, len(SUMMED) + unit, False),
        )  # fmt: skip
        grid, block = shape_of(count)
        kernel_for(x.device, SOURCE, "join_ranks", defines)(grid, block, arguments, shared_mem=TURN_BYTES)
    return joined


def _group(rank: int, capacity_bytes: int, timeout_ms: int) -> tuple[np.generic, ...]:
    return np.int32(rank), np.int64(capacity_bytes), np.int64(timeout_ms * 1_000_000)


def ticket(count: int, kind: int, is_one_shot: bool) -> np.uint64:
    """What an operation is, as one number: ranks whose numbers differ are out of step."""
    return np.uint64(count << 8 | kind << 1 | is_one_shot)


def shape_of(chunk_count: int) -> tuple[tuple[int], tuple[int]]:
    """(grid, block) of a piece, the same on every rank: a chunk a thread as long as blocks last."""
    threads = min(THREADS, -(-chunk_count // WARP) * WARP)
    return (min(TURNS_MAX, -(-chunk_count // threads)),), (threads,)
