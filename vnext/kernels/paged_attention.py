"""Reference paged attention: decode and prefill rows through one path, in plain torch, on any device.

A tile is `width` neighbouring queries of one row (1 for decode, TILE_WIDTH else; the last is padded by repeating its
last query). A context is walked in fixed pieces of about PIECE_TOKENS, always whole, what a query may not see masked,
and pieces are joined in order by the online softmax. So each query goes through the same operations of the same inner
sizes in any batch, however its prompt was cut. Bitwise on CPU: matrix products must not depend on the
number of rows, which MKL grants with MKL_CBWR=AVX512,STRICT from two rows on, and on an EPYC with AVX2 from four on (see attend).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels import mxint8
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.selected import chosen_keys, selected_attention

PIECE_TOKENS = 128
TILE_WIDTH = 16
ROWS_MIN = 4
"""Of a product: those of fewer take other paths through MKL, of one row on Intel's processors, of up to three on AMD's."""
TILE_COUNT_MAX = 64
"""Tiles worked on at once: bounds the memory to TILE_COUNT_MAX * PIECE_TOKENS gathered tokens."""
SCORE_MIN = torch.finfo(torch.float32).min
"""Finite, so that a query that has seen nothing yet gets weights of zero and no undefined difference."""


class Hidden(NamedTuple):
    """What a piece must not show to its N tiles. `mask` bool [N, 1, Q, 1, L]: keys that a query may not see.

    `stale_tile`, `stale_place` int64 [n]: a tile and a place in the piece that holds what the block's former holder
    left. Its weight is zero, but zero times a stranger's infinity would still be NaN.
    """

    mask: torch.Tensor
    stale_tile: torch.Tensor
    stale_place: torch.Tensor


class Piece(NamedTuple):
    """L tokens in B blocks of each tile's context, seen by the tiles [first, stop): the others are done or not there.

    `pages` int64 [tiles * kv_heads * B]: rows of the cache seen as [page_count * kv_heads, block_size * D].
    `hidden` is None where every query sees the whole piece.
    """

    first: int
    stop: int
    pages: torch.Tensor
    hidden: Hidden | None


class TileGroup(NamedTuple):
    """Up to TILE_COUNT_MAX tiles of one width Q, shortest context first.

    `query_index` int64 [N * Q]: the token that each place of a tile reads. `result_index`, `output_index` int64 [n]:
    places that are no padding, and the tokens they belong to.
    """

    width: int
    query_index: torch.Tensor
    result_index: torch.Tensor
    output_index: torch.Tensor
    pieces: tuple[Piece, ...]


class AttentionMetadata(NamedTuple):
    """What attention knows of one step, made once and used by every layer. `groups[i]` serve the layers of windows[i]; `step` is
    what it was made of."""

    block_size: int
    kv_head_count: int
    windows: tuple[int, ...]
    groups: tuple[tuple[TileGroup, ...], ...]
    step: AttentionStep


class StepAttention:
    """One step for all layers, for kernels that plan it when a layer shows its heads: described once."""

    __slots__ = ("step", "_plain", "block_size", "kv_head_count", "windows")

    def __init__(self, step: AttentionStep) -> None:
        self.step = step
        self._plain: AttentionMetadata | None = None
        self.block_size, self.kv_head_count, self.windows = step.block_size, step.kv_head_count, step.windows

    def plain(self) -> AttentionMetadata:
        """The reference's metadata."""
        if self._plain is None:
            self._plain = attention_metadata(self.step)
        return self._plain


class Tiles(NamedTuple):
    """Tiles on the host: row [N], token [N, Q], real [N, Q] (no padding), limit [N, Q] (last visible position)."""

    row: np.ndarray
    token: np.ndarray
    real: np.ndarray
    limit: np.ndarray


def attention_metadata(step: AttentionStep) -> AttentionMetadata:
    """Describe one step. Of blocks that rows share, each row reads its own."""
    query_starts, context_lengths, block_table, block_size, kv_head_count, windows, _ = step
    lengths = query_starts[1:] - query_starts[:-1]
    groups: list[list[TileGroup]] = [[] for _ in windows]
    for rows, width in ((np.flatnonzero(lengths == 1), 1), (np.flatnonzero(lengths > 1), TILE_WIDTH)):
        tiles = cut_tiles(rows, query_starts, context_lengths, width)
        for start in range(0, len(tiles.row), TILE_COUNT_MAX):
            chosen = Tiles(*(column[start : start + TILE_COUNT_MAX] for column in tiles))
            for window, found in zip(windows, groups):
                found.append(tile_group(chosen, block_table, block_size, kv_head_count, window))
    return AttentionMetadata(block_size, kv_head_count, windows, tuple(map(tuple, groups)), step)


