"""Plan: the work of each warp in a step's attention, as int32 arrays for `cuda/paged_attention.cu`.

Owns the division of rows into tiles, units and splits. Host arithmetic on host arrays; one copy to the device per step.

    tile   up to 16 query heads of one key-value head: neighbouring queries times the heads of a group
    unit   up to four tiles that read the same keys of one row of the block table; narrow ones have a single tile
    split  256 keys, at multiples of 256: what is summed up before it is joined
    group  16 splits, at multiples of 4,096 keys: what is joined before groups are

A row whose queries fit into one tile (a decode, a few drafts) becomes one narrow unit a split, merged afterwards. Longer ones
become wide units that walk all their keys, or, where these are too few for the device, a group or some splits of them. Rows that
begin with the same blocks share tiles there. None of it shows in a bit of a result: see the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

TILE_ROWS = 16
SPLIT_KEYS = 256
GROUP_SPLITS = 16
GROUP_KEYS = GROUP_SPLITS * SPLIT_KEYS
WARPS = 4
CUT_GROUPS_MAX = 40
"""Groups into which a step's units may be cut, for each unit that would be enough: at most 335 MiB of partial sums of heads of
128 on 132 multiprocessors. With 32 query heads and eight of keys 64 tokens reach it behind 1.3 million, 496 behind 160,000."""
UNIT_FIELDS, TILE_FIELDS, MERGE_FIELDS = 6, 2, 4
RESULTS, SPLIT_SUMS, GROUP_SUMS = range(3)
"""What a unit leaves."""


class StepPlan(NamedTuple):
    """One step for layers of one group size and window. All tensors int32, on the device, views of one.

    `narrow`, `wide` [units, 6]: first tile, count, row of the table, first key, stop, what it leaves. `tiles` [N, 2]:
    first entry and count. `tokens`: of entries. `limits`, `partials` [T]: each token's last visible key and the slot of its
    split 0 or group 0, or the one in which joined groups wait. `merges` [M, 4]: token, first slot, count, and how many of these
    are of the first group. `slot_count`: of partial sums.
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
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count


class Units(NamedTuple):
    """On the host: what `StepPlan.narrow` has in its columns, each [N]."""

    tile_first: np.ndarray
    tile_count: np.ndarray
    table_row: np.ndarray
    key_first: np.ndarray
    key_stop: np.ndarray
    leaves: np.ndarray


class Slots(NamedTuple):
    """Where partial sums go: `base` [T] as `StepPlan.partials`, `merges` [M, 4], `count` of slots."""

    base: np.ndarray
    merges: np.ndarray
    count: int  # type: ignore[assignment]  # hides tuple.count


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
    are cut where they are fewer than twice as many.
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
    long, slots = cut_units(long, tokens_of(long, wide, len(narrow.row)), units_wanted, slots)
    tiles = np.concatenate((np.stack((narrow.first, narrow.count), 1), np.stack((wide.first, wide.count), 1), entries[1]))
    parts = (
        tiles, np.stack(splits, 1), np.concatenate((np.stack(common, 1), np.stack(long, 1))),
        np.concatenate((np.arange(len(limits)), entries[0])), limits, slots.base, slots.merges,
    )  # fmt: skip
    on_it = dict(zip(("tiles", "narrow", "wide", "tokens", "limits", "partials", "merges"), on_device(parts, device)))
    return StepPlan(**on_it, slot_count=slots.count, narrow_is_partial=bool(splits.leaves.all()))


def on_device(parts: tuple[np.ndarray, ...], device: torch.device, dtype: type[np.integer] = np.int32) -> list[torch.Tensor]:
    """All arrays in one tensor of the type, by one copy, as views of their shapes."""
    ends = np.cumsum([part.size for part in parts])
    flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]).astype(dtype))
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
    merges = np.stack((tokens, slot, split_counts, splits_of_first_group(split_first[place])), 1)
    return Slots(base, merges, int(split_counts.sum()))


