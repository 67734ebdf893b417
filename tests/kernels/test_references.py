"""The small reference operations against formulas written another way."""

from __future__ import annotations

import math

import pytest
import torch

from vnext.kernels import references
from vnext.kernels.calls import RotaryWrite
from vnext.kernels.table import choose, plain_operations

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_gives_rows_of_unit_size(dtype: torch.dtype) -> None:
    x, weight = draw(5, 48, dtype=dtype), draw(48, dtype=dtype)
    found = choose("rms_norm", "cpu")(x, weight, 1e-5)
    wide = x.double()
    size = torch.linalg.vector_norm(wide, dim=1, keepdim=True) / math.sqrt(48)
    assert found.dtype == dtype
    close(found, wide / (size**2 + 1e-5).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_then_norms(dtype: torch.dtype) -> None:
    x, residual, weight = draw(5, 48, dtype=dtype), draw(5, 48, dtype=dtype) * 2, draw(48, dtype=dtype)
    before = residual.clone()
    normed, total = choose("add_rms_norm", "cpu")(x, residual, weight, 1e-5)
    assert torch.equal(total, x + before) and torch.equal(residual, before)
    assert torch.equal(normed, choose("rms_norm", "cpu")(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = draw(5, 52, dtype=dtype) * 4
    wide = x.double()
    found = references.silu_and_mul(x)
    assert found.dtype == dtype
    close(found, wide[:, :26] * torch.sigmoid(wide[:, :26]) * wide[:, 26:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_clamped_gate(dtype: torch.dtype) -> None:
    x = draw(5, 52, dtype=dtype) * 8
    gate, up = x.double()[:, :26].clamp(max=7.0), x.double()[:, 26:].clamp(-7.0, 7.0)
    close(references.swiglu_clamped(x), gate * torch.sigmoid(1.702 * gate) * (up + 1))
    gate, up = x.double()[:, :26].clamp(max=10.0), x.double()[:, 26:].clamp(-10.0, 10.0)
    assert (x.abs() > 10.0).any()
    close(references.silu_limited(x), gate * torch.sigmoid(gate) * up)


def test_silu_of_far_values_is_finite() -> None:
    x = torch.tensor([[-1e4, 1e4, 1.0, 1.0]])
    assert references.silu_and_mul(x).tolist() == [[0.0, 1e4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_pairs_as_complex_numbers(dtype: torch.dtype) -> None:
    query, key = draw(6, 3, 8, dtype=dtype), draw(6, 1, 8, dtype=dtype)
    angles = draw(6, 4).double() * 5
    found = references.rotary(query, key, angles.cos().float(), angles.sin().float())
    for x, turned in zip((query, key), found, strict=True):
        wide = x.double()
        product = torch.complex(wide[..., :4], wide[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        assert turned.dtype == dtype
        close(turned, torch.cat((product.real, product.imag), -1))


def test_a_float32_weight_is_applied_before_rounding() -> None:
    x, weight = draw(50, 48, dtype=torch.bfloat16), draw(48) * 1.01
    wide = references.rms_norm(x.float(), weight, 1e-5)
    assert torch.equal(choose("rms_norm", "cpu")(x, weight, 1e-5), wide.bfloat16())
    rounded_first = choose("rms_norm", "cpu")(x, weight.bfloat16(), 1e-5)
    assert not torch.equal(rounded_first, wide.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype) -> None:
    x, weight, bias = draw(5, 48, dtype=dtype) + 1, draw(48, dtype=dtype), draw(49, dtype=dtype)[1:]
    found = choose("layer_norm", "cpu")(x, weight, bias, 1e-5)
    assert found.dtype == dtype
    close(found, torch.nn.functional.layer_norm(x.double(), (48,), weight.double(), bias.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype: torch.dtype) -> None:
    x = draw(5, 52, dtype=dtype) * 4
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    close(choose("activate", "cpu")(x, None, None, "gelu_tanh"), expected)
    gate, up = x.double().chunk(2, -1)
    close(references.gelu_tanh_and_mul(x), expected[:, :26] * up)
    assert references.activate(torch.tensor([[-1e4, 1e4, 0.0]]), None, None, "gelu_tanh").tolist() == [[0.0, 1e4, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_head_turns(dtype: torch.dtype) -> None:
    query, key = draw(6, 3, 12, dtype=dtype), draw(6, 1, 12, dtype=dtype)
    angles = draw(6, 4)
    found = references.rotary(query, key, angles.cos(), angles.sin())
    whole = references.rotary(query[..., :8], key[..., :8], angles.cos(), angles.sin())
    for x, turned, part in zip((query, key), found, whole, strict=True):
        assert torch.equal(turned, torch.cat((part, x[..., 8:]), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("width", [0, 4, 8])
def test_rotary_kv_write_is_its_parts(dtype: torch.dtype, norms: bool, width: int) -> None:
    heads, kv_heads, head_dim = 4, 2, 8
    qkv = draw(6, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    query, key, value = qkv.clone().view(6, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    weights = (draw(head_dim, dtype=dtype), draw(head_dim)) if norms else (None, None)
    angles = (draw(6, width // 2).cos(), draw(6, width // 2).sin()) if width else (None, None)
    if norms:
        query, key = references.rms_norm(query, weights[0], 1e-5), references.rms_norm(key, weights[1], 1e-5)
    if width:
        query, key = references.rotary(query, key, *angles)
    expected, found = torch.zeros(2, 3, kv_heads, 4, head_dim, dtype=dtype), torch.zeros(2, 3, kv_heads, 4, head_dim, dtype=dtype)
    slots = torch.tensor([7, 8, 0, 1, 2, 11])
    references.kv_write(key, value, *expected, slots)
    result = plain_operations().rotary_kv_write(qkv, RotaryWrite(*weights, 1e-5, *angles, *found, slots))
    assert result.shape == (6, heads, head_dim) and torch.equal(result, query)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_touches_its_slots_only(dtype: torch.dtype) -> None:
    caches = torch.full((2, 5, 2, 4, 8), 7.0, dtype=dtype)
    key, value = draw(3, 2, 8), -draw(3, 2, 8)
    references.kv_write(key, value, caches[0], caches[1], torch.tensor([19, 0, 6]))
    for cache, written in zip(caches, (key, value), strict=True):
        by_slot = cache.transpose(1, 2).reshape(20, 2, 8)
        assert torch.equal(by_slot[[19, 0, 6]], written.to(dtype))
        others = [slot for slot in range(20) if slot not in (19, 0, 6)]
        assert (by_slot[others] == 7.0).all()
