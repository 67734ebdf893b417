"""Thin products of LoRA adapters: blocks of an adapter beside the columns of a product, and what they add in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.shards import joined

LANES = 16
TOKENS_AT, COUNT_AT, PADDED_RANK_AT = 2, 3, 5
"""Of the numbers by which a kernel knows a block: addresses of down, up and tokens, count of tokens, rank, columns of down,
first, width."""


class ThinBlock(NamedTuple):
    """What an adapter of `rank` adds to the columns [first, first + width) of a product: up(down(x)).

    down [in, padded rank] and up [padded width / LANES, rank, LANES] have the dtype of x and are dense; zeros pad rank and width to
    whole LANES. `up_matrix` is up as [rank, width].
    """

    down: torch.Tensor
    up: torch.Tensor
    rank: int
    first: int
    width: int

    def up_matrix(self) -> torch.Tensor:
        return self.up.transpose(0, 1).reshape(self.rank, -1)[:, : self.width]


class ThinNeeds(NamedTuple):
    """What blocks ask of a product: the numbers of inputs, the columns it must have, and the dtypes."""

    inputs: frozenset[int]
    columns: int
    dtypes: frozenset[torch.dtype]


class ThinBlocks:
    """The blocks of one adapter for one product; they have different columns."""

    def __init__(self, blocks: Sequence[ThinBlock]) -> None:
        self.blocks = tuple(blocks)

    @cached_property
    def needs(self) -> ThinNeeds:
        ends = [block.first + block.width for block in self.blocks]
        dtypes = frozenset(matrix.dtype for block in self.blocks for matrix in (block.down, block.up))
        return ThinNeeds(frozenset(block.down.shape[0] for block in self.blocks), max(ends, default=0), dtypes)

    @property
    def size_bytes(self) -> int:
        return sum(matrix.nbytes for block in self.blocks for matrix in (block.down, block.up))

    @cached_property
    def lines(self) -> np.ndarray:
        """int64 [n, 8], without tokens."""
        return np.array(
            [
                (down.data_ptr(), up.data_ptr(), 0, 0, rank, down.shape[1], first, width)
                for down, up, rank, first, width in self.blocks
            ],
            dtype=np.int64,
        )


class ThinRows(NamedTuple):
    """The tokens of a step, int64 [n], that have one adapter; their address and number."""

    tokens: np.ndarray
    address: int
    count: int  # type: ignore[assignment]  # hides tuple.count


def thin_rows(tokens: np.ndarray) -> ThinRows:
    return ThinRows(tokens, tokens.ctypes.data, len(tokens))


class ThinParts:
    """The blocks that one product adds in a step, with the tokens to whose rows each adapter's are added.

    A token has one adapter. Immutable: what follows from the parts is computed once, for all steps that have them.
    """

    def __init__(self, parts: Sequence[tuple[ThinBlocks, ThinRows]]) -> None:
        self._parts = tuple(parts)

    @property
    def pairs(self) -> Iterator[tuple[ThinBlock, torch.Tensor]]:
        """Each block with its tokens."""
        return ((block, torch.from_numpy(rows.tokens)) for blocks, rows in self._parts for block in blocks.blocks)

    def replaced(self, blocks: Callable[[ThinBlocks], ThinBlocks]) -> ThinParts:
        """The same tokens with other blocks."""
        return ThinParts([(blocks(own), rows) for own, rows in self._parts])

    def cut(self, start: int, stop: int) -> ThinParts | None:
        """Of the tokens [start, stop) alone, counted from `start`; None if they have no adapter."""
        each = ((blocks, rows.tokens[(rows.tokens >= start) & (rows.tokens < stop)] - start) for blocks, rows in self._parts)
        found = [(blocks, thin_rows(tokens)) for blocks, tokens in each if len(tokens)]
        return ThinParts(found) if found else None

    @cached_property
    def needs(self) -> ThinNeeds:
        each = [blocks.needs for blocks, _ in self._parts]
        inputs, columns, dtypes = zip(*each) if each else ((), (0,), ())
        return ThinNeeds(frozenset().union(*inputs), max(columns), frozenset().union(*dtypes))

    @cached_property
    def narrow_count(self) -> int:
        """How many numbers all down(x) are, with their padding."""
        return int((self.lines[:, COUNT_AT] * self.lines[:, PADDED_RANK_AT]).sum())

    @cached_property
    def lines(self) -> np.ndarray:
        """int64 [n, 8], one line for each block."""
        given = [np.empty((0, 8), np.int64), *(blocks.lines for blocks, _ in self._parts)]
        lines, sizes = np.concatenate(given), list(map(len, given[1:]))
        lines[:, TOKENS_AT] = np.repeat([rows.address for _, rows in self._parts], sizes)
        lines[:, COUNT_AT] = np.repeat([rows.count for _, rows in self._parts], sizes)
        return lines


class StackParts(NamedTuple):
    """What adapters add to the products of a stack of layers in a step.

    `lines` are as ThinParts has them, int64 [n, 8], those of product p from starts[p] to starts[p + 1]. `rows` keeps the tokens
    whose addresses the lines have.
    """

    lines: np.ndarray
    starts: np.ndarray
    rows: tuple[ThinRows, ...]


class StackLines(NamedTuple):
    """One adapter's lines for a stack, int64 [n, 8], without tokens, and the product that each belongs to, int64 [n]."""

    lines: np.ndarray
    products: np.ndarray