def splits_of_first_group(split_first: np.ndarray) -> np.ndarray:
    """How many splits there are from each to the end of its group."""
    return GROUP_SPLITS - split_first % GROUP_SPLITS


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


class Queries(NamedTuple):
    """The tokens of units: the first of each, and how many [N]."""

    first: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count


def tokens_of(units: Units, wide: Tiles, tile_first: int) -> Queries:
    """Those of wide units."""
    first, last = units.tile_first - tile_first, units.tile_first + units.tile_count - 1 - tile_first
    return Queries(wide.first[first], wide.first[last] + wide.count[last] - wide.first[first])


def cut_units(units: Units, queries: Queries, units_wanted: int, slots: Slots) -> tuple[Units, Slots]:
    """Wide units, cut where they are too few, with slots for the sums that they leave or keep. `slots`: the narrow units'.

    They are cut into groups, of which each leaves a sixteenth of what its splits would. Where these are too few as well, and the
    units fewer than wanted, they are cut into pieces of several splits.
    """
    groups, splits, enough = parts_of(units, GROUP_KEYS), parts_of(units, SPLIT_KEYS), 2 * units_wanted
    count, group_count = len(units.leaves), int(groups.count.sum())
    if 0 < count < units_wanted and group_count < enough and splits.count.max() > 1:
        pieces = min(-(-int(splits.count.sum()) // enough), GROUP_SPLITS)
        of_first = splits_of_first_group(splits.first)
        return cut_at(units, splits, pieces, SPLIT_SUMS), slots_of_cut(slots, queries, splits, of_first)
    if count < enough and count < group_count <= CUT_GROUPS_MAX * enough:
        return cut_at(units, groups, 1, GROUP_SUMS), slots_of_cut(slots, queries, groups, groups.count)
    return units, slots_of_long(slots, queries, groups)


class Parts(NamedTuple):
    """Splits or groups of units: their `keys`, the first of each unit, and how many it has [N]."""

    keys: int
    first: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count


def parts_of(units: Units, keys: int) -> Parts:
    first = units.key_first // keys
    return Parts(keys, first, -(-units.key_stop // keys) - first)


def cut_at(units: Units, parts: Parts, at_once: int, leaves: int) -> Units:
    """Units of `at_once` parts each."""
    place, turn = numbered(-(-parts.count // at_once))
    part = parts.first[place] + turn * at_once
    return Units(
        units.tile_first[place], units.tile_count[place], units.table_row[place],
        np.maximum(part * parts.keys, units.key_first[place]), np.minimum((part + at_once) * parts.keys, units.key_stop[place]),
        np.full_like(place, leaves),
    )  # fmt: skip


def slots_of_cut(slots: Slots, queries: Queries, parts: Parts, of_first: np.ndarray) -> Slots:
    """Behind `slots` one for each token and part; `of_first` [N]: how many of a unit's are joined first."""
    unit, turn = numbered(queries.count)
    tokens, counts = queries.first[unit] + turn, parts.count[unit]
    slot = slots.count + np.cumsum(counts) - counts
    base = slots.base.copy()
    base[tokens] = slot - parts.first[unit]
    merges = np.concatenate((slots.merges, np.stack((tokens, slot, counts, of_first[unit]), 1)))
    return Slots(base, merges, slots.count + int(counts.sum()))


def slots_of_long(slots: Slots, queries: Queries, groups: Parts) -> Slots:
    """Behind `slots` one for each token of a unit that walks several groups: there those that it has joined wait."""
    unit, turn = numbered(np.where(groups.count > 1, queries.count, 0))
    if not len(unit):
        return slots
    base = slots.base.copy()
    base[queries.first[unit] + turn] = slots.count + np.arange(len(unit))
    return Slots(base, slots.merges, slots.count + len(unit))


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of counts[n] things of each n, in order: n, and the number among those of n."""
    place = np.repeat(np.arange(len(counts)), counts)
    return place, np.arange(len(place)) - (np.cumsum(counts) - counts)[place]
