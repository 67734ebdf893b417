"""The table's operations beside the references, on tensors of one device: a CPU's through the host shim, or a GPU's.

Owns the comparison, so that the tests and the check on a GPU make the same calls: `agree(faster, plain, device, slack)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from attention_steps import Sequences, Shape, make_sequences
from rows_cases import ROUNDING, adapters, draw, tiles_of

from vnext.kernels import contracts
from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite
from vnext.kernels.contracts import FP8
from vnext.kernels.mxint8 import pack, packed_width

Functions = Mapping[str, Callable[..., Any]]
BF16 = torch.bfloat16


class Step(NamedTuple):
    """Queries of a decode and a prompt, or of decodes behind a shared prefix, and what attention asks for."""

    query: torch.Tensor
    caches: torch.Tensor
    starts: np.ndarray
    contexts: np.ndarray
    table: torch.Tensor
    shared_blocks: int


def mixed_step(device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """A decode over 300 tokens and a prompt of 20."""
    sequences = make_sequences([300, 20], Shape(4, 2, 16, 16), dtype)
    query = torch.cat((sequences.query[0][-1:], sequences.query[1]))
    starts, contexts = np.array([0, 1, 21]), np.array([300, 20])
    return Step(query.to(device), sequences.caches.to(device), starts, contexts, places(sequences).to(device), 0)


def shared_step(device: torch.device) -> Step:
    """Three decodes that begin with the same 288 tokens, of which whole splits are read together."""
    lengths = [300, 289, 310]
    sequences = make_sequences(lengths, Shape(4, 2, 16, 16), BF16, shared=288)
    query = torch.cat([each[-1:] for each in sequences.query])
    contexts = np.array(lengths)
    return Step(query.to(device), sequences.caches.to(device), np.arange(4), contexts, places(sequences).to(device), 18)


def places(sequences: Sequences) -> torch.Tensor:
    """Block tables, zeros behind what a row has."""
    table = torch.zeros(len(sequences.blocks), max(map(len, sequences.blocks)), dtype=torch.int32)
    for row, blocks in enumerate(sequences.blocks):
        table[row, : len(blocks)] = torch.tensor(blocks)
    return table


def rotary_step(device: torch.device, cache: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """qkv, norms, angles, caches and slots of five tokens."""
    angles = draw(5, 8)
    caches = torch.zeros(2, 4, 2, 4, packed_width(16) if cache is torch.int8 else 16).to(cache)
    parts = (draw(5, 8 * 16), draw(16), draw(16, seed=1), angles.cos(), angles.sin(), caches[0], caches[1], torch.arange(5))
    return tuple(part.to(device) for part in parts)


def agree(faster: Functions, plain: Functions, device: torch.device, slack: float) -> None:
    """AssertionError where a form differs from its reference; `slack`: of float32 attention, relative and absolute."""
    rows_agree(faster, plain, device)
    rotary_agrees(faster, plain, device)
    attention_agrees(faster, plain, device, slack)
    thin_products_agree(faster, plain, device)


def rows_agree(faster: Functions, plain: Functions, device: torch.device) -> None:
    x, weight, wide = (draw(*shape, seed=seed).to(device) for shape, seed in (((3, 64), 0), ((64,), 1), ((12, 64), 4)))
    close = {"rtol": 2e-6, "atol": 2e-6}
    assert torch.allclose(faster["rms_norm"](x, weight, 1e-6), plain["rms_norm"](x, weight, 1e-6), **close)
    for found, expected in zip(
        faster["add_rms_norm"](x, x, weight, 1e-6), plain["add_rms_norm"](x, x, weight, 1e-6), strict=True
    ):
        assert torch.allclose(found, expected, **close)
    ids = torch.tensor([1, 7], device=device)
    assert torch.equal(faster["embedding_rows"](x, ids, 0), plain["embedding_rows"](x, ids, 0))
    for gate in contracts.ACTIVATIONS:
        expected = plain["gated_linear"](x, wide, None, gate)
        assert torch.allclose(faster["gated_linear"](x, wide, None, gate), expected, rtol=2e-6, atol=1e-5)


def rotary_agrees(faster: Functions, plain: Functions, device: torch.device) -> None:
    """Queries and caches, bit for bit: plain ones, fp8 ones with their scales, and codes."""
    for cache, scales in ((torch.float32, ()), (FP8, (0.5, 2.0)), (torch.int8, ())):
        results = []
        for rotary in (faster["rotary_kv_write"], plain["rotary_kv_write"]):
            qkv, _, _, *others = rotary_step(device, cache)
            query = rotary(qkv * 100 if scales else qkv, RotaryWrite(None, None, 1e-6, *others, *scales))
            results.append((query, *(part.view(torch.uint8) for part in others[2:4])))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def attention_agrees(faster: Functions, plain: Functions, device: torch.device, slack: float) -> None:
    """Whole and windowed, with a cap; fp8 caches with scales; codes; a prefix that all rows share."""
    step = mixed_step(device)
    for window in (0, 30):
        given = (step, step.caches.nan_to_num(0.0), 0.25, window, 3.0)
        assert torch.allclose(attended(faster, *given), attended(plain, *given), rtol=slack, atol=slack)
    mixed, shared = mixed_step(device, BF16), shared_step(device)
    narrow, coded = mixed.caches.nan_to_num(0.0).to(FP8), [pack(cache.nan_to_num(0.0)) for cache in mixed.caches]
    for given in ((mixed, narrow, 0.25, 0, 0.0, 0.5, 2.0), (mixed, coded, 0.25, 0, 0.0), (shared, shared.caches.nan_to_num(0.0), 0.25, 0, 0.0)):
        found, expected = attended(faster, *given).float(), attended(plain, *given).float()
        assert bool(((found - expected).abs() <= 3 * ROUNDING[BF16] * expected.abs().amax()).all())


def thin_products_agree(faster: Functions, plain: Functions, device: torch.device) -> None:
    """Bit for bit: adapters of two ranks, one of them of one line alone."""
    for dtype in (torch.float32, BF16):
        given, tiles = adapters(600, (40, 24), [[5, 20], [0, 16]], dtype), tiles_of([(0, range(10)), (1, [11])], unused=1)
        x, product = draw(12, 600, dtype=dtype), draw(12, 64, dtype=dtype, seed=1)
        parts = [part.to(device) for part in (product, x, given.memory, *tiles)]
        found, expected = (functions["add_tiled"](parts[0].clone(), *parts[1:], given.lines) for functions in (faster, plain))
        assert torch.equal(found, expected)


def attended(functions: Functions, step: Step, caches: torch.Tensor, *options: float) -> torch.Tensor:
    described = AttentionStep(step.starts, step.contexts, step.table, 16, 2, tuple({0, options[1]}), step.shared_blocks)
    metadata = functions["attention_metadata"](described)
    return functions["paged_attention"](step.query, AttentionCall(*caches, metadata, *options))
