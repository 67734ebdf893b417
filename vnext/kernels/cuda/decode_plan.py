"""The plan of a step of decodes in a fixed shape: what a captured graph reads, whatever the contexts of its replays are.

Owns the layout of that plan in one run of int32. R query rows, each the newest token of a request or a draft behind it, are cut
into tiles: neighbouring rows of a request share one while it has room. Splits of 256 keys become units up to a capacity, the
rest are units without tiles, which do nothing. All sums go through `merge_splits`, as those of rows with several splits do in
`plan.py`: the same operations in the same order, so the same bits.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda.plan import (
    MERGE_FIELDS,
    SPLIT_SUMS,
    TILE_FIELDS,
    TILE_ROWS,
    UNIT_FIELDS,
    StepPlan,
    Tiles,
    cut_tiles,
    narrow_units,
    splits_seen,
)

LEAVES = 5
"""Field of a unit."""


def word_count(row_count: int, unit_count: int) -> int:
    """int32 words of the plan of `row_count` rows with room for `unit_count` splits."""
    return UNIT_FIELDS * unit_count + (TILE_FIELDS + 3 + MERGE_FIELDS) * row_count


def tiles_of(runs: np.ndarray, group: int) -> Tiles:
    """The tiles of query rows: runs[e] neighbouring ones of each request (int64 [E]); `group` query heads share a key-value
    head. As many rows share a tile as it has room for, so that their keys are read once."""
    starts = np.append(0, np.cumsum(runs))
    return cut_tiles(np.arange(len(runs)), starts, TILE_ROWS // min(group, TILE_ROWS))


def slot_count(tiles: Tiles, context_lengths: np.ndarray, window: int) -> int:
    """How many partial sums the rows leave: each one for every split that its tile sees. `window` 0: the whole context."""
    first, stop = splits_seen(tiles, context_lengths.astype(np.int64) - 1, window)
    return int((tiles.count * (stop - first)).sum())


def write_plan(
    target: np.ndarray, unit_count: int, context_lengths: np.ndarray, table_rows: np.ndarray, window: int, tiles: Tiles
) -> None:
    """Write the plan of R query rows to target int32 [word_count]. Row r sees context_lengths[r] tokens, whose blocks are in row
    table_rows[r] of the table.

    Raises ContractError where their partial sums are more than `unit_count`.
    """
    limits, rows = context_lengths.astype(np.int64) - 1, len(context_lengths)
    splits, slots = narrow_units(tiles, limits, window, 0, all_partial=True)
    if slots.count > unit_count:
        raise ContractError(f"{slots.count} splits do not fit a plan with room for {unit_count}")
    units, pairs, *of_rows, merges = _parts(target, rows, unit_count)
    units[:], pairs[:] = 0, 0
    units[:, LEAVES] = SPLIT_SUMS
    of_table = splits._replace(table_row=table_rows[tiles.first][splits.tile_first])
    units[: len(splits.tile_first)] = np.stack(of_table, 1)
    pairs[: len(tiles.first)] = np.stack((tiles.first, tiles.count), 1)
    for part, values in zip((*of_rows, merges), (np.arange(rows), limits, slots.base, slots.merges), strict=True):
        part[:] = values


def view_plan(flat: torch.Tensor, row_count: int, unit_count: int) -> StepPlan:
    """A plan in `flat` int32 [word_count] as attention takes it."""
    units, tiles, tokens, limits, partials, merges = _parts(flat, row_count, unit_count)
    return StepPlan(units, units[:0], tiles, tokens, limits, partials, merges, unit_count, narrow_is_partial=True)


def _parts(flat: Any, rows: int, units: int) -> list[Any]:
    """Units [U, 6], tiles [R, 2], tokens, limits, partials [R], merges [R, 4] of an array or a tensor, as views."""
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
        """One plan for all layers of a group: their heads are the same."""
        return self._plan

    def plain(self) -> Any:
        """There is none: the reference's metadata has a shape that depends on the contexts."""
        raise ContractError("a captured step needs attention by the kernels, which do not know these types or heads")
