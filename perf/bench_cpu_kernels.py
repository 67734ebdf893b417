"""Benchmark of the CPU kernels on the shapes of two models, and of sampling. `python -m pytest perf/bench_cpu_kernels.py`

Each round reads the weights of all layers, as a step does, so that they come from memory and not from a cache. Bandwidth counts
each weight and each cached key and value once; products count two operations per weight and row.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cpu import attention, linear as products, native, stack
from vnext.kernels.cpu.memory import Arena
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.formats.rounded import INT8
from vnext.models.layers.kv_cache import KvPairs
from vnext.runtime.processes.thread_plan import TEAM_SPIN_US
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.sampling import sample

THREADS = len(os.sched_getaffinity(0))
BLOCK_SIZE = 16
ROUNDS = 20


class Shape(NamedTuple):
    """The sizes of a decoder, with enough layers to exceed the caches and few enough to stay fast."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int


SHAPES = {"135M": Shape(576, 30, 9, 3, 64, 1536), "0.6B": Shape(1024, 28, 16, 8, 128, 3072)}
shapes = pytest.mark.parametrize("name", SHAPES)


@pytest.fixture(autouse=True, scope="module")
def team() -> None:
    torch.set_num_threads(1)
    native.start(THREADS, TEAM_SPIN_US)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(0.02).bfloat16()


def layer_weights(shape: Shape, int8: bool) -> list[products.PackedLinear]:
    """Return the four products of every layer."""
    arena, query = Arena(), shape.heads * shape.head_dim
    sizes = (
        (query + 2 * shape.kv_heads * shape.head_dim, shape.hidden, ""),
        (shape.hidden, query, ""),
        (2 * shape.wide, shape.hidden, "silu"),
        (shape.hidden, shape.wide, ""),
    )
    return [
        pack_int8(draw(outputs, inputs), gate, arena) if int8 else products.pack(draw(outputs, inputs), gate=gate, arena=arena)
        for _ in range(shape.layers)
        for outputs, inputs, gate in sizes
    ]


def pack_int8(weight: torch.Tensor, gate: str, arena: Arena) -> products.PackedLinear:
    """As --quantization int8 does."""
    format = INT8.rounds(PLAIN, weight.shape[1], weight.shape[1], True)
    return products.pack_codes(format.codes((weight.float().numpy(),)), gate=gate, arena=arena)


