"""Benchmark of paged attention on a GPU: decodes against copy bandwidth and gather + SDPA, prompts against flash SDPA,
both beside other libraries (peers.py).

Owns the shapes, the counts of bytes and operations, and the check before each timing. Keys and values are random, in scattered
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional

from perf.gpu.peers import Asked, compared
from perf.gpu.place import Place
from perf.gpu.report import Figure, figure
from vnext.kernels import mxint8
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cuda import operations as cuda_operations
from vnext.kernels.table import Operations

ERROR_MAX = 2.0**-7
"""For bfloat16 operands: the norm of the difference over the norm of the expected result."""
CHECKED_ROWS = 2
BF16 = torch.bfloat16


class Shape(NamedTuple):
    """Sizes of a layer and of a step in which every row has the same context. `cache`: of bfloat16, int8 or fp8."""

    rows: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    cache: str = "bfloat16"


class Layer(NamedTuple):
    """Caches bfloat16 [blocks, kv_heads, block_size, D] and the table int32 [rows, W] of a shape."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    table: torch.Tensor


TOY = {"heads": 4, "kv_heads": 2, "head_dim": 16}
DECODES = {
    "decode 32 x 8k": (Shape(32, 8192), Shape(2, 260, **TOY), 0.85),
    "decode 32 x 1k": (Shape(32, 1024), Shape(3, 33, **TOY), 0.70),
    "decode 32 x 8k, int8": (Shape(32, 8192, cache="int8"), Shape(2, 260, **TOY, cache="int8"), 0.60),
    "decode 32 x 8k, fp8": (Shape(32, 8192, cache="fp8"), Shape(2, 260, **TOY, cache="fp8"), 0.60),
}
"""The shape, the shape of a dry run, and the target share of copy bandwidth."""
CHUNKS = ((64, 32_704), (65, 32_768), (200, 33_000), (1024, 32_768), (64, 131_072))
TOY_CHUNKS = ((20, 580),)
"""New tokens and how many are before them: the next turn of a chat."""
PREFILL = (Shape(1, 4096), Shape(1, 70, **TOY), 0.60)


def run(place: Place, copy_rate: float | None) -> Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]:
    """Figures and details of each measurement."""
    for name, (real, toy, target) in DECODES.items():
        yield decode(place, name, toy if place.is_dry else real, target, copy_rate)
    for new, behind in TOY_CHUNKS if place.is_dry else CHUNKS:
        yield chunk(place, Shape(1, new + behind, **(TOY if place.is_dry else {})), new)
    yield prefill(place, PREFILL[1] if place.is_dry else PREFILL[0], PREFILL[2])


