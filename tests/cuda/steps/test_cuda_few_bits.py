"""Products with weights of four bits on the host shim: bit for bit the plain form's, the same for a row in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_shim import ORDERS, HostBackend
from rows_cases import FORMS, device, draw, half_step, weight, within

from vnext.kernels import few_bits
from vnext.kernels.cuda.few_bits import ROWS_MAX, DeviceFewBits, multiply
from vnext.kernels.products import CutWeight, linear
from vnext.kernels.table import Operations
from vnext.models.loading.tensor_place import moved

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def product(x: torch.Tensor, given: DeviceFewBits) -> torch.Tensor:
    return multiply(x, given.words, given.scales, given.lows, given.zero, given.group)


@dtypes
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(1, 32, 32), (19, 1088, 64), (33, 2304, 128), (6, 4096, 256), (5, 96, 96)])
def test_the_kernel_has_the_bits_of_the_plain_form(
    shim: HostBackend, form: str, outputs: int, inputs: int, group: int, dtype: torch.dtype
) -> None:
    """Which is right within its rounding."""
    codes, x = weight(form, outputs, inputs, group), draw(11, inputs, dtype=dtype)
    expected, given = torch.from_numpy(few_bits.sums(x.float().numpy(), few_bits.packed(codes))), device(codes, dtype)
    for shim.order in ORDERS:
        for rows in (1, 2, 3, 11):
            assert torch.equal(product(x[:rows], given), expected[:rows])
    wide = torch.from_numpy(codes.floats()).double()
    scales, lows = codes.scales.floats(), codes.low()
    size = np.repeat(np.abs(scales), codes.group, 1) * 15 + np.repeat(np.abs(lows), codes.group, 1)
    within(expected, x.double() @ wide.t(), x.double().abs() @ torch.from_numpy(size).double().t() * (inputs / 32 + 48) * 2.0**-24)


@dtypes
def test_a_batch_changes_no_bit(shim: HostBackend, dtype: torch.dtype) -> None:
    """Neither other rows, nor their number or place, nor how rows lie in memory."""
    codes, x = weight("lows", 21, 1184, 32), draw(ROWS_MAX, 1184, dtype=dtype)
    given = device(codes, dtype)
    together = given.sums(x)
    for row in (0, 1, 7, 8, 40, ROWS_MAX - 1):
        assert torch.equal(given.sums(x[row : row + 1])[0], together[row])
    assert torch.equal(given.sums(x.flip(0)), together.flip(0))
    apart = draw(ROWS_MAX, 1200, dtype=dtype, seed=3)
    apart[:, 3:1187] = x
    assert torch.equal(product(apart[:, 3:1187], given), together)


@dtypes
def test_more_rows_and_rows_of_a_table_are_those_of_the_floats(dtype: torch.dtype, shim: HostBackend) -> None:
    codes = weight("zero", 40, 1056, 32)
    given, wide, x = device(codes, dtype), torch.from_numpy(codes.floats()).to(dtype), draw(ROWS_MAX + 1, 1056, dtype=dtype)
    assert torch.equal(given.sums(x), x @ wide.t())
    ids = torch.tensor([3, 39, 3, 0])
    assert torch.equal(given.rows(ids), wide[ids]) and given.shape == (40, 1056)


@pytest.mark.parametrize("shards", [1, 2])
def test_parts_and_shards_of_a_weight(kernels: Operations, shards: int) -> None:
    """Parts one below the other; what has other bits, groups or forms, or float32 activations, becomes floats."""
    parts = (weight("zero", 16, 512, 64), weight("zero", 7, 512, 64))
    found, x = kernels.pack_codes(parts, torch.bfloat16, "", shards), draw(5, 512, dtype=torch.bfloat16)
    pieces = found.pieces if isinstance(found, CutWeight) else (found,)
    assert len(pieces) == shards and all(isinstance(each, DeviceFewBits) for each in pieces) and tuple(found.shape) == (23, 512)
    wide = torch.cat([torch.from_numpy(part.floats()) for part in parts])
    exact = x.double() @ wide.double().t()
    within(linear(x, found, None), exact, half_step(exact, torch.bfloat16) * 1.01 + 1e-3)
    others = ((parts[0], weight("lows", 16, 512, 64)), (weight("zero", 16, 512, 64, bits=3),), (weight("zero", 16, 512, 16),))
    for given, dtype in (*((each, torch.bfloat16) for each in others), (parts, torch.float32)):
        floats = kernels.pack_codes(given, dtype, "", shards)
        first = floats.pieces[0] if isinstance(floats, CutWeight) else floats
        assert isinstance(first, torch.Tensor) and first.dtype == dtype


def test_a_weight_moves_with_all_its_parts() -> None:
    weights = CutWeight((device(weight("lows", 4, 64, 32), torch.bfloat16), device(weight("zero", 4, 64, 32), torch.bfloat16)))
    found = moved(weights, torch.device("meta"))
    assert isinstance(found, CutWeight) and all(isinstance(piece, DeviceFewBits) for piece in found.pieces)
    assert [each.device.type for piece in found.pieces for each in piece if isinstance(each, torch.Tensor)] == ["meta"] * 5
    assert (found.pieces[1].lows, found.shape) == (None, weights.shape)