def cut_tiles(rows: np.ndarray, query_starts: np.ndarray, context_lengths: np.ndarray, width: int) -> Tiles:
    """The tiles of some rows, shortest context first: neighbours then walk about as many pieces."""
    starts, ends = query_starts[rows].astype(np.int64), query_starts[rows + 1].astype(np.int64)
    counts = (ends - starts + width - 1) // width
    place = np.repeat(np.arange(len(rows)), counts)
    first = starts[place] + (np.arange(len(place)) - (np.cumsum(counts) - counts)[place]) * width
    wanted = first[:, None] + np.arange(width)
    end = ends[place][:, None]
    token = np.minimum(wanted, end - 1)
    limit = context_lengths[rows[place]].astype(np.int64)[:, None] - (end - token)
    order = np.argsort(limit[:, -1], kind="stable")
    return Tiles(rows[place][order], token[order], (wanted < end)[order], limit[order])


def tile_group(
    tiles: Tiles, block_table: torch.Tensor, block_size: int, kv_head_count: int, window: int
) -> TileGroup:
    """Tiles as index tensors on the device of the block table."""
    device = block_table.device
    real = np.flatnonzero(tiles.real)
    return TileGroup(
        width=tiles.token.shape[1],
        query_index=torch.from_numpy(tiles.token.reshape(-1)).to(device),
        result_index=torch.from_numpy(real).to(device),
        output_index=torch.from_numpy(tiles.token.reshape(-1)[real]).to(device),
        pieces=cut_pieces(tiles, block_table, block_size, kv_head_count, window),
    )


