"""Thin products of LoRA adapters: blocks of an adapter beside the columns of a product, and what they add in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

LANES = 16
TOKENS_AT, COUNT_AT = 2, 3
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

    tokens: torch.Tensor
    address: int
    count: int


def thin_rows(tokens: torch.Tensor) -> ThinRows:
    return ThinRows(tokens, tokens.data_ptr(), len(tokens))


class ThinParts:
    """The blocks that one product adds in a step, with the tokens to whose rows each adapter's are added.

    A token has one adapter. Immutable: what follows from the parts is computed once, for all steps that have them.
    """

    def __init__(self, parts: Sequence[tuple[ThinBlocks, ThinRows]]) -> None:
        self._parts = tuple(parts)

    @property
    def pairs(self) -> Iterator[tuple[ThinBlock, torch.Tensor]]:
        """Each block with its tokens."""
        return ((block, rows.tokens) for blocks, rows in self._parts for block in blocks.blocks)

    @cached_property
    def needs(self) -> ThinNeeds:
        each = [blocks.needs for blocks, _ in self._parts]
        inputs, columns, dtypes = zip(*each) if each else ((), (0,), ())
        return ThinNeeds(frozenset().union(*inputs), max(columns), frozenset().union(*dtypes))

    @cached_property
    def lines(self) -> np.ndarray:
        """int64 [n, 8], one line for each block."""
        given = [np.empty((0, 8), np.int64), *(blocks.lines for blocks, _ in self._parts)]
        lines, sizes = np.concatenate(given), list(map(len, given[1:]))
        lines[:, TOKENS_AT] = np.repeat([rows.address for _, rows in self._parts], sizes)
        lines[:, COUNT_AT] = np.repeat([rows.count for _, rows in self._parts], sizes)
        return lines


def thin_block(down: torch.Tensor, up: torch.Tensor, first: int, dtype: torch.dtype) -> ThinBlock:
    """The block of down [rank, in] and up [width, rank], any float dtype, for the columns from `first` on and x of `dtype`."""

    def padded(matrix: torch.Tensor) -> torch.Tensor:
        return functional.pad(matrix.to(dtype), (0, -matrix.shape[1] % LANES)).contiguous()

    rank, width = down.shape[0], up.shape[0]
    tiles = padded(up.t()).view(rank, -1, LANES).transpose(0, 1).contiguous()
    return ThinBlock(padded(down.t()), tiles, rank, first, width)


def add_thin(product: torch.Tensor, x: torch.Tensor, parts: ThinParts) -> torch.Tensor:
    """Add each part to its rows of product [T, out], from the same rows of x [T, in]; sums are float32, rounded once. Changes
    `product` and returns it."""
    for block, tokens in parts.pairs:
        columns = slice(block.first, block.first + block.width)
        narrow = x.index_select(0, tokens).float() @ block.down[:, : block.rank].float()
        change = narrow @ block.up_matrix().float()
        product[tokens, columns] = (product[tokens, columns].float() + change).to(product.dtype)
    return product
