"""The small reference operations against formulas written another way."""

from __future__ import annotations

import math

import pytest
import torch

from vnext.kernels.table import choose

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
    found = choose("silu_and_mul", "cpu")(x)
    assert found.dtype == dtype
    close(found, wide[:, :26] * torch.sigmoid(wide[:, :26]) * wide[:, 26:])


def test_silu_of_far_values_is_finite() -> None:
    x = torch.tensor([[-1e4, 1e4, 1.0, 1.0]])
    assert choose("silu_and_mul", "cpu")(x).tolist() == [[0.0, 1e4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_pairs_as_complex_numbers(dtype: torch.dtype) -> None:
    query, key = draw(6, 3, 8, dtype=dtype), draw(6, 1, 8, dtype=dtype)
    angles = draw(6, 4).double() * 5
    found = choose("rotary", "cpu")(query, key, angles.cos().float(), angles.sin().float())
    for x, turned in zip((query, key), found, strict=True):
        wide = x.double()
        product = torch.complex(wide[..., :4], wide[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        assert turned.dtype == dtype
        close(turned, torch.cat((product.real, product.imag), -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_touches_its_slots_only(dtype: torch.dtype) -> None:
    caches = torch.full((2, 5, 2, 4, 8), 7.0, dtype=dtype)
    key, value = draw(3, 2, 8), -draw(3, 2, 8)
    choose("kv_write", "cpu")(key, value, caches[0], caches[1], torch.tensor([19, 0, 6]))
    for cache, written in zip(caches, (key, value), strict=True):
        by_slot = cache.transpose(1, 2).reshape(20, 2, 8)
        assert torch.equal(by_slot[[19, 0, 6]], written.to(dtype))
        others = [slot for slot in range(20) if slot not in (19, 0, 6)]
        assert (by_slot[others] == 7.0).all()
