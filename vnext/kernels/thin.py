"""Thin products of LoRA adapters: blocks of an adapter beside the columns of a product, and what they add in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

LANES = 16


class ThinBlock(NamedTuple):
    """What an adapter of `rank` adds to the columns [first, first + width) of a product: up(down(x)).

    down float32 [in, rank] and up float32 [rank, width], each padded with zeros to columns in whole LANES, dense.
    """

    down: torch.Tensor
    up: torch.Tensor
    rank: int
    first: int
    width: int


ThinParts = Sequence[tuple[ThinBlock, torch.Tensor]]
"""Blocks with the tokens, int64 [n], to whose rows they are added. Blocks of one token have different columns."""


def thin_block(down: torch.Tensor, up: torch.Tensor, first: int) -> ThinBlock:
    """The block of down [rank, in] and up [width, rank], any float dtype, for the columns from `first` on."""

    def padded(matrix: torch.Tensor) -> torch.Tensor:
        return functional.pad(matrix.float(), (0, -matrix.shape[1] % LANES)).contiguous()

    return ThinBlock(padded(down.t()), padded(up.t()), down.shape[0], first, up.shape[0])


def add_thin(product: torch.Tensor, x: torch.Tensor, parts: ThinParts) -> torch.Tensor:
    """Add each part to its rows of product [T, out], from the same rows of x [T, in]; sums are float32, rounded once. Changes
    `product` and returns it."""
    for block, tokens in parts:
        columns = slice(block.first, block.first + block.width)
        narrow = x.index_select(0, tokens).float() @ block.down[:, : block.rank]
        change = narrow @ block.up[:, : block.width]
        product[tokens, columns] = (product[tokens, columns].float() + change).to(product.dtype)
    return product