def make_layer(place: Place, shape: Shape) -> Layer:
    """Random caches, blocks in a random order."""
    generator = torch.Generator(place.device).manual_seed(1)
    width = -(-shape.context // shape.block_size)
    sizes = (shape.rows * width + 1, shape.kv_heads, shape.block_size, shape.head_dim)
    keys, values = (torch.randn(sizes, generator=generator, dtype=BF16, device=place.device) for _ in range(2))
    order = torch.randperm(shape.rows * width, generator=torch.Generator().manual_seed(2)) + 1
    return Layer(keys, values, order.view(shape.rows, width).int().to(place.device))


def narrowed(layer: Layer, kind: str) -> tuple[Layer, tuple[torch.Tensor, ...]]:
    """Caches of this kind, and before them the layer with the numbers that they stand for."""
    if kind == "bfloat16":
        return layer, layer[:2]
    if kind == "fp8":
        kept = tuple(cache.to(torch.float8_e4m3fn) for cache in layer[:2])
        exact = [cache.to(BF16) for cache in kept]
    else:
        kept = tuple(mxint8.pack(cache) for cache in layer[:2])
        exact = [mxint8.unpack(cache, layer.key_cache.shape[-1]).to(BF16) for cache in kept]
    return Layer(*exact, layer.table), kept


def gathered(cache: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """Gather a cache into [rows, kv_heads, context, D], the layout of SDPA."""
    pages = cache[table.long()].transpose(1, 2)
    return pages.reshape(pages.shape[0], pages.shape[1], -1, pages.shape[-1])[:, :, :context]


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error. Raises AssertionError if it is too large or not a number."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error <= ERROR_MAX, f"off by {error:.2e} of its norm, {ERROR_MAX:.2e} allowed"
    return error


def decode(
    place: Place, name: str, shape: Shape, target: float, copy_rate: float | None
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """One query per row."""
    layer, caches = narrowed(make_layer(place, shape), shape.cache)
    query = torch.randn(shape.rows, shape.heads, shape.head_dim, dtype=BF16, device=place.device)
    starts, contexts = np.arange(shape.rows + 1), np.full(shape.rows, shape.context)
    metadata = place.operations.attention_metadata(AttentionStep(starts, contexts, layer.table, shape.block_size, shape.kv_heads))
    scale = shape.head_dim**-0.5

    def ours() -> torch.Tensor:
        return place.operations.paged_attention(query, AttentionCall(*caches, metadata, scale))

    def gather_and_sdpa(rows: int = shape.rows, dtype: torch.dtype = BF16) -> torch.Tensor:
        keys, values = (gathered(cache, layer.table[:rows], shape.context) for cache in layer[:2])
        given = (query[:rows, :, None].to(dtype), keys.to(dtype), values.to(dtype))
        return functional.scaled_dot_product_attention(*given, enable_gqa=True)[:, :, 0]

    error = error_of(ours()[:CHECKED_ROWS], gather_and_sdpa(CHECKED_ROWS, torch.float32))
    assert torch.equal(ours(), ours()), "two runs give different bits"
    mine, theirs = place.clock.times(ours), place.clock.times(gather_and_sdpa)
    row_bytes = caches[0].shape[-1] * caches[0].element_size()
    moved = 2 * shape.rows * shape.context * shape.kv_heads * row_bytes + 2 * query.nbytes
    share = moved / (mine.best_us * 1e-6) / copy_rate if mine.best_us and copy_rate else None
    ratio = theirs.best_us / mine.best_us if mine.best_us and theirs.best_us else None
    figures = (
        figure(f"{name}: of copy bandwidth", share, "", at_least=target),
        figure(f"{name}: gather + SDPA takes", ratio, "times", at_least=1.0),
        figure(f"{name}", mine.best_us, "us"),
    )
    keys, values = (gathered(cache, layer.table, shape.context) for cache in layer[:2])
    asked = Asked(query, *layer, keys, values, starts, contexts)
    others, peers = compared(place, name, asked, mine, ours(), error_of)
    details = {
        "shape": shape._asdict(), "error": error, "bytes": moved, "ours": mine._asdict(), "gather_sdpa": theirs._asdict(),
        "peers": peers,
    }  # fmt: skip
    return figures + others, {name: details}


def chunk(place: Place, shape: Shape, new: int) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """A few new tokens behind a long prefix, with units that are cut to fill the device and with whole ones."""
    layer = make_layer(place, shape)
    query = torch.randn(new, shape.heads, shape.head_dim, dtype=BF16, device=place.device)
    starts, contexts, scale = np.array([0, new]), np.array([shape.context]), shape.head_dim**-0.5

    def attending(operations: Operations) -> Callable[[], torch.Tensor]:
        metadata = operations.attention_metadata(AttentionStep(starts, contexts, layer.table, shape.block_size, shape.kv_heads))
        return lambda: operations.paged_attention(query, AttentionCall(layer.key_cache, layer.value_cache, metadata, scale))

    cut = attending(place.operations)
    error = error_of(cut(), attending(place.plain)())
    with patch.object(cuda_operations, "multiprocessors", lambda device: 0):
        whole = attending(place.operations)
        expected = whole()  # planned now
    assert torch.equal(cut(), expected), "whole units give other bits"
    ours, uncut = place.clock.times(cut), place.clock.times(whole)
    name = f"{new} tokens behind {round((shape.context - new) / 1024)}k"
    figures = (figure(name, ours.best_us, "us"), figure(f"{name}, in whole units", uncut.best_us, "us"))
    return figures, {name: {"shape": shape._asdict(), "new": new, "error": error, "ours": ours._asdict(), "whole": uncut._asdict()}}


def prefill(place: Place, shape: Shape, target: float) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """A whole prompt of each row, its keys and values in pages."""
    layer = make_layer(place, shape)
    tokens = shape.rows * shape.context
    query = torch.randn(tokens, shape.heads, shape.head_dim, dtype=BF16, device=place.device)
    starts, contexts = np.arange(shape.rows + 1) * shape.context, np.full(shape.rows, shape.context)
    metadata = place.operations.attention_metadata(AttentionStep(starts, contexts, layer.table, shape.block_size, shape.kv_heads))
    dense = query.view(shape.rows, shape.context, shape.heads, shape.head_dim).transpose(1, 2).contiguous()
    keys, values = (gathered(cache, layer.table, shape.context).contiguous() for cache in layer[:2])
    group = shape.heads // shape.kv_heads
    wide_keys, wide_values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scale = shape.head_dim**-0.5

    def ours() -> torch.Tensor:
        return place.operations.paged_attention(query, AttentionCall(layer.key_cache, layer.value_cache, metadata, scale))

    def sdpa() -> torch.Tensor:
        with flash(place):
            return functional.scaled_dot_product_attention(dense, wide_keys, wide_values, is_causal=True)

    error = error_of(ours().view(dense.transpose(1, 2).shape).transpose(1, 2), sdpa())
    mine, theirs = place.clock.times(ours), place.clock.times(sdpa)
    ratio = theirs.best_us / mine.best_us if mine.best_us and theirs.best_us else None
    count = 2 * shape.rows * shape.context**2 * shape.heads * shape.head_dim
    rate = count / mine.best_us * 1e-6 if mine.best_us else None
    figures = (
        figure("prefill 4k: of flash SDPA's rate", ratio, "", at_least=target),
        figure("prefill 4k", rate, "TFLOP/s"),
    )
    asked = Asked(query, *layer, keys, values, starts, contexts)
    others, peers = compared(place, "prefill 4k", asked, mine, ours(), error_of)
    details = {
        "shape": shape._asdict(), "error": error, "operations": count, "ours": mine._asdict(), "sdpa": theirs._asdict(),
        "peers": peers,
    }  # fmt: skip
    return figures + others, {"prefill 4k": details}


def flash(place: Place) -> Any:
    """Allow only torch's flash kernel on a GPU, any kernel on a CPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.MATH] if place.is_dry else [SDPBackend.FLASH_ATTENTION])
