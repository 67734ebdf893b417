"""Thin products of adapters that lie in the regions of one memory, for tokens that come in tiles of one adapter.

What they add is what `thin.py` adds. Shapes and addresses do not depend on the adapters of a step, so that a graph serves any of
them: a region's header says what is in it, and a tile says whose it is. The sums have the order of cuda/thin.cu, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.thin import LANES, ThinBlocks

TILE_TOKENS, SEGMENT, CHAINS = 8, 512, 64
LINE_WORDS = 8
NAME_BYTES = 64
"""A region begins with a name and lines of LINE_WORDS int64: where down and up begin (bytes from the region's begin), rank,
first, width, and room. All as cuda/thin.cu has them."""
ALIGNMENT_BYTES = 128


class ThinTiles(NamedTuple):
    """Tokens of a step that have an adapter: `tokens` int32 [N], grouped by adapter, each in one tile of `tiles` int32 [M, 3]:
    region, first place in `tokens`, count (at most TILE_TOKENS, 0 for a tile that is not used)."""

    tokens: torch.Tensor
    tiles: torch.Tensor


class ThinLines(NamedTuple):
    """A product's lines in the header of every region: the number of the first one, and how many there are. A line has at most
    `width_max` columns; `rank_room` is the largest rank of an adapter, rounded up to LANES."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    width_max: int
    rank_room: int


def tile_room(token_max: int, region_max: int) -> int:
    """The most tiles that `token_max` tokens of `region_max` adapters make."""
    return min(token_max, -(-token_max // TILE_TOKENS) + region_max)


def make_tiles(groups: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of ThinTiles (int32 [N] and [M, 3]) of regions with their tokens (int64 each)."""
    tiles, begin = [], 0
    for region, tokens in groups:
        firsts = range(begin, begin + len(tokens), TILE_TOKENS)
        begin += len(tokens)
        tiles += [(region, first, min(TILE_TOKENS, begin - first)) for first in firsts]
    found = np.concatenate([np.empty(0, np.int64), *(tokens for _, tokens in groups)])
    return found.astype(np.int32), np.array(tiles, dtype=np.int32).reshape(-1, 3)


def tokens_by_region(tokens: np.ndarray, tiles: np.ndarray) -> dict[int, np.ndarray]:
    """The inverse of `make_tiles`."""
    found: dict[int, list[np.ndarray]] = {}
    for region, first, count in tiles.tolist():
        if count:
            found.setdefault(region, []).append(tokens[first : first + count].astype(np.int64))
    return {region: np.concatenate(parts) for region, parts in found.items()}


def header_bytes(line_count: int) -> int:
    """How many bytes of a region come before the matrices."""
    size = NAME_BYTES + line_count * LINE_WORDS * 8
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def write_header(region: torch.Tensor, name: str, products: Sequence[tuple[Sequence[int], ThinBlocks | None]]) -> None:
    """Write the header of a region (uint8, on the host) whose matrices are there. `products`: for each, in the order of their
    lines, the first columns of its lines, and the blocks that lie in the region."""
    words = region[: header_bytes(sum(len(firsts) for firsts, _ in products))].numpy()
    words[:] = 0
    encoded = np.frombuffer(name.encode(), np.uint8)
    words[: len(encoded)] = encoded
    lines, at, begin = words[NAME_BYTES:].view(np.int64).reshape(-1, LINE_WORDS), 0, region.data_ptr()
    for firsts, blocks in products:
        for block in blocks.blocks if blocks is not None else ():
            places = (block.down.data_ptr() - begin, block.up.data_ptr() - begin)
            lines[at + firsts.index(block.first), :5] = *places, block.rank, block.first, block.width
        at += len(firsts)


def names_of(memory: torch.Tensor) -> list[str]:
    """The name in each region of the first NAME_BYTES of `memory`, uint8 [regions, NAME_BYTES or more], on the host."""
    return [bytes(region[:NAME_BYTES].numpy()).rstrip(b"\0").decode(errors="replace") for region in memory]


def add_tiled(
    product: torch.Tensor, x: torch.Tensor, memory: torch.Tensor, tokens: torch.Tensor, tiles: torch.Tensor, lines: ThinLines
) -> torch.Tensor:
    """Add up(down(x)) to the rows of product [T, out] that have an adapter, in place, from the same rows of x [T, in].

    `memory` uint8 [regions, bytes] on the device; `tokens` and `tiles` as in ThinTiles. Returns `product`. Waits for the device.
    """
    order = tokens.cpu().numpy()
    for region, rows in tokens_by_region(order, tiles.cpu().numpy()).items():
        at = torch.from_numpy(rows).to(product.device)
        for down, up, first, width in _matrices(memory[region], lines, x):
            columns = slice(first, first + width)
            change = sum_up(sum_down(x.index_select(0, at), down), up)[:, :width]
            product[at, columns] = (product[at, columns].float() + change).to(product.dtype)
    return product


def _matrices(region: torch.Tensor, lines: ThinLines, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """down [in, rank], up [rank, columns], the first column and the width of each line that is used."""
    begin = NAME_BYTES + lines.first * LINE_WORDS * 8
    header = region[begin : begin + lines.count * LINE_WORDS * 8].cpu().view(torch.int64).view(-1, LINE_WORDS)
    for down_at, up_at, rank, first, width in header[:, :5].tolist():
        if rank:
            padded, columns = -(-rank // LANES) * LANES, -(-width // LANES)
            down = region[down_at : down_at + x.shape[1] * padded * x.itemsize].view(x.dtype).view(-1, padded)
            up = region[up_at : up_at + columns * rank * LANES * x.itemsize].view(x.dtype).view(columns, rank, LANES)
            yield down[:, :rank], up.transpose(0, 1).reshape(rank, -1), first, width


def sum_down(x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """x [n, in] times down [in, rank] -> float32 [n, rank]: chains over every CHAINS-th input of a segment, added in rising
    order, as are the segments."""
    (count, inputs), rank = x.shape, down.shape[1]
    segments = -(-inputs // SEGMENT)
    padding = segments * SEGMENT - inputs
    wide = torch.nn.functional.pad(x.float(), (0, padding)).view(count, segments, -1, CHAINS, 1)
    weights = torch.nn.functional.pad(down.float(), (0, 0, 0, padding)).view(segments, -1, CHAINS, rank)
    chains = wide.new_zeros((count, segments, CHAINS, rank))
    for place in range(SEGMENT // CHAINS):
        chains += wide[:, :, place] * weights[:, place]
    return _sum_in_order(_sum_in_order(chains))


def sum_up(narrow: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """narrow float32 [n, rank] times up [rank, out] -> float32 [n, out], over the ranks in rising order."""
    total = narrow.new_zeros((narrow.shape[0], up.shape[1]))
    for place in range(up.shape[0]):
        total += narrow[:, place : place + 1] * up[place].float()
    return total


def _sum_in_order(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension but one, in rising order."""
    first, *others = terms.unbind(-2)
    total = first.clone()
    for term in others:
        total += term
    return total
