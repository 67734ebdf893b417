"""Paged attention over the head-major caches: the launches of `cuda/paged_attention.cu` by the plan of a step.

Owns how much shared memory a launch needs and where partial sums go. The arithmetic of a query is the same in every
launch, so decodes, prompts, chunks and shared prefixes give the same bits.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from vnext.kernels.calls import AttentionCall
from vnext.kernels.contracts import FLOATS
from vnext.kernels.cuda.backends import kernel_for
from vnext.kernels.cuda.interface import SCALARS, Defines
from vnext.kernels.cuda.plan import TILE_ROWS, WARPS, StepPlan

SOURCE = "paged_attention.cu"
WARP = 32
KEYS, STAGES = 32, 2
WIDENING_WARPS = 2
"""Warps of a block with one tile where keys are widened. The second only loads and widens; with a third, fewer blocks would run
side by side."""
TILE_COLUMNS = 8
PAD_BYTES = 16
CHUNK_BYTES = 16
SHARED_BYTES_MAX = 227 * 1024
LOG2_E = math.log2(math.e)
HEAD_DIM_MULTIPLE, HEAD_DIM_MAX = 16, 256
LARGE_HEAD = 128
"""Above it two warps share what four would not find room for."""


def warps_of(head_dim: int) -> int:
    """How many tiles a wide unit has."""
    return WARPS if head_dim <= LARGE_HEAD else WARPS // 2


def serves(query: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the kernel knows these types and this size of heads, and the device has the shared memory for a block of them."""
    head_dim = query.shape[-1]
    sized = head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= HEAD_DIM_MAX
    narrow = key_cache.dtype is torch.float8_e4m3fn and query.dtype is not torch.float32
    known = sized and query.dtype in FLOATS and (key_cache.dtype in (query.dtype, torch.int8) or narrow)
    return known and shared_bytes(query, key_cache, warps_of(head_dim), is_partial=False) <= shared_memory(query.device)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a block may have: 227 KiB of an sm_90, 99 of an sm_86, sm_89 and sm_120. The tests' host shim gives as much as
    the largest."""
    if device.type != "cuda":
        return SHARED_BYTES_MAX
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch's stubs do not have it


def paged_attention(query: torch.Tensor, block_table: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """As paged_attention.paged_attention, of what `serves` allows; the call's metadata is a StepPlan for its window and the heads.

    Caches of int8 hold rows as mxint8.py has them. block_table int32 [R, W], rows dense.
    """
    key_cache, value_cache, plan, scale, window, softcap, key_scale, value_scale, *_ = call
    query = query.contiguous()
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    covered = plan.limits.shape[0] == tokens
    output = torch.empty_like(query) if covered else torch.zeros_like(query)
    values = torch.empty(plan.slot_count * heads * head_dim, dtype=torch.float32, device=query.device)
    marks = torch.empty(plan.slot_count * heads * 2, dtype=torch.float32, device=query.device)
    macros = defines(query.dtype, key_cache.dtype, head_dim)
    kernel = kernel_for(query.device, SOURCE, "paged_attention", macros)
    sizes = map(np.int32, (heads, kv_heads, block_size, window))
    factors = map(np.float32, (scale * key_scale * LOG2_E, softcap * LOG2_E, value_scale))
    before = (output, values, marks, query, key_cache, value_cache)
    after = (
        plan.tiles, plan.tokens, plan.limits, plan.partials, block_table, np.int64(block_table.stride(0)), *sizes, *factors,
    )  # fmt: skip
    parts = -(-(heads // kv_heads) // TILE_ROWS)
    wide, narrow = warps_of(head_dim), WIDENING_WARPS if key_cache.dtype is not query.dtype else 1
    for units, tiles, warps, is_partial in ((plan.wide, wide, wide, False), (plan.narrow, 1, narrow, plan.narrow_is_partial)):
        if units.shape[0]:
            shared = shared_bytes(query, key_cache, tiles, is_partial)
            kernel((units.shape[0], kv_heads, parts), (warps * WARP,), (*before, units, *after), shared_mem=shared)
    merge(output, values, marks, plan, macros, value_scale)
    return output


def merge(
    output: torch.Tensor,
    values: torch.Tensor,
    marks: torch.Tensor,
    plan: StepPlan,
    macros: Defines,
    value_scale: float,
) -> None:
    """Join the partial sums of the tokens that have some into `output`."""
    _, heads, head_dim = output.shape
    if plan.merges.shape[0]:
        kernel = kernel_for(output.device, SOURCE, "merge_splits", macros)
        arguments = (output, values, marks, plan.merges, np.int32(heads), np.float32(value_scale))
        kernel((plan.merges.shape[0], heads), (head_dim,), arguments)


def defines(query: torch.dtype, cache: torch.dtype, head_dim: int) -> Defines:
    return (("SCALAR", SCALARS[query]), ("CACHE", SCALARS[cache]), ("HEAD_DIM", str(head_dim)))


def shared_bytes(query: torch.Tensor, key_cache: torch.Tensor, tiles: int, is_partial: bool) -> int:
    """What a block of so many tiles needs, as the kernel lays it out; with partial sums only, it keeps none itself."""
    head_dim, scalar, cache = query.shape[-1], query.element_size(), key_cache.element_size()
    row = head_dim * scalar + PAD_BYTES
    stages = STAGES * 2 * KEYS * (stage_bytes(key_cache) + PAD_BYTES)
    widened = 2 * KEYS * row if cache < scalar else 0
    spare = TILE_ROWS * KEYS * 4 if query.dtype is torch.float32 else 0
    kept = 0 if is_partial else (head_dim // TILE_COLUMNS * 4 + 4) * WARP * 4
    if query.dtype is torch.float32 or head_dim > LARGE_HEAD:
        return stages + widened + tiles * (TILE_ROWS * row + spare + kept)
    return stages + widened + tiles * max(TILE_ROWS * row, kept)  # queries go to registers before there is anything to keep


def stage_bytes(cache: torch.Tensor) -> int:
    """What is copied of a cache's row: rows of codes begin at any byte, copies at multiples of 16."""
    width = cache.shape[-1]
    before = CHUNK_BYTES - (width & -width) if cache.dtype is torch.int8 and width % CHUNK_BYTES else 0
    return -(-(width * cache.element_size() + before) // CHUNK_BYTES) * CHUNK_BYTES
