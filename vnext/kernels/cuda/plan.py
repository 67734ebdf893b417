"""Plan: the work of each warp in a step's attention, as int32 arrays for `cuda/paged_attention.cu`.

Owns the division of rows into tiles, units and splits. Host arithmetic on host arrays; one copy to the device per step.

    tile   up to 16 query heads of one key-value head: neighbouring queries times the heads of a group
    unit   up to four tiles that read the same keys of one row of the block table; narrow ones have a single tile
    split  256 keys, at multiples of 256: what is summed up before it is joined

A row whose queries fit into one tile (a decode, a few drafts) becomes one narrow unit a split, merged afterwards; longer
ones become wide units that walk all their keys, or, where these are too few for the device, some splits of them: a short chunk
behind a long prefix. Where all rows begin with the same blocks, the queries of many rows share
tiles over that prefix. None of it shows in a bit of a result: see the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

TILE_ROWS = 16
SPLIT_KEYS = 256
WARPS = 4
CUT_SLOTS_MAX = 8192
"""Partial sums of cut units: 128 MiB with 32 heads of 128, read and written in a tenth of what cutting saves an H200."""
UNIT_FIELDS, TILE_FIELDS, MERGE_FIELDS = 6, 2, 3


class StepPlan(NamedTuple):
    """One step for layers of one group size and window. All tensors int32, on the device, views of one.

    `narrow`, `wide` [units, 6]: first tile, count, row of the table, first key, stop, whether partial. `tiles` [N, 2]:
    first entry and count. `tokens`: of entries. `limits`, `partials` [T]: each token's last visible key and the slot of its
    split 0. `merges` [M, 3]: token, first slot, count. `slot_count`: of partial sums.
    """

    narrow: torch.Tensor
    wide: torch.Tensor
    tiles: torch.Tensor
    tokens: torch.Tensor
    limits: torch.Tensor
    partials: torch.Tensor
    merges: torch.Tensor
    slot_count: int
    narrow_is_partial: bool


class Tiles(NamedTuple):
    """On the host: the row, first token and token count of each [N]."""

    row: np.ndarray
    first: np.ndarray
    count: np.ndarray


class Units(NamedTuple):
    """On the host: what `StepPlan.narrow` has in its columns, each [N]."""

    tile_first: np.ndarray
    tile_count: np.ndarray
    table_row: np.ndarray
    key_first: np.ndarray
    key_stop: np.ndarray
    is_partial: np.ndarray


class Slots(NamedTuple):
    """Where partial sums go: `base` [T] as `StepPlan.partials`, `merges` [M, 3], `count` of slots."""

    base: np.ndarray
    merges: np.ndarray
    count: int


def make_plan(
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    group: int,
    window: int,
    shared_tokens: int,
    warps: int,
    device: torch.device,
    units_wanted: int = 0,
) -> StepPlan:
    """Plan R rows whose queries are query_starts[r]:query_starts[r + 1] and end their contexts.

    query_starts [R + 1], context_lengths [R]; `group` query heads share a key-value head; `window` 0: none; every row with a
    query begins with the same `shared_tokens` tokens in the same blocks; `warps`: tiles of a wide unit; `units_wanted`: wide units
    are cut where they are fewer.
    """
    starts, contexts = query_starts.astype(np.int64), context_lengths.astype(np.int64)
    limits = last_keys(starts, contexts)
    per_tile = TILE_ROWS // min(group, TILE_ROWS)
    counts = -(-(starts[1:] - starts[:-1]) // per_tile)
    narrow = cut_tiles(np.flatnonzero(counts == 1), starts, per_tile)
    wide = cut_tiles(np.flatnonzero(counts > 1), starts, per_tile)
    prefix = shared_prefix(limits[narrow.first], shared_tokens, window)
    natural = len(narrow.row) + len(wide.row)
    common, entries = common_units(narrow, prefix, per_tile, warps, natural, len(limits))
    splits, slots = narrow_units(narrow, limits, window, prefix)
    long = wide_units(wide, limits, window, warps, len(narrow.row))
    if 0 < len(long.table_row) < units_wanted:
        long, slots = cut_units(long, wide, len(narrow.row), units_wanted, slots)
    tiles = np.concatenate((np.stack((narrow.first, narrow.count), 1), np.stack((wide.first, wide.count), 1), entries[1]))
    parts = (
        tiles, np.stack(splits, 1), np.concatenate((np.stack(common, 1), np.stack(long, 1))),
        np.concatenate((np.arange(len(limits)), entries[0])), limits, slots.base, slots.merges,
    )  # fmt: skip
    on_it = dict(zip(("tiles", "narrow", "wide", "tokens", "limits", "partials", "merges"), on_device(parts, device)))
    return StepPlan(**on_it, slot_count=slots.count, narrow_is_partial=bool(splits.is_partial.all()))


def on_device(parts: tuple[np.ndarray, ...], device: torch.device) -> list[torch.Tensor]:
    """All arrays in one int32 tensor, by one copy, as views of their shapes."""
    ends = np.cumsum([part.size for part in parts])
    flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32))
    if device.type == "cuda":
        flat = flat.pin_memory()  # else the copy would wait for all that the device has yet to do
    flat = flat.to(device, non_blocking=True)
    return [flat[end - part.size : end].view(part.shape) for part, end in zip(parts, ends, strict=True)]


def last_keys(starts: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """[T]: the last position that each token sees, its own; -1 for tokens of no row."""
    limits = np.full(int(starts[-1]), -1, dtype=np.int64)
    lengths = starts[1:] - starts[:-1]
    row = np.repeat(np.arange(len(lengths)), lengths)
    tokens = np.arange(int(starts[0]), int(starts[-1]))
    limits[tokens] = contexts[row] - (starts[row + 1] - tokens)
    return limits


def cut_tiles(rows: np.ndarray, starts: np.ndarray, per_tile: int) -> Tiles:
    """The tiles of some rows, in order."""
    first, stop = starts[rows], starts[rows + 1]
    counts = -(-(stop - first) // per_tile)
    place, turn = numbered(counts)
    begin = first[place] + turn * per_tile
    return Tiles(rows[place], begin, np.minimum(stop[place] - begin, per_tile))


def first_keys(limits: np.ndarray, window: int) -> np.ndarray:
    """The first position that a token sees."""
    return np.maximum(limits - window + 1, 0) if window else np.zeros_like(limits)


def shared_prefix(first_limits: np.ndarray, shared_tokens: int, window: int) -> int:
    """How many tokens are read once for all narrow rows: whole splits that all of them see, or none."""
    if window or len(first_limits) < 2:
        return 0
    return min(shared_tokens, int(first_limits.min()) + 1) // SPLIT_KEYS * SPLIT_KEYS


def common_units(
    narrow: Tiles, prefix: int, per_tile: int, warps: int, tile_first: int, entry_first: int
) -> tuple[Units, tuple[np.ndarray, np.ndarray]]:
    """Units over the shared prefix; the tokens of their entries [E], and their tiles [N, 2]."""
    if not prefix:
        nothing = np.zeros(0, dtype=np.int64)
        return Units(*[nothing] * UNIT_FIELDS), (nothing, np.zeros((0, TILE_FIELDS), dtype=np.int64))
    place, turn = numbered(narrow.count)
    tokens = narrow.first[place] + turn
    begin = np.arange(0, len(tokens), per_tile)
    tiles = np.stack((entry_first + begin, np.minimum(len(tokens) - begin, per_tile)), 1)
    first = np.arange(0, len(begin), warps)
    split_count = prefix // SPLIT_KEYS
    unit, split = np.repeat(first, split_count), np.tile(np.arange(split_count), len(first))
    row = np.full(len(unit), narrow.row[0])
    units = Units(
        tile_first + unit, np.minimum(len(begin) - unit, warps), row, split * SPLIT_KEYS, (split + 1) * SPLIT_KEYS,
        np.ones_like(unit),
    )  # fmt: skip
    return units, (tokens, tiles)


def splits_seen(narrow: Tiles, limits: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The first split that a row of each tile sees, and the one behind the last [N]; `limits` [T]."""
    stop = limits[narrow.first + narrow.count - 1] + 1
    return first_keys(limits[narrow.first], window) // SPLIT_KEYS, -(-stop // SPLIT_KEYS)


