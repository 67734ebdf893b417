"""Weights of few bits: every level's product is that of kernels/codes.py bit for bit, and knows no neighbours."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from cpu_levels import LEVELS, needs_native, using

from vnext.kernels.codes import Codes, FloatRows, Scales, sums
from vnext.kernels.cpu import linear as products, rows
from vnext.kernels.cpu.linear import CONTAINERS
from vnext.kernels.cpu.native import Level
from vnext.kernels.format import BF16, INT8
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.formats.rounded import Rounded
from vnext.kernels.formats.rounding import SHARES
from vnext.kernels.shards import joined

pytestmark = needs_native
ROW_COUNTS = (1, 2, 5, 17, 40)
GROUPS = (16, 32, 64, 128)
FORMS = ("float32", "float16", "bfloat16", "zero", "lows", "uint8", "int8")


def scales(form: str, outputs: int, groups: int, spans: int, seed: int) -> Scales:
    random = np.random.default_rng(seed)
    if form in ("uint8", "int8"):
        parts = random.integers(np.iinfo(form).min, np.iinfo(form).max, (outputs, groups), form, endpoint=True)
        return Scales(parts, random.uniform(-0.01, 0.01, (outputs, spans)).astype(np.float16 if form == "int8" else np.float32))
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(form, np.float32)
    return Scales(random.uniform(-1, 1, (outputs, groups)).astype(dtype))


def draw(form: str, bits: int, outputs: int, inputs: int, group: int, seed: int = 0) -> Codes:
    """Codes of all sizes, the extreme ones among them; uint8 and "lows" have lows."""
    random = np.random.default_rng(seed + bits)
    codes = random.integers(0, 2**bits, (outputs, inputs), np.uint8)
    codes[random.random((outputs, inputs)) < 0.2] = 2**bits - 1
    codes[:, : inputs // 2][random.random((outputs, inputs // 2)) < 0.2] = 0
    count = inputs // group
    spans = count // 2 if count % 2 == 0 else 1
    lows = scales("uint8" if form == "uint8" else "float32", outputs, count, spans, seed + 1) if form in ("uint8", "lows") else None
    return Codes(codes, bits, scales(form, outputs, count, spans, seed), 0 if lows or form == "float32" else 2 ** (bits - 1), lows)


def numbers(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of many sizes, with runs of the largest number, which reach the largest sums."""
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs)) * torch.logspace(-3, 3, inputs)
    x[:, 5 : inputs // 4] = 2.5
    x[1::3, 5 : inputs // 2] = -2.5
    x[0, :32], x[-1, -32:] = 0, 1e-35
    return x.to(dtype)


def same(found: torch.Tensor, expected: np.ndarray) -> bool:
    return torch.equal(found, torch.from_numpy(expected)) and bool(found.isfinite().all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("bits", "form"), tuple(product(CONTAINERS, FORMS)))
def test_a_product_is_that_of_the_definition(bits: int, form: str, level: Level) -> None:
    for group in GROUPS:
        weight, x = draw(form, bits, 50, 256, group), numbers(max(ROW_COUNTS), 256)
        expected, packed = sums(x.numpy(), weight), products.pack_codes(weight, dtype=torch.float32)
        for count, threads in zip(ROW_COUNTS, (1, 2, 1, 2, 3), strict=True):
            with using(level, threads):
                assert same(products.linear(x[:count], packed), expected[:count]), (group, count)
        assert len(packed.buffer) == products.codes_bytes(weight.form)


@pytest.mark.parametrize(("bits", "form"), tuple(product(CONTAINERS, FORMS)))
def test_a_product_in_bfloat16_is_that_of_the_definition(bits: int, form: str) -> None:
    for group in GROUPS:
        weight, x = draw(form, bits, 50, 256, group), numbers(40, 256)
        expected, packed = sums(x.numpy(), weight, BF16), products.pack_codes(weight, dtype=torch.float32, activations=BF16)
        exact = x.bfloat16().double() @ torch.from_numpy(weight.floats()).double().T
        assert (torch.from_numpy(expected) - exact).norm() < 1e-5 * exact.norm(), "the definition is the product, but for rounding"
        for level, (count, threads) in product(LEVELS, zip((1, 2, 3, 4, 5, 17, 40), (1, 2, 1, 1, 2, 1, 3), strict=True)):
            with using(level, threads):
                assert same(products.linear(x[:count], packed), expected[:count]), (group, level, count)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activations", [INT8, BF16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(33, 48, 16), (17, 70, 70), (1, 32, 32), (96, 96, 96), (70, 160, 32)])
def test_ragged_weights(outputs: int, inputs: int, group: int, activations: str, level: Level) -> None:
    weight, x = draw("lows", 4, outputs, inputs, group), numbers(7, inputs)
    bias, packed = torch.arange(outputs) / 8, products.pack_codes(weight, dtype=torch.float32, activations=activations)
    expected = sums(x.numpy(), weight, activations)
    with using(level):
        for count in (1, 7):
            assert same(products.linear(x[:count], packed), expected[:count])
            assert same(products.linear(x[:count], packed, bias=bias), expected[:count] + bias.numpy())
        own = products.pack_codes(weight, dtype=torch.float32, bias=bias, activations=activations)
        assert same(products.linear(x, own), expected + bias.numpy())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "activations"), [(48, INT8), (20, INT8), (48, BF16)])