def stack_lines(blocks: Mapping[int, ThinBlocks], products: Mapping[int, int]) -> StackLines:
    """The lines of an adapter's blocks; `products` gives the place of the product of each key."""
    found = [(blocks[key].lines, place) for key, place in products.items() if key in blocks]
    lines = [np.empty((0, 8), np.int64), *(lines for lines, _ in found)]
    places = [np.full(len(each), place) for each, (_, place) in zip(lines[1:], found)]
    return StackLines(np.concatenate(lines), np.concatenate([np.empty(0, np.int64), *places]))


def stack_parts(chosen: Sequence[tuple[StackLines, ThinRows]], product_count: int) -> StackParts:
    """The parts of a step whose adapters have these rows."""
    sizes = [len(each.lines) for each, _ in chosen]
    lines, products = np.concatenate([each.lines for each, _ in chosen]), np.concatenate([each.products for each, _ in chosen])
    lines[:, TOKENS_AT] = np.repeat([rows.address for _, rows in chosen], sizes)
    lines[:, COUNT_AT] = np.repeat([rows.count for _, rows in chosen], sizes)
    order = np.argsort(products, kind="stable")
    starts = np.searchsorted(products[order], np.arange(product_count + 1))
    return StackParts(lines[order], starts, tuple(rows for _, rows in chosen))


def thin_bytes(down: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> int:
    """How many bytes the block of these two takes."""
    return sum(map(prod, _shapes(down, up))) * dtype.itemsize


def thin_block(
    down: torch.Tensor, up: torch.Tensor, first: int, dtype: torch.dtype, memory: torch.Tensor | None = None
) -> ThinBlock:
    """The block of down [rank, in] and up [width, rank], any float dtype, for the columns from `first` on and x of `dtype`.

    It lies in `memory`, uint8 zeros of `thin_bytes`, or in memory of its own.
    """
    if memory is None:
        memory = torch.zeros(thin_bytes(down, up, dtype), dtype=torch.uint8)
    shapes, (width, rank) = _shapes(down, up), up.shape
    placed_down, placed_up = (part.view(shape) for part, shape in zip(memory.view(dtype).split([*map(prod, shapes)]), shapes))
    placed_down[:, :rank].copy_(down.to(dtype).t())
    rounded, whole = up.to(dtype), width // LANES
    placed_up[:whole].copy_(rounded[: whole * LANES].view(whole, LANES, rank).transpose(1, 2))
    if width % LANES:
        placed_up[whole, :, : width % LANES].copy_(rounded[whole * LANES :].t())
    return ThinBlock(placed_down, placed_up, rank, first, width)


def _shapes(down: torch.Tensor, up: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rank, inputs = down.shape
    return (inputs, -(-rank // LANES) * LANES), (-(-up.shape[0] // LANES), rank, LANES)


def add_thin(
    product: torch.Tensor,
    x: torch.Tensor,
    parts: ThinParts,
    shards: int = 1,
    join: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Add each part to its rows of product [T, out], from the same rows of x [T, in]; sums are float32, rounded once. Changes
    `product` and returns it.

    down(x) is summed in so many shards of x. `join` adds what ranks that have a part of x each have of all down(x), float32 [N].
    """
    narrows = [narrowed(x.index_select(0, tokens).float(), block, shards) for block, tokens in parts.pairs]
    if join is not None and narrows:
        sizes = [each.numel() for each in narrows]
        total = join(torch.cat([each.reshape(-1) for each in narrows])).split(sizes)
        narrows = [own.view(each.shape) for own, each in zip(total, narrows)]
    for (block, tokens), narrow in zip(parts.pairs, narrows):
        columns = slice(block.first, block.first + block.width)
        change = narrow @ block.up_matrix().float()
        product[tokens, columns] = (product[tokens, columns].float() + change).to(product.dtype)
    return product


def narrowed(x: torch.Tensor, block: ThinBlock, shards: int) -> torch.Tensor:
    """down(x) of x float32 [n, in] -> [n, rank]."""
    down = block.down[:, : block.rank].float()
    found: torch.Tensor = joined([own @ part for own, part in zip(x.chunk(shards, 1), down.chunk(shards))])
    return found
