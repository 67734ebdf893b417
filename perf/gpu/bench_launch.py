"""Benchmark of the host's cost of launching a layer's operations, from C++ and from Python, with the real driver and allocator.

Measures no speed of the GPU: a call's time ends when it returns. Few launches occur between two waits for the GPU, so its queue
is never full. The results of both implementations are first compared bit for bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from perf.gpu.place import Place, launch_forms
from perf.gpu.report import Figure, figure
from vnext.kernels.calls import AttentionStep

TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, INNER = 8, 32, 8, 128, 16, 14336
TOY_HEADS, TOY_KV_HEADS, TOY_HEAD_DIM, TOY_INNER = 4, 2, 16, 32
CONTEXT, CHUNK = 1000, 57
ROUNDS, CALLS = 30, 20


def run(place: Place, copy_rate: float | None) -> Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]:
    """Yield a figure for each operation and implementation."""
    works, results, figures = cases(place), {}, []
    for form in launch_forms(place):
        for name, work in works.items():
            result = results.setdefault(name, work())
            assert torch.equal(result, work()), f"{name} gives other bits {form}"
            figures.append(figure(f"launch of {name}, {form}", None if place.is_dry else host_us(work), "us"))
    yield tuple(figures), {}


def host_us(work: Callable[[], Any]) -> float:
    """Return the median host time of a call."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for _ in range(CALLS):
            work()
        rounds.append((time.perf_counter() - begin_s) / CALLS)
    return statistics.median(rounds) * 1e6


def cases(place: Place) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the operations of a layer, each of which returns one tensor."""
    heads, kv_heads, head_dim, inner = (
        (TOY_HEADS, TOY_KV_HEADS, TOY_HEAD_DIM, TOY_INNER) if place.is_dry else (HEADS, KV_HEADS, HEAD_DIM, INNER)
    )
    device, ours = place.device, torch.ops.vnext_cuda
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    lengths = [1] * TOKENS + [CHUNK]
    table = torch.zeros(len(lengths), -(-CONTEXT // BLOCK_SIZE), dtype=torch.int32, device=device)
    starts, contexts = np.cumsum([0, *lengths]), np.full(len(lengths), CONTEXT)
    metadata = place.operations.attention_metadata(AttentionStep(starts, contexts, table, BLOCK_SIZE, kv_heads))
    x, weight, gates = draw(TOKENS, heads * head_dim), draw(heads * head_dim), draw(TOKENS, 2 * inner)
    qkv, angles = draw(TOKENS, (heads + 2 * kv_heads) * head_dim), draw(TOKENS, head_dim // 2).float()
    query, caches = draw(sum(lengths), heads, head_dim), draw(2, 4, kv_heads, BLOCK_SIZE, head_dim)
    slots = torch.arange(TOKENS, device=device)
    plan = metadata.plan(heads, head_dim, 0)
    planned = (metadata.block_table, list(plan[:7]), plan.slot_count, plan.narrow_is_partial)
    return {
        "rms_norm": lambda: ours.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda: ours.add_rms_norm(x, x, weight, 1e-5)[0],
        "gate_and_mul": lambda: ours.gate_and_mul(gates, "silu"),
        "rotary_kv_write": lambda: ours.rotary_kv_write(qkv, None, None, 1e-5, angles, angles, *caches, slots),
        "paged_attention": lambda: ours.paged_attention(query, *caches, *planned, head_dim**-0.5, 0, 0.0),
    }
