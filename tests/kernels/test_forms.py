"""Int8 weights: the plain rounding against its formula, and the compiled kernels against the plain ones."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import LEVELS, ROUNDING, draw, needs_native, using, within

from vnext.kernels.contracts import ContractError
from vnext.kernels.cpu import linear as packing
from vnext.kernels.cpu.native import Level
from vnext.kernels.format import format_of
from vnext.kernels.formats.floats import FIXED, WIDE, FixedWeight
from vnext.kernels.formats.int8 import INT8, Int8Weight, quantize
from vnext.kernels.table import Operations, operations, plain_operations

SHAPES = [(96, 160), (100, 70), (33, 31), (1, 1), (40, 33)]
SOURCES = [torch.float32, torch.bfloat16, torch.float16]


def odd_weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Outputs of very different sizes; one of zeros alone, one with numbers that no scale can divide."""
    weight = draw(outputs, inputs) * 10.0 ** -(torch.arange(outputs) % 5).unsqueeze(1).float()
    weight[outputs // 2] = 0.0
    if outputs > 4:
        weight[3] = 2.0**-149
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", SOURCES)
def test_a_weight_is_at_most_half_a_step_off(dtype: torch.dtype) -> None:
    weight = draw(50, 70, dtype=dtype)
    found = quantize(weight)
    assert found.values.dtype == torch.int8 and found.scales.dtype == torch.float32
    assert found.shape == weight.shape and found.dtype == torch.bfloat16
    assert torch.equal(found.values.abs().amax(1), torch.full((50,), 127, dtype=torch.int8))
    restored = found.values.double() * found.scales.double().unsqueeze(1)
    half_a_step = 0.5 + 127 * 2.0**-23  # the quotient is a float32 of up to 127
    within(restored, weight.double(), found.scales.double().unsqueeze(1).expand(weight.shape) * half_a_step)


def test_halves_go_to_even_and_zeros_stay() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.5], [0.0, 0.0, 0.0, 0.0, 0.0], [-0.25, 0.125, 0.0, 0.0, 0.0]])
    found = quantize(weight)
    assert found.values.tolist() == [[127, 0, 2, -2, 126], [0, 0, 0, 0, 0], [-127, 64, 0, 0, 0]]
    assert found.scales.tolist()[:2] == [1.0, 1.0]


def test_an_expert_is_quantised_as_if_alone() -> None:
    weights = draw(3, 20, 30)
    together = quantize(weights)
    for expert, weight in enumerate(weights):
        alone = quantize(weight)
        assert torch.equal(together[expert].values, alone.values) and torch.equal(together[expert].scales, alone.scales)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="the format 'int3' of a weight is not known; there are: plain, int8, int4, wide, fixed, codes"):
        format_of("int3")
    for choice in (operations("cpu"), plain_operations()):
        with pytest.raises(ContractError, match="the format of a weight must be an object of kernels/format.py but is 'int8'"):
            choice.pack_weight(draw(4, 4), "int8")