def cut_pieces(
    tiles: Tiles, block_table: torch.Tensor, block_size: int, kv_head_count: int, window: int
) -> tuple[Piece, ...]:
    """The pieces that the contexts of a group take, without those that lie before every window."""
    piece_blocks = blocks_per_piece(block_size)
    piece_size = piece_blocks * block_size
    last = tiles.limit[:, -1]
    start = np.maximum(tiles.limit[:, 0] - window + 1, 0) if window else np.zeros_like(tiles.limit[:, 0])
    piece_count = int(last[-1]) // piece_size + 1
    blocks = visible_blocks(tiles, start // block_size, block_table, block_size, piece_count * piece_blocks)
    heads = torch.arange(kv_head_count, device=block_table.device)[:, None]
    pieces = []
    for index in range(int(start.min()) // piece_size, piece_count):
        begun = (start < (index + 1) * piece_size) & (last >= index * piece_size)
        if not begun.any():
            continue
        live = np.flatnonzero(begun)
        first, stop = int(live[0]), int(live[-1]) + 1
        chosen = blocks[first:stop, index * piece_blocks : (index + 1) * piece_blocks]
        single = (start // block_size == last // block_size)[first:stop, None]
        hidden = hide(tiles.limit[first:stop] - index * piece_size, single, window, block_size, blocks.device)
        pieces.append(Piece(first, stop, (chosen[:, None] * kv_head_count + heads).reshape(-1), hidden))
    return tuple(pieces)


def blocks_per_piece(block_size: int) -> int:
    """Whole blocks of about PIECE_TOKENS tokens: fixed by the block size, whatever the context."""
    return max(1, PIECE_TOKENS // block_size)


def visible_blocks(
    tiles: Tiles, first: np.ndarray, block_table: torch.Tensor, block_size: int, count: int
) -> torch.Tensor:
    """int64 [N, count]: the blocks of each tile's row; its visible one `first` [N] in place of those that none sees."""
    device = block_table.device
    columns = torch.arange(count, device=device)
    used = torch.from_numpy(tiles.limit[:, -1:] // block_size).to(device)
    begin = torch.from_numpy(first[:, None]).to(device)
    rows = torch.from_numpy(tiles.row.astype(np.int64)).to(device)
    table = block_table[rows[:, None], columns.clamp(max=block_table.shape[1] - 1)].long()
    return torch.where((columns >= begin) & (columns <= used), table, table.gather(1, begin))


def hide(
    limit: np.ndarray, single: np.ndarray, window: int, block_size: int, device: torch.device
) -> Hidden | None:
    """What a piece must not show to queries whose last visible places in it are `limit` [N, Q]. None: nothing.

    Stale places: the rest of a tile's last block. Where that is also its first visible block (`single` bool [N, 1]),
    which stands in for the blocks that it does not see, the same places of all of them.
    """
    piece_size = blocks_per_piece(block_size) * block_size
    if limit.min() >= piece_size - 1 and not (window and limit.max() >= window):
        return None
    places = np.arange(piece_size)
    last = limit[:, -1:]
    stale = ((places // block_size == last // block_size) | single) & (places % block_size > last % block_size)
    tile, place = np.nonzero(stale)
    hidden = places > limit[:, :, None]
    if window:
        hidden |= places <= limit[:, :, None] - window
    return Hidden(
        torch.from_numpy(hidden)[:, None, :, None].to(device),
        torch.from_numpy(tile).to(device),
        torch.from_numpy(place).to(device),
    )


def paged_attention(query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Causal attention of query [T, heads, D] to its rows' contexts in the paged caches -> [T, heads, D].

    Caches are [page_count, kv_heads, block_size, D] and already hold this step's keys and values. Query head h reads
    key-value head h // (heads / kv_heads). Softmax and sums are float32. Tokens of no row give zeros. Blocks before a
    window are not read.
    """
    key_cache, value_cache, metadata, scale, window, _, key_scale, value_scale, *_ = call
    if call.selection is not None:
        return selected_attention(query, call, paged_attention, attention_metadata, chosen_keys)
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    wide = query.float() * (scale * key_scale)
    for group in metadata.groups[metadata.windows.index(window)]:
        result = attend(wide.index_select(0, group.query_index), group, call)
        if value_scale != 1.0:
            result.mul_(value_scale)
        output.index_copy_(0, group.output_index, result.index_select(0, group.result_index).to(output.dtype))
    return output


def attend(query: torch.Tensor, group: TileGroup, call: AttentionCall) -> torch.Tensor:
    """One group of tiles: scaled float32 query [N * Q, heads, D] -> float32 [N * Q, heads, D]."""
    tokens, heads, head_dim = query.shape
    kv_heads = call.key_cache.shape[1]
    shape = (tokens // group.width, kv_heads, group.width, heads // kv_heads, head_dim)
    split = query.view(shape[0], group.width, kv_heads, shape[3], head_dim).transpose(1, 2)
    stacked = split.reshape(shape[0] * kv_heads, group.width * shape[3], head_dim)
    # A product of few rows takes another path through MKL than one of more, and rounds differently.
    wide = stacked.repeat(1, -(-ROWS_MIN // stacked.shape[1]), 1) if stacked.shape[1] < ROWS_MIN else stacked
    result = walk(wide, group, shape, call)
    return result[:, : stacked.shape[1]].reshape(shape).transpose(1, 2).reshape(tokens, heads, head_dim)


def walk(
    query: torch.Tensor, group: TileGroup, shape: tuple[int, ...], call: AttentionCall
) -> torch.Tensor:
    """Online softmax over the pieces: query [N * kv_heads, M, D] -> [N * kv_heads, M, D], M = Q * group size.

    A piece that shows a query nothing, because the query's window begins later, leaves its sums as they are.
    """
    softcap = call.softcap
    peak = query.new_full((*query.shape[:2], 1), float("-inf"))
    weight_sum = torch.zeros_like(peak)
    total = torch.zeros_like(query)
    for first, stop, pages, hidden in group.pieces:
        live = slice(first * shape[1], stop * shape[1])
        scores = torch.bmm(query[live], gather(call.key_cache, pages).transpose(1, 2))
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        values = gather(call.value_cache, pages)
        if hidden is not None:
            apply_hidden(scores, values, hidden, shape)
        new_peak = torch.maximum(peak[live], scores.amax(-1, keepdim=True))
        base = new_peak if hidden is None else new_peak.clamp(min=SCORE_MIN)
        keep = torch.exp(peak[live] - base)
        weights = scores.sub_(base).exp_()
        weight_sum[live].mul_(keep).add_(weights.sum(-1, keepdim=True))
        total[live].mul_(keep).add_(torch.bmm(weights, values))
        peak[live] = new_peak
    if call.sinks is not None:
        weight_sum += torch.exp(sinks_of(call.sinks, shape, query.shape[1]) - peak)
    return total / weight_sum


def sinks_of(sinks: torch.Tensor, shape: tuple[int, ...], rows: int) -> torch.Tensor:
    """The sink of each of a tile's rows: [heads] -> [N * kv_heads, rows, 1]."""
    tiles, kv_heads, width, group_size, _ = shape
    found = sinks.view(1, kv_heads, 1, group_size).expand(tiles, kv_heads, width, group_size)
    found = found.reshape(tiles * kv_heads, width * group_size, 1)
    return found.repeat(1, rows // found.shape[1], 1)


def gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """One piece of the cache as float32 [tiles * kv_heads, L, D], in memory of its own."""
    page_count, kv_heads, block_size, width = cache.shape
    piece_size = blocks_per_piece(block_size) * block_size
    kept = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch indexes bytes everywhere, fp8 not
    if cache.is_contiguous():
        found = kept.view(page_count * kv_heads, block_size * width).index_select(0, pages)
    else:
        found = kept[pages // kv_heads, pages % kv_heads]
    found = found.view(cache.dtype).view(-1, piece_size, width)
    return mxint8.unpack(found, mxint8.head_dim_of(cache)) if cache.dtype is torch.int8 else found.float()


def apply_hidden(scores: torch.Tensor, values: torch.Tensor, hidden: Hidden, shape: tuple[int, ...]) -> None:
    """In place: -inf for the scores of keys that a query may not see, zero for stale values."""
    _, kv_heads, width, _, head_dim = shape
    piece_size = scores.shape[-1]
    scores.view(-1, kv_heads, width, scores.shape[1] // width, piece_size).masked_fill_(hidden.mask, float("-inf"))
    values.view(-1, kv_heads, piece_size, head_dim)[hidden.stale_tile, :, hidden.stale_place] = 0.0
