"""Products with packed weights: right within the rounding of their dtype, and the same bits however they are asked for."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import LEVELS, OWN_PRODUCTS, ROUNDING, draw, needs_native, using, within

from vnext.kernels.cpu import linear as products, rows
from vnext.kernels.cpu.native import Level

pytestmark = needs_native
SHAPES = [(576, 576), (96, 1536), (100, 70), (33, 31), (1, 1), (40, 33), (17, 64)]
DTYPES = [torch.float32, torch.bfloat16]
ROWS_MAX = 150
ROW_COUNTS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 65, 149)


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Against float64: K roundings of the partial sums, each of which is at most |x| * |w|, then one of the result."""
    product = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    within(found, product, (x.shape[1] + 2) * 2.0**-24 * size + ROUNDING[found.dtype] * product.abs() * 1.01 + 1e-37)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_right_and_knows_no_neighbours(
    outputs: int, inputs: int, dtype: torch.dtype, level: Level
) -> None:
    x, weight, bias = (draw(*shape, dtype=dtype) for shape in ((ROWS_MAX, inputs), (outputs, inputs), (outputs,)))
    packed = products.pack(weight, bias)
    with using(level):
        whole = products.linear(x, packed)
        check(whole, x, weight, bias)
        for count in ROW_COUNTS:
            assert torch.equal(products.linear(x[:count], packed), whole[:count]), f"{count} rows"
        assert torch.equal(products.linear(x[7:29], packed), whole[7:29])
    for threads in (2, 3):
        with using(level, threads):
            assert torch.equal(products.linear(x, packed), whole), f"{threads} threads"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_bias_beside_the_weight_is_an_addition_afterwards(
    outputs: int, inputs: int, dtype: torch.dtype, level: Level
) -> None:
    x, weight, bias = (draw(*shape, dtype=dtype) for shape in ((40, inputs), (outputs, inputs), (outputs,)))
    packed = products.pack(weight)
    with using(level):
        for count in (1, 16, 40):
            apart = products.linear(x[:count], packed).add_(bias)
            assert torch.equal(products.linear(x[:count], packed, bias=bias), apart)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_levels_give_the_same_bits_of_bfloat16(outputs: int, inputs: int) -> None:
    x, weight = draw(40, inputs, dtype=torch.bfloat16), draw(outputs, inputs, dtype=torch.bfloat16)
    packed = products.pack(weight)
    found = {}
    for level in LEVELS:
        with using(level):
            found[level] = products.linear(x, packed, torch.float32)
    for level in set(LEVELS) - OWN_PRODUCTS:
        assert torch.equal(found[level], found[Level.PORTABLE]), level.name


@pytest.mark.parametrize("level", LEVELS)
def test_float32_results_of_bfloat16(level: Level) -> None:
    x, weight = draw(20, 64, dtype=torch.bfloat16), draw(50, 64, dtype=torch.bfloat16)
    with using(level):
        found = products.linear(x, products.pack(weight), torch.float32)
        assert found.dtype == torch.float32
        check(found, x, weight, None)
        assert torch.equal(found.bfloat16(), products.linear(x, products.pack(weight)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 20, 1])
def test_a_gated_product_is_the_product_then_the_gate(
    width: int, dtype: torch.dtype, gate: str, level: Level
) -> None:
    x, weight, bias = draw(37, 70, dtype=dtype), draw(2 * width, 70, dtype=dtype), draw(2 * width, dtype=dtype)
    with using(level):
        apart = rows.gate_and_mul(products.linear(x, products.pack(weight, bias)), gate)
        for count in (37, 1, 16, 20):
            fused = products.linear(x[:count], products.pack(weight, bias, gate=gate))
            assert torch.equal(fused, apart[:count])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_neighbour_stays_a_neighbour(dtype: torch.dtype, level: Level) -> None:
    """Rows of 70 numbers end within a step of 32: what lies behind them is the next row."""
    x, packed = draw(35, 70, dtype=dtype), products.pack(draw(50, 70, dtype=dtype))
    with using(level):
        before = products.linear(x, packed)
        x[1::2] = float("inf")
        assert torch.equal(products.linear(x, packed)[::2], before[::2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_in_memory(dtype: torch.dtype, level: Level) -> None:
    wide, weight = draw(40, 200, dtype=dtype), draw(30, 96, dtype=dtype)
    with using(level):
        packed = products.pack(weight)
        expected = products.linear(wide[:, 8:104].contiguous(), packed)
        assert torch.equal(products.linear(wide[:, 8:104], packed), expected)
        assert products.linear(wide[:0, :96], packed).shape == (0, 30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_packed_weight_are_its_rows(dtype: torch.dtype) -> None:
    weight = draw(75, 70, dtype=dtype)
    packed = products.pack(weight)
    ids = torch.tensor([0, 74, 31, 32, 31, 9, 75, -1, 50])
    expected = torch.where(((ids >= 0) & (ids < 75))[:, None], weight[ids.clamp(0, 74)], torch.zeros(1, dtype=dtype))
    assert torch.equal(products.rows_of(packed, ids), expected)
    assert torch.equal(products.rows_of(packed, ids + 1000, 1000), expected)


@pytest.mark.parametrize("inputs", [64, 71])
def test_packing_keeps_all_bits_of_bfloat16(inputs: int) -> None:
    """In whole blocks of panels and in what is left of them."""
    bits = torch.arange(2**16, dtype=torch.int32)[: 2**16 // inputs * inputs].to(torch.int16).reshape(-1, inputs)
    packed = products.pack(bits.view(torch.bfloat16))
    assert torch.equal(products.rows_of(packed, torch.arange(len(bits))).view(torch.int16), bits)
