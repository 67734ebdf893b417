"""The row-wise CUDA kernels on the host shim, against the references."""

from __future__ import annotations

import pytest
import torch
from host_shim import ORDERS, HostBackend
from rows_cases import ROUNDING, draw, half_step, within

from vnext.kernels import mxint8, references
from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cuda import rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
orders = pytest.mark.parametrize("order", ORDERS)


@dtypes
@pytest.mark.parametrize("width", [1, 17, 64, 100, 2048, 4104])
def test_rms_norm(shim: HostBackend, width: int, dtype: torch.dtype) -> None:
    """Two roundings of the result, and the roundings of the sum of squares, which go eight to a thread, then in a tree."""
    x, weight = draw(5, width, dtype=dtype) * 3, draw(width, dtype=dtype, seed=1)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5)
    expected = normed * weight.double()
    slack = 2.02 * half_step(expected, dtype) + half_step(normed, dtype) * weight.double().abs() + expected.abs() * 32 * 2.0**-24
    for shim.order in ORDERS:
        found = rows.rms_norm(x, weight, 1e-5)
        within(found, expected, slack)
        assert torch.equal(rows.rms_norm(x[3:4], weight, 1e-5), found[3:4])


@dtypes
def test_bits_depend_neither_on_alignment_nor_on_strides(shim: HostBackend, dtype: torch.dtype) -> None:
    x, weight = draw(4, 512, dtype=dtype), draw(512, dtype=dtype, seed=1)
    apart = torch.full((4, 700), float("nan"), dtype=dtype)
    apart[:, 3:515] = x
    assert torch.equal(rows.rms_norm(apart[:, 3:515], weight, 1e-6), rows.rms_norm(x, weight, 1e-6))
    gates = torch.full((4, 1030), float("nan"), dtype=dtype)
    gates[:, 1:1025] = torch.cat((x, x), 1)
    assert torch.equal(rows.gate_and_mul(gates[:, 1:1025], "silu"), rows.gate_and_mul(torch.cat((x, x), 1), "silu"))


@dtypes
@pytest.mark.parametrize("is_wide", [False, True])
def test_add_rms_norm_adds_then_norms(shim: HostBackend, is_wide: bool, dtype: torch.dtype) -> None:
    x, residual = draw(7, 900, dtype=dtype), draw(7, 900, dtype=dtype, seed=1)
    weight = draw(900, dtype=torch.float32 if is_wide else dtype, seed=2)
    for shim.order in ORDERS:
        normed, total = rows.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, rows.rms_norm(total, weight, 1e-6))
    expected = references.rms_norm(total, weight, 1e-6)
    # Another order of the sum moves the root by a few units, and so a rounding to its neighbour.
    within(normed, expected, 2.02 * 2 * half_step(expected, dtype) + 2 * ROUNDING[dtype] * expected.abs() + 1e-6 * expected.abs())


@dtypes
@pytest.mark.parametrize("width", [1, 52, 344, 2056])
def test_gates(shim: HostBackend, width: int, dtype: torch.dtype) -> None:
    """exp is good to about 2e-7 of 1; gelu of a number far below zero is what is left of 1 - 1."""
    x = draw(5, 2 * width, dtype=dtype) * 4
    gate, up = x.double().chunk(2, 1)
    for shim.order in ORDERS[:2]:
        silu = gate * torch.sigmoid(gate) * up
        within(rows.gate_and_mul(x, "silu"), silu, half_step(silu, dtype) * 1.01 + silu.abs() * 1e-6)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
        slack = half_step(gelu, dtype) * 1.01 + gelu.abs() * 2e-6 + (gate * up).abs() * 4e-7
        within(rows.gate_and_mul(x, "gelu_tanh"), gelu, slack)