@shapes
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 8, 32, 128, 1024])
def test_products_of_all_layers(benchmark, name: str, int8: bool, rows: int) -> None:
    weights = layer_weights(SHAPES[name], int8)
    x = {packed.inputs: draw(rows, packed.inputs) for packed in weights}

    def step() -> None:
        for packed in weights:
            products.linear(x[packed.inputs], packed)

    benchmark.pedantic(step, rounds=ROUNDS if rows <= 128 else 5, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    operations = 2 * rows * sum(packed.inputs * packed.outputs for packed in weights)
    benchmark.extra_info["gb_per_s_best"] = round(sum(packed.buffer.nbytes for packed in weights) / seconds / 1e9, 1)
    benchmark.extra_info["tflop_per_s_best"] = round(operations / seconds / 1e12, 3)


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("rows", "queries", "context"), [(1, 1, 1024), (32, 1, 1024), (1, 1024, 1024)])
def test_attention(benchmark, name: str, rows: int, queries: int, context: int, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    page_count = rows * context // BLOCK_SIZE
    caches = torch.randn(2, page_count, shape.kv_heads, BLOCK_SIZE, shape.head_dim).to(dtype)
    table = torch.randperm(page_count).to(torch.int32).view(rows, -1)
    query = torch.randn(rows * queries, shape.heads, shape.head_dim).to(dtype)
    starts, lengths = np.arange(rows + 1) * queries, np.full(rows, context)
    step = attention.plan(AttentionStep(starts, lengths, table, BLOCK_SIZE, shape.kv_heads), shape.heads)

    def attend() -> None:
        attention.paged_attention(query, AttentionCall(caches[0], caches[1], step, shape.head_dim**-0.5))

    benchmark.pedantic(attend, rounds=ROUNDS, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    pairs = rows * (queries * context - queries * (queries - 1) / 2)
    benchmark.extra_info["gb_per_s_best"] = round(caches.nbytes / seconds / 1e9, 1)
    benchmark.extra_info["tflop_per_s_best"] = round(4 * shape.heads * shape.head_dim * pairs / seconds / 1e12, 3)


@shapes
def test_products_in_float32(benchmark, name: str) -> None:
    """1,024 rows by three weights of a layer: the baseline for float32 attention."""
    arena, shape = Arena(), SHAPES[name]
    sizes = ((shape.hidden, shape.hidden), (2 * shape.wide, shape.hidden), (shape.hidden, shape.wide))
    weights = [products.pack(torch.randn(size), arena=arena) for size in sizes]
    x = {packed.inputs: torch.randn(1024, packed.inputs) for packed in weights}

    def step() -> None:
        for packed in weights:
            products.linear(x[packed.inputs], packed)

    benchmark.pedantic(step, rounds=5, warmup_rounds=1)
    operations = 2 * 1024 * sum(outputs * inputs for outputs, inputs in sizes)
    benchmark.extra_info["tflop_per_s_best"] = round(operations / benchmark.stats.stats.min / 1e12, 3)


@shapes
@pytest.mark.parametrize(("rows", "queries", "context"), [(1, 1, 128), (32, 1, 224), (1, 1024, 1024)])
def test_layers_of_a_step(benchmark, name: str, rows: int, queries: int, context: int) -> None:
    """All layers in one call, as in a step of the model, without embedding and output layer."""
    shape = SHAPES[name]
    weights, norm = layer_weights(shape, int8=False), torch.ones(shape.hidden).bfloat16()
    layers = stack.describe(
        tuple(
            stack.StackLayer(
                *weights[4 * i : 4 * i + 4], None, None, None, norm, norm, None, None, None, None, 0, 1, False, 0, 1.0, 1.0,
                head_dim=shape.head_dim,
            )
            for i in range(shape.layers)
        ),
        norm.dtype,
    )
    page_count = rows * context // BLOCK_SIZE
    pages = torch.randn(page_count, shape.layers, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim).bfloat16()
    pairs = KvPairs((pages[:, layer, 0], pages[:, layer, 1]) for layer in range(shape.layers))
    caches = stack.Caches(pairs.places, pages.stride(0), shape.head_dim, native.Kind.BFLOAT16)
    table = torch.arange(page_count, dtype=torch.int32).view(rows, -1)
    starts, lengths = np.arange(rows + 1) * queries, np.full(rows, context)
    plan = attention.plan(AttentionStep(starts, lengths, table, BLOCK_SIZE, shape.kv_heads), shape.heads)
    slots = (torch.arange(rows)[:, None] * context + torch.arange(context - queries, context)).flatten()
    angles = stack.Angles(*torch.randn(2, rows * queries, shape.head_dim // 2))
    last, states = torch.arange(1, rows + 1) * queries - 1, draw(rows * queries, shape.hidden)

    tokens, numbers = stack.StackStep(plan, slots, angles, last), stack.Numbers(1e-5, shape.head_dim**-0.5, 0.0)

    def step() -> None:
        stack.run(layers, states.clone(), (norm, None), caches, tokens, numbers)

    benchmark.pedantic(step, rounds=ROUNDS if queries == 1 else 5, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    counted = sum(packed.inputs * packed.outputs for packed in weights)
    read = 2 * (counted + shape.layers * 2 * rows * context * shape.kv_heads * shape.head_dim)
    benchmark.extra_info["gb_per_s_best"] = round(read / seconds / 1e9, 1)
    benchmark.extra_info["tflop_per_s_best"] = round(2 * rows * queries * counted / seconds / 1e12, 3)


# temperature, top_k, top_p
CHOICES = {
    "greedy": (0.0, 0, 1.0),
    "all": (1.0, 0, 1.0),
    "top_p": (1.0, 0, 0.9),
    "top_k": (1.0, 50, 1.0),
    "both": (1.0, 50, 0.9),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("vocabulary", [32_000, 49_152, 151_936])
@pytest.mark.parametrize("spread", [1.0, 3.0], ids=["flat", "peaked"])
def test_sampling(benchmark, spread: float, vocabulary: int, rows: int, choice: str) -> None:
    """Normal logits: top-p examines thousands of tokens at a standard deviation of 1, a few hundred at 3."""
    temperature, top_k, top_p = CHOICES[choice]
    logits = torch.randn(rows, vocabulary) * spread
    inputs = SamplingInputs(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.zeros(rows),
        seed=torch.arange(rows),
        position=torch.arange(rows),
        any_random=temperature > 0,
        any_filter=top_k > 0 or top_p < 1,
    )
    benchmark.pedantic(sample, (logits, inputs), rounds=ROUNDS if rows <= 32 else 5, warmup_rounds=1)
    benchmark.extra_info["us_per_row_best"] = round(benchmark.stats.stats.min / rows * 1e6, 2)
