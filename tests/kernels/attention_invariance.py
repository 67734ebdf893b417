"""A program: each query's result is bitwise the same alone, in a batch, chunked or decoded; products where MKL can hold it."""

from __future__ import annotations

import torch
from attention_cases import attend as attend_paged, make_sequences

from vnext.kernels import references
from vnext.kernels.calls import RotaryWrite, Router
from vnext.kernels.table import choose
from vnext.runtime.processes.determinism import cpu_flags, has_strict_path

LENGTHS = [300, 1, 77, 128, 129, 260, 17, 5]
SHAPES = [(4, 4, 4, 16), (4, 4, 8, 16), (8, 4, 8, 16), (6, 2, 64, 3), (4, 1, 128, 16), (7, 1, 80, 1), (2, 2, 64, 200)]


SPANS = [(0, 1), (3, 4), (66, 67), (10, 12), (1, 34)]
VARIANTS = [(0, 0.0, False), (1, 0.0, False), (40, 0.0, True), (130, 30.0, False)]


def check_attention(shape: tuple[int, int, int, int], window: int, softcap: float, with_sinks: bool) -> None:
    """Whole prompts in one step against alone, chunked, and decoded beside a prefill."""
    sequences, sinks = make_sequences(LENGTHS, *shape), torch.linspace(-2.0, 2.0, shape[0]) if with_sinks else None

    def attend(ranges: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        return attend_paged(sequences, ranges, window, softcap, sinks)

    together = attend([(index, 0, length) for index, length in enumerate(LENGTHS)])
    for index, length in enumerate(LENGTHS):
        assert torch.equal(attend([(index, 0, length)])[0], together[index]), "alone"
    for size in (1, 7, 16, 50):
        for start in range(0, LENGTHS[0], size):
            stop = min(start + size, LENGTHS[0])
            found = attend([(2, 0, 30), (0, start, stop), (3, 127, 128)])
            assert torch.equal(found[1], together[0][start:stop]), f"chunk of {size} at {start}"
            assert torch.equal(found[2], together[3][127:]), "decode"
    last = attend([(index, length - 1, length) for index, length in enumerate(LENGTHS)])
    for index in range(len(LENGTHS)):
        assert torch.equal(last[index], together[index][-1:]), "a step of decodes"


def check_rows(width: int) -> None:
    """Each row of the row-wise operations against that row alone."""
    x = torch.randn(67, width, generator=torch.Generator().manual_seed(1)) * 3
    weight = torch.linspace(0.5, 1.5, width)
    checked = {
        "rms_norm": lambda part: choose("rms_norm", "cpu")(part, weight, 1e-5),
        "layer_norm": lambda part: choose("layer_norm", "cpu")(part, weight, weight, 1e-5),
        "silu_and_mul": references.silu_and_mul,
        **{name: lambda part, name=name: choose("activate", "cpu")(part, None, None, name) for name in ("gelu_tanh", "gelu", "relu2")},
        "gelu_tanh_and_mul": references.gelu_tanh_and_mul,
        "softcap": lambda part: part.div(30.0).tanh_().mul_(30.0),
    }
    for name, function in checked.items():
        whole = function(x.clone())
        for start, stop in SPANS:
            assert torch.equal(function(x[start:stop].clone()), whole[start:stop]), f"{name} {width}"


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Queries, and the cache, of each token against that token alone, with norms and a part of the head turned."""
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(67, (heads + 2 * kv_heads) * head_dim, generator=generator)
    angles = torch.randn(67, head_dim // 4, generator=generator)
    weight = torch.linspace(0.5, 1.5, head_dim)

    def run(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        caches, slots = torch.zeros(2, 5, kv_heads, 16, head_dim), torch.arange(start, stop)
        part = angles[start:stop]
        query = choose("rotary_kv_write", "cpu")(qkv[start:stop].clone(), RotaryWrite(weight, weight, 1e-6, part.cos(), part.sin(), *caches, slots))
        return query, caches.transpose(2, 3).reshape(2, 80, kv_heads, head_dim)[:, start:stop]

    whole_query, whole_cache = run(0, 67)
    for start, stop in SPANS:
        query, cache = run(start, stop)
        assert torch.equal(query, whole_query[start:stop]), f"query {head_dim}"
        assert torch.equal(cache, whole_cache[:, start:stop]), f"cache {head_dim}"


def check_products(width: int) -> None:
    """Rows of the products with weights, and of experts whose other tokens change, against those rows alone."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(67, width, generator=generator)
    gate_up = torch.randn(8, 2 * width, width, generator=generator) * width**-0.5
    down = torch.randn(8, width, width, generator=generator) * width**-0.5
    router, bias = torch.randn(8, width, generator=generator), torch.randn(2 * width, generator=generator)

    def run(part: torch.Tensor) -> list[torch.Tensor]:
        shares, ids = choose("route", "cpu")(choose("linear", "cpu")(part, router, None), Router(3, True))
        return [
            choose("linear", "cpu")(part, gate_up[0], bias),
            choose("gated_linear", "cpu")(part, gate_up[0], bias, "silu"),
            choose("gated_linear", "cpu")(part, gate_up[0], None, "gelu_tanh"),
            choose("logits", "cpu")(part, gate_up[1]),
            shares,
            ids,
            choose("experts", "cpu")(part, shares, ids, gate_up, down, "silu"),
        ]

    whole = run(x)
    for start, stop in SPANS:
        for place, (found, expected) in enumerate(zip(run(x[start:stop]), whole)):
            assert torch.equal(found, expected[start:stop]), f"product {place} of width {width}"


if __name__ == "__main__":
    for shape in SHAPES:
        for variant in VARIANTS:
            check_attention(shape, *variant)
    for width in (64, 100, 172, 344, 2048, 8190):
        check_rows(width)
    for heads in ((4, 2, 8), (7, 1, 80), (2, 2, 256)):
        check_heads(*heads)
    if has_strict_path(cpu_flags()):
        for width in (32, 100, 256):
            check_products(width)
    print("invariant")