def narrow_units(
    narrow: Tiles, limits: np.ndarray, window: int, prefix: int, all_partial: bool = False
) -> tuple[Units, Slots]:
    """One unit for each split behind the prefix; partial where a row has more than one, counting those before, or everywhere."""
    key_first, key_stop = first_keys(limits[narrow.first], window), limits[narrow.first + narrow.count - 1] + 1
    split_first, split_stop = splits_seen(narrow, limits, window)
    is_partial = (split_stop - split_first > 1) | (prefix > 0) | all_partial
    begin = np.maximum(split_first, prefix // SPLIT_KEYS)
    counts = split_stop - begin
    place, turn = numbered(counts)
    split = begin[place] + turn
    units = Units(
        place, np.ones_like(place), narrow.row[place], np.maximum(split * SPLIT_KEYS, key_first[place]),
        np.minimum((split + 1) * SPLIT_KEYS, key_stop[place]), is_partial[place].astype(np.int64),
    )  # fmt: skip
    return units, partial_slots(narrow, split_first, split_stop, is_partial, len(limits))


def partial_slots(
    narrow: Tiles, split_first: np.ndarray, split_stop: np.ndarray, is_partial: np.ndarray, token_count: int
) -> Slots:
    """A slot for each token and split of the tiles that need merging."""
    tiles = np.flatnonzero(is_partial)
    place = np.repeat(tiles, narrow.count[tiles])
    counts = narrow.count[tiles]
    tokens = narrow.first[place] + np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    split_counts = (split_stop - split_first)[place]
    slot = np.cumsum(split_counts) - split_counts
    base = np.zeros(token_count, dtype=np.int64)
    base[tokens] = slot - split_first[place]
    return Slots(base, np.stack((tokens, slot, split_counts), 1), int(split_counts.sum()))


def wide_units(wide: Tiles, limits: np.ndarray, window: int, warps: int, tile_first: int) -> Units:
    """Neighbouring tiles of a row, up to `warps` of them, over all keys that any of them sees."""
    if not len(wide.row):
        return Units(*[np.zeros(0, dtype=np.int64)] * UNIT_FIELDS)
    turn = np.arange(len(wide.row)) - np.searchsorted(wide.row, wide.row)
    first = np.flatnonzero(turn % warps == 0)
    count = np.diff(np.append(first, len(wide.row)))
    last = first + count - 1
    key_first, key_stop = first_keys(limits[wide.first[first]], window), limits[wide.first[last] + wide.count[last] - 1] + 1
    units = Units(tile_first + first, count, wide.row[first], key_first, key_stop, np.zeros_like(first))
    longest_first = np.argsort(key_first - key_stop, kind="stable")  # else the last ones to start would be waited for
    return Units(*(column[longest_first] for column in units))


def cut_units(units: Units, wide: Tiles, tile_first: int, units_wanted: int, slots: Slots) -> tuple[Units, Slots]:
    """Wide units cut between splits into about twice as many as are wanted, with slots for the sums that they leave; as they are
    where that takes more than CUT_SLOTS_MAX. `slots`: those of the narrow units."""
    first, stop = units.key_first // SPLIT_KEYS, -(-units.key_stop // SPLIT_KEYS)
    last = units.tile_first + units.tile_count - 1 - tile_first
    begin = wide.first[units.tile_first - tile_first]
    token_counts, split_counts = wide.first[last] + wide.count[last] - begin, stop - first
    if split_counts.max() < 2 or (token_counts * split_counts).sum() > CUT_SLOTS_MAX:
        return units, slots
    splits = -(-int(split_counts.sum()) // (2 * units_wanted))
    place, turn = numbered(-(-split_counts // splits))
    split = first[place] + turn * splits
    cut = Units(
        units.tile_first[place], units.tile_count[place], units.table_row[place],
        np.maximum(split * SPLIT_KEYS, units.key_first[place]), np.minimum((split + splits) * SPLIT_KEYS, units.key_stop[place]),
        np.ones_like(place),
    )  # fmt: skip
    unit, turn = numbered(token_counts)
    tokens, counts = begin[unit] + turn, split_counts[unit]
    slot = slots.count + np.cumsum(counts) - counts
    base = slots.base.copy()
    base[tokens] = slot - first[unit]
    merges = np.concatenate((slots.merges, np.stack((tokens, slot, counts), 1)))
    return cut, Slots(base, merges, slots.count + int(counts.sum()))


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of counts[n] things of each n, in order: n, and the number among those of n."""
    place = np.repeat(np.arange(len(counts)), counts)
    return place, np.arange(len(place)) - (np.cumsum(counts) - counts)[place]
