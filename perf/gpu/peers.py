"""Other attention libraries on the same tensors: torch's varlen and flex attention, and FlashInfer if it is installed.

Owns the calls. A library that cannot run here (another version, a missing kernel, not installed) is reported with the reason
and fails nothing, because that says nothing about our kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from perf.gpu.place import Place
from perf.gpu.report import Figure, figure
from perf.gpu.timing import Times
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cuda import flashinfer, flex as flex_backend

Work = Callable[[], torch.Tensor]


class Asked(NamedTuple):
    """A step of whole rows: query [T, heads, D], caches and table int32 [R, W] in pages, keys and values dense
    [R, kv_heads, context, D], starts of rows and contexts on the host."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    table: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: np.ndarray
    contexts: np.ndarray


def varlen(asked: Asked) -> Work:
    """torch.nn.attention.varlen over dense keys and values. Causal, where rows have more than one query."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    rows, kv_heads, context, head_dim = asked.keys.shape
    queries, heads = int(asked.starts[1]), asked.query.shape[1]
    more: dict[str, Any] = {}
    if queries > 1:  # an older signature, then the newer one
        more = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    tensors = [part.transpose(1, 2).reshape(rows * context, kv_heads, head_dim) for part in (asked.keys, asked.values)]
    if heads != kv_heads and "enable_gqa" in known:  # older versions infer shared heads
        more["enable_gqa"] = True
    device = asked.query.device
    starts = torch.from_numpy(asked.starts.astype(np.int32)).to(device)
    key_starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * context
    return lambda: varlen_attn(asked.query, *tensors, starts, key_starts, queries, context, **more)


def flex(place: Place, asked: Asked) -> Work:
    """torch's flex attention, compiled on a GPU, causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, _, context, head_dim = asked.keys.shape
    queries, heads = int(asked.starts[1]), asked.query.shape[1]
    query = asked.query.view(rows, queries, heads, head_dim).transpose(1, 2).contiguous()
    offset = context - queries
    mask = create_block_mask(lambda b, h, q, k: k <= q + offset, None, None, queries, context, device=place.device)
    attend = flex_attention if place.is_dry else torch.compile(flex_attention, dynamic=False)

    def work() -> torch.Tensor:
        seen = attend(query, asked.keys, asked.values, block_mask=mask, enable_gqa=True)
        return seen.transpose(1, 2).flatten(0, 1)

    return work


def by_flex_backend(asked: Asked) -> Work:
    """`--attention flex`: the same over the pages, whose copy counts. Rows that it does not take are our kernel's."""
    _, kv_heads, block_size, head_dim = asked.key_cache.shape
    metadata = flex_backend.attention_metadata(AttentionStep(asked.starts, asked.contexts, asked.table, block_size, kv_heads))
    return lambda: flex_backend.paged_attention(asked.query, AttentionCall(asked.key_cache, asked.value_cache, metadata, head_dim**-0.5))


def by_flashinfer(asked: Asked) -> Work:
    """FlashInfer over the pages, planned beforehand like our kernel."""
    _, kv_heads, block_size, head_dim = asked.key_cache.shape
    metadata = flashinfer.attention_metadata(AttentionStep(asked.starts, asked.contexts, asked.table, block_size, kv_heads))
    return lambda: flashinfer.paged_attention(asked.query, AttentionCall(asked.key_cache, asked.value_cache, metadata, head_dim**-0.5))


def compared(
    place: Place, name: str, asked: Asked, mine: Times, expected: torch.Tensor, check: Callable[..., float]
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """Time each library beside our kernel, with the reason if it cannot run."""
    makers: dict[str, Callable[[], Work]] = {"varlen": lambda: varlen(asked), "flex": lambda: flex(place, asked)}
    if asked.starts[1] >= flex_backend.QUERIES_MIN:
        makers["flex over pages"] = lambda: by_flex_backend(asked)
    if flashinfer.is_installed():
        makers["FlashInfer"] = lambda: by_flashinfer(asked)
    figures, reported = [], {}
    for peer, make in makers.items():
        try:
            work = make()
            check(work(), expected)
            times = place.clock.times(work)
        except Exception as error:  # any error of another library is reported, and our kernel is still measured
            reported[peer] = {"not_compared": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        ratio = times.best_us / mine.best_us if times.best_us and mine.best_us else None
        figures.append(figure(f"{name}: {peer} attention takes", ratio, "times"))
        reported[peer] = times._asdict()
    return tuple(figures), reported