def test_a_gated_product_is_the_product_then_the_gate(width: int, activations: str, dtype: torch.dtype, level: Level) -> None:
    """Gate and up may differ in form, wherever they meet."""
    parts = (draw("zero", 6, width, 96, 16), draw("lows", 4, width, 96, 32))
    x = numbers(37, 96, dtype)
    both = np.concatenate([sums(x.float().numpy(), part, activations) for part in parts], 1)
    packed = products.pack_codes(parts, gate="silu", dtype=dtype, activations=activations)
    with using(level):
        expected = rows.gate_and_mul(torch.from_numpy(both).to(dtype), "silu")
        for count in (37, 1, 5):
            assert torch.equal(products.linear(x[:count], packed), expected[:count])
        assert torch.equal(products.linear(x, packed, apart=True), torch.from_numpy(both).to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activations", [INT8, BF16])
@pytest.mark.parametrize(("form", "group"), [("uint8", 32), ("int8", 16), ("zero", 128), ("float16", 512)])
def test_shards_are_weights_of_their_own(form: str, group: int, activations: str, level: Level) -> None:
    """Also where a group or a span is longer than a shard."""
    weight, x = draw(form, 5, 40, 512, group), numbers(9, 512)
    own, cut = 512 // 8, []
    for first in range(0, 512, own):
        scales, lows = (
            None if part is None else Scales(np.repeat(part.floats(), group, 1)[:, first : first + own : min(group, own)])
            for part in (weight.scales, weight.lows)
        )
        piece = Codes(weight.codes[:, first : first + own], 5, scales, weight.zero, lows)
        cut.append(sums(x[:, first : first + own].numpy(), piece, activations))
    packed = products.pack_codes(weight, shards=8, dtype=torch.float32, activations=activations)
    with using(level, 2):
        for count in (1, 9):
            assert same(products.linear(x[:count], packed), joined(cut)[:count])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activations", [INT8, BF16])
def test_parts_of_many_forms_in_one_weight(activations: str, level: Level) -> None:
    parts = tuple(draw(form, bits, 16 * bits, 256, group) for form, bits, group in zip(FORMS, CONTAINERS, GROUPS * 2, strict=False))
    x, packed = numbers(21, 256), products.pack_codes(parts, dtype=torch.float32, activations=activations)
    expected = np.concatenate([sums(x.numpy(), part, activations) for part in parts], 1)
    with using(level, 2):
        for count in (3, 21):
            assert same(products.linear(x[:count], packed), expected[:count])


@pytest.mark.parametrize("gate", ["", "silu"])
def test_parts_of_one_form_meet_anywhere_and_come_in_ranges(gate: str) -> None:
    """Some outputs after the others make the same bytes as all at once, whatever the parts: so do those of one part."""
    whole = draw("uint8", 5, 180, 256, 32)
    cuts = [slice(0, 24), slice(24, 25), slice(25, 90), slice(90, 180)]
    parts = tuple(whole.outputs(cut) for cut in cuts)
    expected = products.pack_codes(whole, gate=gate, dtype=torch.float32)
    read = list[slice]()

    def outputs(part: int, rows: slice) -> Codes:
        read.append(rows)
        return parts[part].outputs(rows)

    found = products.pack_ranges(tuple(part.form for part in parts), outputs, gate=gate, dtype=torch.float32, together=32)
    x = numbers(3, 256)
    assert torch.equal(products.linear(x, found), products.linear(x, expected))
    assert max(rows.stop - rows.start for rows in read) <= 32 and len(read) > 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight_are_its_numbers(dtype: torch.dtype) -> None:
    parts = tuple(draw(form, bits, 16, 256, group) for form, bits, group in zip(FORMS, CONTAINERS, GROUPS * 2, strict=False))
    packed = products.pack_codes(parts, dtype=dtype)
    whole = torch.from_numpy(np.concatenate([part.floats() for part in parts])).to(dtype)
    ids = torch.tensor([0, 31, 95, 17, 48, 64, 80, 96, -1])
    expected = torch.where((ids.remainder(200) < 96)[:, None], whole[ids.clamp(0, 95)], torch.zeros(1, dtype=dtype))
    assert torch.equal(products.rows_of(packed, ids + 5, 5), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activations", [INT8, BF16])
def test_a_number_that_is_not_finite_spoils_its_own_row(activations: str, level: Level) -> None:
    weight, x = draw("float16", 8, 40, 128, 32), numbers(12, 128)
    packed = products.pack_codes(weight, dtype=torch.float32, activations=activations)
    with using(level):
        before = products.linear(x, packed)
        for row, wrong in ((1, float("inf")), (4, float("nan")), (11, float("-inf"))):
            x[row, 77] = wrong
        with np.errstate(invalid="ignore"):
            found, expected = products.linear(x, packed), torch.from_numpy(sums(x.numpy(), weight, activations))
    spoilt = [1, 4, 11]
    assert found[spoilt].isnan().all() and torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found[[0, 2, 3, 5, 6, 7, 8, 9, 10]], before[[0, 2, 3, 5, 6, 7, 8, 9, 10]])


def test_what_has_no_place_in_panels_is_refused() -> None:
    parts = (draw("zero", 4, 24, 64, 32), draw("zero", 6, 24, 64, 32))
    with pytest.raises(ValueError, match="meet at output 24"):
        products.pack_codes(parts)
    with pytest.raises(ValueError, match="7"):
        products.pack_codes(parts[0]._replace(bits=7))
    with pytest.raises(ValueError, match="a group of 8 inputs"):
        products.pack_codes(draw("zero", 4, 32, 64, 8))
    with pytest.raises(ValueError, match="shards"):
        products.pack_codes(draw("zero", 4, 32, 192, 64), shards=2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_floats_are_rounded_as_the_plain_form_does(bits: int, level: Level) -> None:
    """Groups of ordinary numbers, of few large ones, of zeros, of one size, and of the least and the largest sizes; and of three
    sizes beside a larger one, for which each share of its scale but the last is the best somewhere."""
    random = np.random.default_rng(5)
    weight = random.standard_normal((301, 320)).astype(np.float32) ** 3
    sizes = np.take_along_axis(random.integers(0, 8, (2000, 3)), random.integers(0, 3, (2000, 32)), 1)
    some = sizes * random.choice((-1, 1), (2000, 32)) * np.resize(SHARES, (2000, 1)) / 7
    some[:, 0] = 1
    weight[100:300] = some.reshape(200, 320)
    weight[3], weight[5, 32:64], weight[9, :32] = 0, 2.5, np.arange(32) == 7
    for row, size in enumerate((1e-44, 1e-38, 1e-21, 1e17, 1e30, 1e37)):
        weight[20 + row] *= size / np.abs(weight[20 + row]).max()
    weight[40:80] = weight[40:80].astype(ml_dtypes.bfloat16)
    for given, (threads, count) in product((weight, weight.astype(ml_dtypes.bfloat16)), ((1, 301), (3, 301), (2, 1))):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = Rounded("rounded", bits, 32, PLAIN).codes((given[:count],))
        with using(level, threads):
            found = products.rounded(FloatRows(given[:count], bits))
        assert found.form == expected.form
        assert np.array_equal(found.codes, expected.codes)
        assert found.scales.parts.tobytes() == expected.scales.parts.tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_number_that_is_not_finite_is_not_rounded(dtype: type, level: Level) -> None:
    for wrong, place, bits in product((np.inf, -np.inf, np.nan), (0, 31, 959), (4, 8)):
        weight = np.ones((3, 320), dtype)
        with using(level):
            products.rounded(FloatRows(weight, bits))
            weight.flat[place] = wrong
            with pytest.raises(ValueError, match="a number or a scale that is not finite"):
                products.rounded(FloatRows(weight, bits))


def test_a_scale_beyond_what_bfloat16_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        products.rounded(FloatRows(np.full((1, 32), np.finfo(np.float32).max), 2))