def test_gates_of_far_values_are_finite(shim: HostBackend) -> None:
    x = torch.tensor([[-1e4, 1e4, -90.0, 1.0, 1.0, 2.0]])
    assert rows.gate_and_mul(x, "silu").tolist()[0][:2] == [0.0, 1e4]
    assert rows.gate_and_mul(x, "gelu_tanh").tolist() == [[0.0, 1e4, 0.0]]


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (2, 1, 80), (6, 2, 6)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotary_kv_write_is_norm_then_rotary_then_write(
    shim: HostBackend, has_norms: bool, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Bit for bit where nothing is normed; with a norm, by the neighbour that another order of its sum may give."""
    tokens = 9
    joined = draw(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = draw(tokens, head_dim // 2) * 5
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:tokens]
    norms = [draw(head_dim, dtype=dtype, seed=1), draw(head_dim, seed=2)] if has_norms else [None, None]
    turn = (angles.cos(), angles.sin())
    expected_caches = torch.full((2, 20, kv_heads, 5, head_dim), 7.0, dtype=dtype)
    expected = references.rotary_kv_write(joined.clone(), RotaryWrite(*norms, 1e-6, *turn, *expected_caches, slots))
    for shim.order in ORDERS:
        caches = torch.full_like(expected_caches, 7.0)
        query = rows.rotary_kv_write(joined, RotaryWrite(*norms, 1e-6, *turn, *caches, slots))
        if has_norms:
            slack = 4.1 * ROUNDING[dtype] * 8 if dtype is torch.float32 else 4.1 * ROUNDING[dtype]
            scale = expected.abs().amax(-1, keepdim=True).double()
            within(query, expected, slack * scale.expand_as(query))
            scale = expected_caches.abs().amax(-1, keepdim=True).double()
            within(caches, expected_caches, slack * scale.expand_as(caches))
        else:
            assert torch.equal(query, expected) and torch.equal(caches, expected_caches)


@dtypes
def test_a_part_of_a_head_may_turn_or_none_of_it(shim: HostBackend, dtype: torch.dtype) -> None:
    joined, angles, slots = draw(7, 4 * 32, dtype=dtype), draw(7, 4), torch.arange(7)
    for turn in ((angles.cos(), angles.sin()), (None, None)):
        expected_caches, caches = torch.zeros(2, 2, 2, 1, 5, 32, dtype=dtype)
        expected = references.rotary_kv_write(joined.clone(), RotaryWrite(None, None, 1e-6, *turn, *expected_caches, slots))
        assert torch.equal(rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, *turn, *caches, slots)), expected)
        assert torch.equal(caches, expected_caches)


def test_an_fp8_cache_holds_what_is_left_after_its_scales(shim: HostBackend) -> None:
    joined, slots = draw(7, 4 * 32, dtype=torch.bfloat16) * 30, torch.randperm(10)[:7]
    caches = torch.zeros(2, 2, 1, 5, 32, dtype=torch.float8_e4m3fn)
    rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, None, None, *caches, slots, 0.5, 2.0))
    for cache, head, scale in ((caches[0], 2, 0.5), (caches[1], 3, 2.0)):
        expected = (joined.view(7, 4, 32)[:, head].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache.view(torch.uint8).view(10, 32)[slots], expected.view(torch.uint8))


@dtypes
@pytest.mark.parametrize("head_dim", [2, 32, 80, 128])
def test_a_coded_cache_holds_the_plain_rows(shim: HostBackend, head_dim: int, dtype: torch.dtype) -> None:
    """Byte for byte: turned and as they are; zeros, numbers far too small, infinities, NaN, and numbers that round up."""
    joined, angles = draw(9, 4 * head_dim, dtype=dtype), draw(9, head_dim // 2) * 5
    joined *= torch.exp2(torch.arange(36).remainder(29) - 14.0).repeat_interleave(head_dim).view(9, -1).to(dtype)
    joined[0], joined[1] = 0, joined[1] * 2.0**-110
    joined[2, ::7], joined[3, ::5], joined[4, ::3] = float("inf"), float("-inf"), float("nan")
    joined[5] = torch.tensor([1.9999, -1.0]).repeat(2 * head_dim)
    slots, width = torch.randperm(15, generator=torch.Generator().manual_seed(1))[:9], mxint8.packed_width(head_dim)
    for turn in ((angles.cos(), angles.sin()), (None, None)):
        expected_caches = torch.full((2, 3, 1, 5, width), 7, dtype=torch.int8)
        expected = references.rotary_kv_write(joined.clone(), RotaryWrite(None, None, 1e-6, *turn, *expected_caches, slots))
        for shim.order in ORDERS:
            caches = torch.full_like(expected_caches, 7)
            query = rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, *turn, *caches, slots))
            assert torch.equal(query.nan_to_num(1.5), expected.nan_to_num(1.5)) and torch.equal(caches, expected_caches)


@dtypes
@pytest.mark.parametrize("width", [33, 64, 6])
def test_rows_of_a_table(shim: HostBackend, width: int, dtype: torch.dtype) -> None:
    table, ids = draw(50, width, dtype=dtype), torch.tensor([3, 49, 0, 3, 50, -1])
    for shim.order in ORDERS:
        assert torch.equal(rows.embedding_rows(table, ids, 0), references.embedding_rows(table, ids, 0))
    assert torch.equal(rows.embedding_rows(table[7:], ids + 7, 14), references.embedding_rows(table[7:], ids + 7, 14))


def test_nothing_to_do_launches_nothing(shim: HostBackend) -> None:
    empty = torch.empty(0, 64)
    assert rows.rms_norm(empty, torch.ones(64), 1e-6).shape == (0, 64)
    assert rows.gate_and_mul(empty, "silu").shape == (0, 32)
    assert rows.embedding_rows(torch.ones(4, 8), torch.empty(0, dtype=torch.int64), 0).shape == (0, 8)
