"""Random steps for the paged attention kernel, and dense float64 attention as their oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from vnext.kernels import mxint8
from vnext.kernels.calls import AttentionCall
from vnext.kernels.cuda import attention
from vnext.kernels.cuda.plan import make_plan
from vnext.kernels.references import kv_write

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Shape(NamedTuple):
    """Sizes of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int


class Options(NamedTuple):
    """What a layer may ask for."""

    window: int = 0
    softcap: float = 0.0


class Sequences(NamedTuple):
    """Whole sequences [length, heads, D] of each, their blocks, and caches that are poison elsewhere."""

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    blocks: list[list[int]]
    caches: Any
    shape: Shape


def in_codes(sequences: Sequences) -> tuple[Sequences, Sequences]:
    """The sequences with caches of codes, in which rows that nobody wrote stand for infinities; and with what the codes stand
    for in the caches' type, NaN where nobody wrote."""
    untouched = sequences.caches.isnan().any(-1, keepdim=True)
    head_dim = sequences.shape.head_dim
    kept = mxint8.pack(sequences.caches.nan_to_num(0.0))
    exact = mxint8.unpack(kept, head_dim).to(sequences.caches.dtype).masked_fill(untouched, float("nan"))
    poison = torch.tensor([127] * head_dim + [-1] * (kept.shape[-1] - head_dim), dtype=torch.int8)
    coded = [torch.where(part, poison, cache) for part, cache in zip(untouched, kept, strict=True)]  # each aligned
    return sequences._replace(caches=coded), sequences._replace(caches=exact)


def in_fp8(sequences: Sequences) -> tuple[Sequences, Sequences]:
    """The sequences with caches of float8_e4m3fn, and with what those stand for in the caches' type."""
    small = sequences.caches.float().to(torch.float8_e4m3fn)
    return sequences._replace(caches=small), sequences._replace(caches=small.float().to(sequences.caches.dtype))


class Range(NamedTuple):
    """A row of a step: queries [start, stop) of a sequence after stop tokens."""

    index: int
    start: int
    stop: int


def make_sequences(lengths: list[int], shape: Shape, dtype: torch.dtype, shared: int = 0, seed: int = 0) -> Sequences:
    """Sequences of these lengths in scattered blocks; all begin with the first one's first `shared` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[torch.Tensor]:
        drawn = [torch.randn(length, count, shape.head_dim, generator=generator).to(dtype) for length in lengths]
        return [torch.cat((drawn[0][:shared], tensor[shared:])) for tensor in drawn]

    query, key, value = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)
    counts = [-(-length // shape.block_size) for length in lengths]
    order = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()  # block 0 belongs to nobody
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    for own in blocks:
        own[: shared // shape.block_size] = blocks[0][: shared // shape.block_size]
    caches = torch.full((2, sum(counts) + 3, shape.kv_heads, shape.block_size, shape.head_dim), float("nan")).to(dtype)
    for index, length in enumerate(lengths):
        place = torch.arange(length)
        slots = torch.tensor(blocks[index])[place // shape.block_size] * shape.block_size + place % shape.block_size
        kv_write(key[index], value[index], caches[0], caches[1], slots)
    return Sequences(query, key, value, blocks, caches, shape)


def attend(
    sequences: Sequences, ranges: list[Range], options: Options = Options(), shared: int = 0, scales: tuple[float, float] = (1, 1),
    units_wanted: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """One step through the kernel: the result of each range. Blocks that no query sees are -1 in the table."""
    shape = sequences.shape
    table = np.full((len(ranges), max(map(len, sequences.blocks))), -1, dtype=np.int32)
    for row, (index, start, stop) in enumerate(ranges):
        first = max(start - options.window + 1, 0) // shape.block_size if options.window else 0
        last = -(-stop // shape.block_size)
        table[row, first:last] = sequences.blocks[index][first:last]
    starts = np.cumsum([0] + [stop - start for _, start, stop in ranges])
    contexts = np.array([stop for _, _, stop in ranges])
    query = torch.cat([sequences.query[index][start:stop] for index, start, stop in ranges])
    group, warps = shape.heads // shape.kv_heads, attention.warps_of(shape.head_dim)
    plan = make_plan(starts, contexts, group, options.window, shared, warps, query.device, units_wanted)
    found = attention.paged_attention(query, torch.from_numpy(table), AttentionCall(*sequences.caches, plan, shape.head_dim**-0.5, *options, *scales))
    return list(found.split([stop - start for _, start, stop in ranges]))


def dense(sequences: Sequences, given: Range, options: Options = Options()) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of some rows of a sequence in float64, and the same of the values' sizes, for bounds."""
    index, start, stop = given
    key, value = (tensors[index][:stop].double() for tensors in (sequences.key, sequences.value))
    query = sequences.query[index][start:stop].double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    seen_by, place = torch.arange(start, stop)[:, None], torch.arange(stop)[None]
    hidden = place > seen_by
    if options.window:
        hidden |= place <= seen_by - options.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value), torch.einsum("hqk,khd->qhd", weights, value.abs())


def check(found: torch.Tensor, sequences: Sequences, given: Range, options: Options = Options()) -> None:
    """float32 by its scores' rounding; narrower types also by one of each weight and one of the result."""
    expected, size = dense(sequences, given, options)
    bound = 256 * 2.0**-24 * size
    if found.dtype is not torch.float32:
        bound = bound + 1.01 * ROUNDING[found.dtype] * (size + expected.abs()) + 1e-6
    error = (found.double() - expected).abs()
    assert bool((error <= bound).all()), f"{given}: {(error - bound).max()} too much, of {error.max()}"
