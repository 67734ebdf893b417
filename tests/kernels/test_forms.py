"""Formats of weights in memory: what loading rounds to codes, and the floats that plain torch multiplies."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from cpu_levels import draw

from vnext.kernels.contracts import ContractError
from vnext.kernels.format import Format, format_of
from vnext.kernels.formats.floats import FIXED, FLIPPED, PLAIN, WIDE, FixedWeight
from vnext.kernels.formats.rounded import INT4, INT8
from vnext.kernels.table import operations, plain_operations

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def rounded(products: Format, inputs: int, run: int, held: Format = PLAIN) -> Format:
    found = products.rounds(held, inputs, run, takes_few=True)
    assert found is not None
    return found


@pytest.mark.parametrize(("inputs", "run", "group"), [(96, 96, 32), (128, 32, 32), (160, 40, 40), (70, 70, 70), (9, 3, 3), (1, 1, 1)])
def test_a_weight_of_int8_is_at_most_half_a_step_off(inputs: int, run: int, group: int) -> None:
    weight = draw(50, inputs).numpy()
    weight[7] = 0
    found = rounded(INT8, inputs, run).codes((weight,))
    assert (found.bits, found.group, found.zero, found.lows) == (8, group, 128, None) and found.scales.parts.dtype == BFLOAT16
    groups, scales = weight.reshape(50, -1, group), found.scales.floats()
    assert np.array_equal(scales[8:], (np.abs(groups).max(-1) / np.float32(127)).astype(BFLOAT16).astype(np.float32)[8:])
    codes = np.clip(np.rint(groups / scales[..., None]), -128, 127) + 128
    assert np.array_equal(found.codes.reshape(codes.shape), codes) and (found.codes[7] == 128).all()
    half_a_step = 0.5 + 127 * 2.0**-8  # a scale is a bfloat16, and what it does not hold is cut off
    assert (np.abs(found.floats().reshape(groups.shape) - groups) <= scales[..., None] * half_a_step).all()


def test_what_is_rounded_is_what_the_format_says() -> None:
    """The head in 8 bits beside layers of 4 as well, and what is no whole groups."""
    weight = (draw(8, 96).numpy(),)
    for products, inputs, takes_few, bits in (
        (INT8, 96, True, 8), (INT8, 96, False, 8), (INT4, 96, True, 4), (INT4, 96, False, 8), (INT4, 48, True, 8),
    ):  # fmt: skip
        found = products.rounds(PLAIN, inputs, inputs, takes_few)
        assert found is not None and found.codes(weight).bits == bits
    assert PLAIN.rounds(PLAIN, 64, 64, True) is None
    assert [rounded(INT4, inputs, inputs).group for inputs in (64, 96)] == [32, 32]


def test_four_bits_lose_less_than_those_of_ggml() -> None:
    """Q4_0 has as many bits."""
    weight = draw(64, 576).numpy()
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight, kind := gguf.GGMLQuantizationType.Q4_0), kind)
    found = rounded(INT4, 576, 576).codes((weight,)).floats()
    assert np.square(found - weight).sum() < 0.97 * np.square(theirs - weight).sum()


def test_a_weight_the_other_way_about_is_rounded_alike() -> None:
    """GPT-2's files have [in, out]."""
    weight, format = draw(64, 40).numpy(), rounded(INT8, 64, 16, FLIPPED)
    assert format.shapes((40, 64)) == ((64, 40),) and format.slices(slice(3, 9), slice(0, 32)) == ((slice(0, 32), slice(3, 9)),)
    found, expected = format.codes((weight,)), rounded(INT8, 64, 16).codes((weight.T.copy(),))
    assert np.array_equal(found.codes, expected.codes) and np.array_equal(found.floats(), format.to_float((weight,)))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="the format 'int3' of a weight is not known; there are: plain, int8, int4, wide, fixed, codes"):
        format_of("int3")
    for choice in (operations("cpu"), plain_operations()):
        with pytest.raises(ContractError, match="the format of a weight must be an object of kernels/format.py but is 'int8'"):
            choice.pack_weight(draw(4, 4), "int8")


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
