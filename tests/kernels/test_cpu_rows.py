"""Norms, gates, rotary embedding and rows of tables against the references and float64."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import LEVELS, ROUNDING, draw, needs_native, using, within

from vnext.kernels import references
from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cpu import operations, rows
from vnext.kernels.cpu.native import Level

pytestmark = needs_native
DTYPES = [torch.float32, torch.bfloat16]
levels = pytest.mark.parametrize("level", LEVELS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@levels
@dtypes
@pytest.mark.parametrize("width", [1, 17, 64, 100, 576, 8190])
def test_rms_norm(width: int, dtype: torch.dtype, level: Level) -> None:
    """Two roundings of the result, and the width's worth of them, by turns, in the sum of squares."""
    x, weight = draw(5, width, dtype=dtype) * 3, draw(width, dtype=dtype)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * weight.double()
    with using(level):
        found = rows.rms_norm(x, weight, 1e-5)
        within(found, expected, expected.abs() * (2.02 * ROUNDING[dtype] + (width / 16 + 16) * 2.0**-24))
        assert torch.equal(rows.rms_norm(x[3:4], weight, 1e-5), found[3:4])


@levels
@dtypes
def test_add_rms_norm_adds_then_norms(dtype: torch.dtype, level: Level) -> None:
    x, residual, weight = draw(40, 900, dtype=dtype), draw(40, 900, dtype=dtype, seed=1), draw(900, dtype=dtype)
    with using(level):
        normed, total = rows.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, rows.rms_norm(total, weight, 1e-6))
    with using(level, threads=2):
        assert torch.equal(rows.add_rms_norm(x, residual, weight, 1e-6)[0], normed)


@levels
@dtypes
def test_weights_stored_less_one(dtype: torch.dtype, level: Level) -> None:
    x, weight = draw(5, 64, dtype=dtype), draw(64, dtype=dtype) * 0.1
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * (1 + weight.double())
    with using(level):
        found = rows.rms_norm(x, weight, 1e-6, weight_offset=1.0)
        within(found, expected, expected.abs() * (1.01 * ROUNDING[dtype] + 32 * 2.0**-24))


@levels
@dtypes
@pytest.mark.parametrize("width", [1, 17, 640])
def test_a_float32_weight_is_applied_before_the_rounding(width: int, dtype: torch.dtype, level: Level) -> None:
    """So there is one rounding of the result, where a weight of the activations' own type has two."""
    x, residual, weight = draw(5, width, dtype=dtype), draw(5, width, dtype=dtype, seed=1), 1 + draw(width, seed=2) * 0.1
    wide = (x + residual).double()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    roundings = 1.01 if dtype is torch.bfloat16 else 2.02
    with using(level):
        found, total = rows.add_rms_norm(x, residual, weight, 1e-6)
        within(found, expected, expected.abs() * (roundings * ROUNDING[dtype] + (width / 16 + 16) * 2.0**-24))
        assert torch.equal(rows.rms_norm(total, weight, 1e-6), found) and torch.equal(total, x + residual)


@levels
@dtypes
@pytest.mark.parametrize("width", [1, 52, 344])
def test_gates(width: int, dtype: torch.dtype, level: Level) -> None:
    """exp and tanh are good to about 2e-7 of 1; gelu of a number far below zero is what is left of 1 - 1."""
    x = draw(5, 2 * width, dtype=dtype) * 4
    gate, up = x.double().chunk(2, 1)
    with using(level):
        silu = gate * torch.sigmoid(gate) * up
        within(rows.silu_and_mul(x), silu, silu.abs() * (1.01 * ROUNDING[dtype] + 1e-6))
        gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
        within(rows.gelu_tanh_and_mul(x), gelu, gelu.abs() * (1.01 * ROUNDING[dtype] + 1e-6) + (gate * up).abs() * 4e-7)
        low, near = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        clamped = low * torch.sigmoid(1.702 * low) * near
        within(rows.gate_and_mul(x, "swiglu_clamped"), clamped, clamped.abs() * (1.01 * ROUNDING[dtype] + 3e-6) + near.abs() * 1e-6)
        low, near = (gate * 2).clamp(max=10.0), (up * 2).clamp(-10.0, 10.0)
        limited = low * torch.sigmoid(low) * near
        within(rows.gate_and_mul(x * 2, "silu_limited"), limited, limited.abs() * (1.01 * ROUNDING[dtype] + 1e-6))


@levels
@dtypes
@pytest.mark.parametrize("width", [1, 52, 344])
def test_layer_norms_and_gelu_alone(width: int, dtype: torch.dtype, level: Level) -> None:
    x, weight, bias = draw(5, width, dtype=dtype) * 4 + 3, draw(width), draw(width)
    with using(level):
        wide = x.double()
        centred = wide - wide.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        expected = centred * scale * weight.double() + bias.double()
        size = (wide.abs() * scale * weight.double().abs()) + bias.double().abs()
        found = operations.layer_norm(x, weight, bias, 1e-5)
        within(found, expected, expected.abs() * 1.01 * ROUNDING[dtype] + size * 2e-6)
        assert torch.equal(operations.layer_norm(x[2:3], weight, bias, 1e-5), found[2:3])
        gelu = torch.nn.functional.gelu(wide, approximate="tanh")
        found = operations.activate(x, None, None, "gelu_tanh")
        within(found, gelu, gelu.abs() * (1.01 * ROUNDING[dtype] + 1e-6) + wide.abs() * 4e-7)


