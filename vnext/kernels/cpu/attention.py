"""Paged attention over the head-major caches: a plan of the step, made once, and its run in every layer.

Owns nothing but the calls. Decodes and prefills go through one kernel; contexts are read in fixed splits joined in
order, and rows that share blocks read them together: neither shows in a bit of any row's result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep, Selection
from vnext.kernels.cpu.native import CACHE_KINDS, KINDS, kernels
from vnext.kernels.selected import Queries


class AttentionPlan(NamedTuple):
    """What attention knows of one step. `handle` is the compiled module's."""

    handle: Any
    block_size: int
    kv_head_count: int
    token_count: int


def plan(step: AttentionStep, head_count: int) -> AttentionPlan:
    """Plan a step, the rows of whose block table are dense."""
    block_table, block_size, kv_head_count = step.block_table, step.block_size, step.kv_head_count
    starts = np.ascontiguousarray(step.query_starts, dtype=np.int64)
    lengths = np.ascontiguousarray(step.context_lengths, dtype=np.int64)
    handle = kernels.plan_attention(
        starts.ctypes.data, lengths.ctypes.data, block_table.data_ptr(), block_table.stride(0),
        len(lengths), head_count, kv_head_count, block_size,
    )  # fmt: skip
    return AttentionPlan(handle, block_size, kv_head_count, int(starts[-1]))


def paged_attention(query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Causal attention of query [T, heads, D], dense, to its rows' contexts in the paged caches -> [T, heads, D].

    The call's metadata is an AttentionPlan. Caches are of the query's dtype (float32 or bfloat16) or of int8 (kernels/mxint8.py),
    without scales, D even and at most 640, both with dense blocks at equal distances. Tokens of no row give zeros.
    """
    key_cache, value_cache, step, scale, window, softcap, _, _, sinks, _ = call
    result = torch.empty_like(query) if step.token_count == query.shape[0] else torch.zeros_like(query)
    kernels.attention(
        KINDS[query.dtype], step.handle, query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        result.data_ptr(), query.shape[2], key_cache.stride(0), CACHE_KINDS[key_cache.dtype], scale, window, softcap,
        0 if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    return result


def choose_keys(queries: Queries, selection: Selection, table: torch.Tensor) -> torch.Tensor:
    """As selected.chosen_keys, of float32 or bfloat16, from blocks that are dense."""
    (tokens, heads, width), cache, longest = queries.query.shape, selection.cache, int(queries.limits.max())
    scores, places = torch.empty(tokens, longest), torch.empty((tokens, selection.count), dtype=torch.int32)
    rows, limits = (np.ascontiguousarray(each, dtype=np.int64) for each in (queries.rows, queries.limits))
    kernels.choose_keys(
        KINDS[cache.dtype], queries.query.data_ptr(), cache.data_ptr(), queries.weights.data_ptr(), table.data_ptr(),
        rows.ctypes.data, limits.ctypes.data, table.stride(0), heads, width, cache.shape[2], cache.stride(0), scores.data_ptr(),
        longest, tokens, selection.count, places.data_ptr(),
    )  # fmt: skip
    return places