@needs_native
@pytest.mark.parametrize("dtype", SOURCES[:2])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packed_bits_are_the_plain_ones(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Rows bring back every value and scale; ids outside give zeros."""
    weight = odd_weight(outputs, inputs, dtype)
    packed, ids = packing.pack(weight, format=INT8), torch.arange(outputs)
    assert torch.equal(packing.rows_of(packed, ids), quantize(weight).rows(ids))
    assert not packing.rows_of(packed, torch.tensor([-1, outputs])).any()
    assert packing.rows_of(packed, ids + 7, 7).equal(packing.rows_of(packed, ids))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_packed_product_is_that_of_whole_bfloat16_numbers(outputs: int, inputs: int, level: Level) -> None:
    """Bit for bit: whole numbers up to 127 are exact in bfloat16, and the scale is one multiplication in float32."""
    weight, x = odd_weight(outputs, inputs), draw(40, inputs, dtype=torch.bfloat16)
    plain = quantize(weight)
    with using(level):
        sums = packing.linear(x, packing.pack(plain.values.bfloat16()), torch.float32)
        packed = packing.pack(weight, format=INT8)
        assert torch.equal(packing.linear(x, packed, torch.float32), sums * plain.scales)
        assert torch.equal(packing.linear(x, packed), (sums * plain.scales).bfloat16())
        for count in (1, 16, 17, 33):
            assert torch.equal(packing.linear(x[:count], packed), packing.linear(x, packed)[:count])


def sizes(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Of the terms of each output, in float64."""
    return x.double().abs() @ weight.values.double().abs().t() * weight.scales.double()


@pytest.mark.parametrize("source", [operations("cpu"), plain_operations()], ids=["chosen", "plain"])
def test_operations_multiply_by_the_rounded_weight(source: Operations) -> None:
    """Within the roundings of a float32 sum of K terms, and one of the result."""
    weight, bias, x = draw(70, 100), draw(70, dtype=torch.bfloat16), draw(9, 100, dtype=torch.bfloat16)
    rounded = quantize(weight)
    exact = x.double() @ rounded.values.double().t() * rounded.scales.double()
    sum_error = (x.shape[1] + 3) * 2.0**-24 * sizes(x, rounded)
    packed = source.pack_weight(weight, INT8)
    assert tuple(packed.shape) == (70, 100) and packed.dtype == torch.bfloat16
    within(source.logits(x, packed), exact, sum_error)
    bound = sum_error + ROUNDING[torch.bfloat16] * exact.abs() * 1.01
    product = source.linear(x, packed, None)
    within(product, exact, bound)
    assert torch.equal(source.linear(x, packed, bias), product + bias)
    ids = torch.tensor([0, 69, 5, 70, -1])
    expected = rounded.rows(ids.clamp(0, 69)).masked_fill(((ids < 0) | (ids > 69))[:, None], 0.0)
    assert torch.equal(source.embedding_rows(packed, ids, 0), expected)


@pytest.mark.parametrize("source", [operations("cpu"), plain_operations()], ids=["chosen", "plain"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_is_the_product_then_the_gate(activation: str, source: Operations) -> None:
    weight, x = draw(2 * 40, 100, dtype=torch.float16), draw(5, 100, dtype=torch.bfloat16)
    fused = source.gated_linear(x, source.pack_gated_weight(weight, activation, INT8), None, activation)
    apart = source.gated_linear(x, source.pack_weight(weight, INT8), None, activation)
    assert fused.dtype == torch.bfloat16 and torch.equal(fused, apart)


def test_experts_agree_with_the_plain_ones() -> None:
    """Two roundings to bfloat16 lie between the two products, and a sum in another order before each."""
    chosen, plain = operations("cpu"), plain_operations()
    gate_up, down = draw(4, 2 * 24, 32), draw(4, 32, 24)
    x = draw(30, 32, dtype=torch.bfloat16)
    shares, ids = chosen.route(draw(30, 4, seed=4), 2, True)
    found, expected = (
        each.experts(x, shares, ids, each.pack_experts(gate_up, "silu", INT8), each.pack_experts(down, "", INT8), "silu")
        for each in (chosen, plain)
    )
    torch.testing.assert_close(found, expected, rtol=2.0**-6, atol=2.0**-6 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_weight_is_multiplied_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    source = plain_operations()
    weight, x = draw(70, 100, dtype=dtype), draw(9, 100, dtype=dtype)
    wide = source.pack_weight(weight, WIDE)
    assert wide.shape == weight.shape and wide.dtype == dtype
    exact = torch.nn.functional.linear(x.float(), weight.float())
    assert torch.equal(source.linear(x, wide, None), exact.to(dtype)) and torch.equal(source.logits(x, wide), exact)
    assert torch.equal(source.embedding_rows(wide, torch.tensor([3, 69]), 0), weight[[3, 69]])
    assert torch.equal(source.pack_experts(weight.view(2, 35, 100), "", WIDE)[1].weight, weight[35:])


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
def test_products_of_one_shape_are_products(count: int) -> None:
    x, weight = draw(count, 70, dtype=torch.bfloat16), draw(30, 70, dtype=torch.bfloat16)
    fixed = FIXED.formed(weight)
    assert isinstance(fixed, FixedWeight) and fixed.shape == weight.shape and fixed.dtype == weight.dtype
    found = fixed.sums(x)
    assert found.shape == (count, 30) and found.dtype == torch.bfloat16
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=0.02, atol=0.05)
    assert torch.equal(fixed.rows(torch.tensor([3, 0])), weight[[3, 0]])