@levels
@dtypes
@pytest.mark.parametrize("width", [2, 52, 344])
def test_activations_of_float64_are_the_references(width: int, dtype: torch.dtype, level: Level) -> None:
    """Rounded once, to the bit where few digits are lost; far below zero, where the reference loses some, to its place."""
    x, slopes = draw(5, width, dtype=dtype) * 4, (torch.tensor([0.8]), torch.tensor([-0.3]))
    x[0, 0], x[1, 0] = -1e4, 1e4
    with using(level):
        for name, given in (("gelu", (None, None)), ("relu2", (None, None)), ("gated_gelu", (None, None)), ("xielu", slopes)):
            found, expected = (chosen.activate(x, *given, name) for chosen in (operations, references))
            within(found, expected.double(), expected.double().abs() * 1.01 * ROUNDING[dtype] + 1e-13)
            near = x[:, : found.shape[1]] > -4  # below, the reference loses digits
            assert torch.equal(found[near], expected[near]), name
            assert torch.equal(operations.activate(x[2:3], *given, name), found[2:3])
        far = operations.activate(torch.tensor([[-7.0, -20.0, -40.0, float("-inf"), float("nan")]]), None, None, "gelu")[0]
    assert far[0].item() == pytest.approx(-7.0 * 1.279812543885835e-12, rel=1e-6) and far[2] == 0 and far[3:].isnan().all()
    assert far[1].item() == pytest.approx(-20.0 * 2.7536241186062337e-89, rel=1e-6)


@levels
@dtypes
def test_one_gate_for_a_row(dtype: torch.dtype, level: Level) -> None:
    x, gates = draw(5, 52, dtype=dtype), draw(5, 1, dtype=dtype) * 4
    with using(level):
        expected = x.double() * gates.double().sigmoid()
        found = operations.gate_by(x, gates)
        within(found, expected, expected.abs() * (1.01 * ROUNDING[dtype] + 1e-6))
        assert torch.equal(found, operations.gate_by(x, gates.expand(5, 52).contiguous()))


@levels
def test_a_soft_cap(level: Level) -> None:
    """Good to 2e-7 of the cap; a far value is the cap itself."""
    x = torch.cat((draw(5, 83) * 40, torch.full((5, 1), 1e9), torch.full((5, 1), -1e9)), dim=1)
    with using(level):
        within(operations.soft_cap(x.clone(), 30.0), 30 * (x.double() / 30).tanh(), torch.full_like(x, 30 * 2e-7))


@levels
def test_gates_of_far_values_are_finite(level: Level) -> None:
    x = torch.tensor([[-1e4, 1e4, -90.0, 1.0, 1.0, 2.0]])
    with using(level):
        assert rows.silu_and_mul(x).tolist()[0][:2] == [0.0, 1e4]
        assert rows.gelu_tanh_and_mul(x).tolist() == [[0.0, 1e4, 0.0]]


def caches(dtype: torch.dtype, kv_heads: int, head_dim: int) -> torch.Tensor:
    return torch.full((2, 20, kv_heads, 5, head_dim), 7.0, dtype=dtype)


@levels
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (2, 1, 80), (6, 2, 6)])
@pytest.mark.parametrize("norm", [None, "own", "wide"])
def test_rotary_kv_write_is_norm_then_rotary_then_write(
    norm: str | None, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, level: Level
) -> None:
    tokens = 33
    joined = draw(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = draw(tokens, head_dim // 2) * 5
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:tokens]
    kind = torch.float32 if norm == "wide" else dtype
    norms = [draw(head_dim, dtype=kind, seed=seed) if norm else None for seed in (1, 2)]
    found_caches, expected_caches = caches(dtype, kv_heads, head_dim), caches(dtype, kv_heads, head_dim)
    query, key, value = joined.view(tokens, -1, head_dim).split((heads, kv_heads, kv_heads), 1)
    with using(level, threads=2):
        found = rows.rotary_kv_write(joined, RotaryWrite(*norms, 1e-6, angles.cos(), angles.sin(), found_caches[0], found_caches[1], slots))
        if norm:
            query, key = (
                rows.rms_norm(x.reshape(-1, head_dim), weight, 1e-6).view(tokens, -1, head_dim)
                for x, weight in zip((query, key), norms, strict=True)
            )
    query, key = references.rotary(query, key, angles.cos(), angles.sin())
    references.kv_write(key, value, expected_caches[0], expected_caches[1], slots)
    assert torch.equal(found, query)
    assert torch.equal(found_caches, expected_caches)


@levels
@dtypes
def test_a_part_of_a_head_may_turn_or_none_of_it(dtype: torch.dtype, level: Level) -> None:
    joined, angles, slots = draw(7, 4 * 32, dtype=dtype), draw(7, 4), torch.arange(7)
    own = caches(dtype, 1, 32)
    with using(level):
        part = rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, angles.cos(), angles.sin(), own[0], own[1], slots))
        still = rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, None, None, own[0], own[1], slots))
    heads = joined.view(7, 4, 32)
    turned = references.turn(heads[:, :2, :8], angles.cos()[:, None], angles.sin()[:, None])
    assert torch.equal(part, torch.cat((turned, heads[:, :2, 8:]), -1))
    assert torch.equal(still, heads[:, :2])
    assert torch.equal(own[0][0, 0], heads[:5, 2]) and torch.equal(own[1][1, 0, :2], heads[5:, 3])


@dtypes
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    table, ids = draw(50, 33, dtype=dtype), torch.tensor([3, 49, 0, 3, 50, -1])
    expected = torch.cat((table[[3, 49, 0, 3]], torch.zeros(2, 33, dtype=dtype)))
    assert torch.equal(rows.table_rows(table, ids), expected)
    assert torch.equal(rows.table_rows(table, ids + 7, 7), expected)
