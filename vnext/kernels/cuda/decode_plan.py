"""The plan of a step of decodes in a fixed shape: what a captured graph reads, whatever the contexts of its replays are.

Owns the layout of that plan in one run of int32. Every row has one query, one tile and one entry to merge; splits of 256 keys
become units up to a capacity, the rest are units without tiles, which do nothing. All sums go through `merge_splits`, as those
of rows with several splits do in `plan.py`: the same operations in the same order, so the same bits.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda.plan import MERGE_FIELDS, SPLIT_KEYS, TILE_FIELDS, UNIT_FIELDS, StepPlan

IS_PARTIAL = 5
"""Field of a unit."""


def word_count(row_count: int, unit_count: int) -> int:
    """int32 words of the plan of `row_count` rows with room for `unit_count` splits."""
    return UNIT_FIELDS * unit_count + (TILE_FIELDS + 3 + MERGE_FIELDS) * row_count


def splits_of(context_lengths: np.ndarray, window: int) -> np.ndarray:
    """How many splits each row's newest token sees (int64 [R]). `window` 0: the whole context."""
    contexts = context_lengths.astype(np.int64)
    return -(-contexts // SPLIT_KEYS) - first_keys(contexts, window) // SPLIT_KEYS


def first_keys(contexts: np.ndarray, window: int) -> np.ndarray:
    """The first position that the newest token of each context sees."""
    return np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)


def write_plan(
    target: np.ndarray, unit_count: int, context_lengths: np.ndarray, table_rows: np.ndarray, window: int
) -> None:
    """Write the plan of R rows, whose blocks are in `table_rows` [R] of the table, to target int32 [word_count].

    Raises ContractError where their splits are more than `unit_count`.
    """
    rows, contexts = len(context_lengths), context_lengths.astype(np.int64)
    first, counts = first_keys(contexts, window), splits_of(contexts, window)
    total = int(counts.sum())
    if total > unit_count:
        raise ContractError(f"{total} splits do not fit a plan with room for {unit_count}")
    slots = np.cumsum(counts) - counts
    row = np.repeat(np.arange(rows), counts)
    split = (first // SPLIT_KEYS)[row] + np.arange(total) - slots[row]
    units, tiles, tokens, limits, partials, merges = _parts(target, rows, unit_count)
    units[:] = 0
    units[:, IS_PARTIAL] = 1
    units[:total] = np.stack(
        (row, np.ones_like(row), table_rows[row], np.maximum(split * SPLIT_KEYS, first[row]),
         np.minimum((split + 1) * SPLIT_KEYS, contexts[row]), np.ones_like(row)), 1,
    )  # fmt: skip
    tiles[:, 0], tiles[:, 1] = np.arange(rows), 1
    tokens[:] = np.arange(rows)
    limits[:] = contexts - 1
    partials[:] = slots - first // SPLIT_KEYS
    merges[:] = np.stack((np.arange(rows), slots, counts), 1)


def view_plan(flat: torch.Tensor, row_count: int, unit_count: int) -> StepPlan:
    """A plan in `flat` int32 [word_count] as attention takes it."""
    units, tiles, tokens, limits, partials, merges = _parts(flat, row_count, unit_count)
    return StepPlan(units, units[:0], tiles, tokens, limits, partials, merges, unit_count, narrow_is_partial=True)


def _parts(flat: Any, rows: int, units: int) -> list[Any]:
    """Units [U, 6], tiles [R, 2], tokens, limits, partials [R], merges [R, 3] of an array or a tensor, as views."""
    shapes = ((units, UNIT_FIELDS), (rows, TILE_FIELDS), (rows,), (rows,), (rows,), (rows, MERGE_FIELDS))
    sizes = [math.prod(shape) for shape in shapes]
    ends = accumulate(sizes)
    return [flat[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]


class DecodeAttention:
    """What `operations.StepAttention` is to attention, with its plan in memory that a graph knows.

    `flat` int32 [word_count] is written before each replay; block_table int32 [any, W] is the one that the plan's rows are of.
    """

    __slots__ = ("_plan", "block_size", "block_table", "kv_head_count", "windows")

    def __init__(
        self,
        flat: torch.Tensor,
        row_count: int,
        unit_count: int,
        block_table: torch.Tensor,
        block_size: int,
        kv_head_count: int,
        window: int,
    ) -> None:
        self._plan = view_plan(flat, row_count, unit_count)
        self.block_table, self.block_size, self.kv_head_count = block_table, block_size, kv_head_count
        self.windows = (window,)

    def plan(self, head_count: int, head_dim: int, window: int) -> StepPlan:
        """One plan for any heads: a decode has one tile a key-value head."""
        return self._plan

    def plain(self) -> Any:
        """There is none: the reference's metadata has a shape that depends on the contexts."""
        raise ContractError("a captured step needs attention by the kernels, which do not know these types or heads")
