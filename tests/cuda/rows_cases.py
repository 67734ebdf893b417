"""Random rows for the row-wise kernels, bounds of rounding, adapters with their tiles for the kernels of thin products, and weights of
four bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vnext.kernels.codes import Codes, Scales
from vnext.kernels.cuda import operations
from vnext.kernels.cuda.few_bits import DeviceFewBits
from vnext.kernels.thin import LANES, ThinBlock, ThinBlocks, thin_block, thin_bytes
from vnext.kernels.thin_tiles import ThinLines, ThinTiles, header_bytes, make_tiles, write_header

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half of the distance between neighbours, relative. float16's is coarser below 2**-14: see `half_step`."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def half_step(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What one rounding to `dtype` may change."""
    return expected.abs() * ROUNDING[dtype] + (2.0**-25 if dtype is torch.float16 else 0.0)


def within(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Assert that each element is near enough."""
    error = (found.double() - expected.double()).abs()
    assert bool((error <= bound).all()), f"{(error - bound).max()} too much, of {error.max()}"


class Adapters(NamedTuple):
    """`memory` with a region for each adapter; the lines of the one product, and each adapter's blocks."""

    memory: torch.Tensor
    lines: ThinLines
    blocks: list[list[ThinBlock]]
    inputs: int
    columns: int


def adapters(inputs: int, widths: Sequence[int], ranks: Sequence[Sequence[int]], dtype: torch.dtype, first: int = 0) -> Adapters:
    """A region for each of `ranks`, which has the rank of each line, 0 where it changes nothing. Lines are `widths` wide and begin
    at column `first`, side by side. A line of another product comes before them."""
    firsts = [first + sum(widths[:at]) for at in range(len(widths))]
    room = -(-max(max(each) for each in ranks) // LANES) * LANES
    pairs = [
        [(draw(rank, inputs, seed=31 * at + line), draw(width, rank, seed=31 * at + line + 7)) for line, (rank, width) in enumerate(zip(each, widths))]
        for at, each in enumerate(ranks)
    ]  # fmt: skip
    sizes = [[thin_bytes(*pair, dtype) if rank else 0 for pair, rank in zip(of, each)] for of, each in zip(pairs, ranks)]
    begin = header_bytes(1 + len(widths))
    memory = torch.zeros(len(ranks), begin + max(map(sum, sizes)), dtype=torch.uint8)
    blocks = []
    for region, of, its, each in zip(memory, pairs, sizes, ranks):
        parts = region[begin : begin + sum(its)].split(its)
        made = [thin_block(*pair, at, dtype, part) for pair, at, part, rank in zip(of, firsts, parts, each) if rank]
        write_header(region, f"adapter of ranks {each}", [([0], None), (firsts, ThinBlocks(made))])
        blocks.append(made)
    return Adapters(memory, ThinLines(1, len(widths), max(widths), room), blocks, inputs, first + sum(widths))


def tiles_of(groups: Sequence[tuple[int, Sequence[int]]], unused: int = 0) -> ThinTiles:
    """Regions with their tokens; behind them tiles that are not used, and tokens that are in none."""
    tokens, tiles = make_tiles([(region, np.array(rows)) for region, rows in groups])
    tokens = np.concatenate((tokens, np.full(unused, -1, dtype=np.int32)))
    return ThinTiles(torch.from_numpy(tokens), torch.from_numpy(np.concatenate((tiles, np.zeros((unused, 3), dtype=np.int32)))))


FORMS = ("zero", "lows", "parts", "wide")


def weight(form: str, outputs: int, inputs: int, group: int, bits: int = 4) -> Codes:
    """Random codes: with float16 scales and a zero, with lows too, with parts of spans as K blocks have them, with float32 scales."""
    random = np.random.default_rng(outputs + inputs + group)
    codes = random.integers(0, 2**bits, (outputs, inputs), np.uint8)
    scales = (random.standard_normal((2, outputs, inputs // group)) / 8).astype(np.float32)
    match form:
        case "zero":
            return Codes(codes, bits, Scales(scales[0].astype(np.float16)), 8)
        case "lows":
            return Codes(codes, bits, Scales(scales[0].astype(np.float16)), lows=Scales(scales[1].astype(np.float16)))
        case "parts":
            parts, spans = random.integers(0, 64, scales.shape, np.uint8), scales[:, :, :1].astype(np.float16)
            return Codes(codes, bits, Scales(parts[0], spans[0]), lows=Scales(parts[1], spans[1]))
    return Codes(codes, bits, Scales(scales[0]), 7)


def device(codes: Codes, dtype: torch.dtype) -> DeviceFewBits:
    found = operations.pack_codes((codes,), dtype, "", 1)
    assert isinstance(found, DeviceFewBits)
    return found
