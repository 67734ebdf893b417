"""Blocks of GGUF files are the numbers that the package `gguf` makes of them, whatever their bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gguf
import numpy as np
import pytest

from vnext.kernels.codes import BlockRows, Codes, sums
from vnext.kernels.cpu import linear, native
from vnext.kernels.format import FORMATS, GGUF_BLOCKS, format_of, stored_formats
from vnext.kernels.formats.gguf_blocks import BLOCKS, Blocks
from vnext.kernels.formats.gguf_rounding import to_blocks

ROWS, COUNT = 5, 3
LINEAR = [name for name in GGUF_BLOCKS if getattr(BLOCKS, name).has_codes]


def drawn(name: str, seed: int = 0, rows: int = ROWS, count: int = COUNT) -> np.ndarray:
    """Random bytes of blocks; scales are finite, small and negative ones among them."""
    blocks: Blocks = getattr(BLOCKS, name)
    data = np.random.default_rng(seed).integers(0, 256, (rows, count, blocks.size), np.uint8)
    for place in halves(name):
        data[..., place + 1] &= 0xBF  # no exponent of float16 is its largest
    if name == "MXFP4":
        data[..., 0] = np.minimum(data[..., 0], 240)
    return data.reshape(rows, -1)


def halves(name: str) -> tuple[int, ...]:
    """Where float16 numbers stand in a block."""
    ends = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": ()}
    return ends.get(name, (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,))


def theirs(name: str, data: np.ndarray) -> np.ndarray:
    found: np.ndarray = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    return found


@pytest.mark.parametrize("name", LINEAR)
def test_codes_are_the_numbers_of_the_package(name: str) -> None:
    data = drawn(name)
    codes = format_of(name).codes((data,))
    assert codes.codes.dtype == np.uint8 and codes.codes.max() < 2**codes.bits
    assert np.array_equal(codes.floats(), theirs(name, data))
    assert np.array_equal(format_of(name).to_float((data,)), theirs(name, data))


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XS", "IQ3_S"])
def test_other_types_become_floats(name: str) -> None:
    data = drawn(name)
    assert np.array_equal(format_of(name).to_float((data,)), theirs(name, data))


def test_the_table_has_each_type_with_the_size_of_its_blocks() -> None:
    assert vars(BLOCKS).keys() == set(GGUF_BLOCKS) and all(FORMATS[name].is_stored for name in GGUF_BLOCKS)
    assert {format.name for format in stored_formats()}.isdisjoint(GGUF_BLOCKS)  # their types say which they are
    for name, blocks in vars(BLOCKS).items():
        assert (blocks.group, blocks.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]], name


@pytest.mark.parametrize("name", LINEAR)
def test_a_scale_that_is_not_finite_is_refused(name: str) -> None:
    for place in halves(name) or (0,):
        for worst in (0x7C, 0xFC, 0x7E) if halves(name) else (255,):
            data = drawn(name)
            data[2, place + bool(halves(name))] = worst
            with pytest.raises(ValueError, match="it has a scale that is not finite"):
                format_of(name).codes((data,))


@pytest.mark.parametrize("name", LINEAR)
def test_some_inputs_are_those_of_the_whole(name: str) -> None:
    codes = format_of(name).codes((drawn(name),))
    floats, width = codes.floats(), codes.codes.shape[1]
    for some in (slice(0, 32), slice(32, width), slice(32, 64), slice(0, width)):
        assert np.array_equal(codes.inputs(some).floats(), floats[:, some])
    with pytest.raises(ValueError, match="inputs 8 to 32 cut a group of"):
        codes.inputs(slice(8, 32))
    x = np.random.default_rng(3).standard_normal((2, width)).astype(np.float32)
    halved = [sums(x[:, some], codes.inputs(some)) for some in (slice(0, 32), slice(32, width))]
    assert np.allclose(sum(halved), sums(x, codes), rtol=1e-4, atol=1e-3 * np.abs(floats).max())


# ---- K-blocks out ------------------------------------------------------------------------------------------------

K_BLOCKS = {"Q2_K": 0.27, "Q3_K": 0.146, "Q4_K": 0.0705, "Q5_K": 0.035, "Q6_K": 0.0176, "Q4_1": 0.07, "Q5_1": 0.035}
"""The most that normal numbers may lose. Ranges of the smallest and the largest number alone lose 0.327, 0.198, 0.078, 0.038, 0.019 and
0.078, 0.038."""


def lost(name: str, weight: np.ndarray, columns: np.ndarray | None = None, counts: np.ndarray | float = 1) -> float:
    """By the package's reader, as a share; `counts`: how often an error counts here."""
    found = theirs(name, to_blocks(weight, name, columns))
    assert np.array_equal(found, format_of(name).to_float((to_blocks(weight, name, columns),)))
    return float(np.sqrt((counts * np.square(found - weight)).sum() / (counts * np.square(weight)).sum()))


@pytest.mark.parametrize("name", K_BLOCKS)
def test_k_blocks_hold_what_they_were_made_of(name: str) -> None:
    draw = np.random.default_rng(5)
    weight = draw.standard_normal((48, 512)).astype(np.float32)
    assert lost(name, weight) < K_BLOCKS[name]
    assert lost(name, weight - 3) < K_BLOCKS[name] and lost(name, np.abs(weight)) < K_BLOCKS[name]
    columns = draw.uniform(0.01, 1, 512).astype(np.float32) ** 3
    assert lost(name, weight, columns, columns) < 0.95 * lost(name, weight, None, columns)


@pytest.mark.parametrize("name", K_BLOCKS)
def test_k_blocks_of_odd_numbers(name: str) -> None:
    """Zeros, one number alone, a group beside a larger one, and numbers below float16: each as near as its block's scales allow."""
    weight = np.zeros((4, 256), np.float32)
    weight[1, 37], weight[2, :16], weight[2, 128:], weight[3] = -2, 1e-3, 5, 1e-30
    found = theirs(name, to_blocks(weight, name))
    assert not found[0].any() and not found[3].any()
    assert np.allclose(found[1], weight[1], rtol=1 / 63, atol=0.002) and np.allclose(found[2], weight[2], rtol=1 / 63, atol=0.002)


def test_a_row_gets_the_same_blocks_beside_others() -> None:
    weight = np.random.default_rng(6).standard_normal((300, 512)).astype(np.float32)
    for name in K_BLOCKS:
        assert np.array_equal(to_blocks(weight, name)[280:], to_blocks(weight[280:], name))


# ---- taken apart by the CPU kernels ------------------------------------------------------------------------------

needs_native = pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled here")


def test_the_kernels_take_apart_each_type_that_has_codes() -> None:
    assert [*native.BLOCK_TYPES] == LINEAR


@needs_native
@pytest.mark.parametrize(("gate", "shards"), [("", 1), ("silu", 1), ("", 3), ("", 6)])
@pytest.mark.parametrize("name", LINEAR)
def test_kernels_pack_blocks_as_the_codes_in_them(name: str, gate: str, shards: int) -> None:
    """Two parts, of which some rows lie apart, in ranges and on two threads; the second is codes from row 64 on."""
    data = [np.pad(drawn(name, seed, rows=88, count=3 * 256 // getattr(BLOCKS, name).group), ((0, 0), (0, 7))) for seed in (1, 2)]
    rows = [each[:, :-7] for each in data]
    whole = [format_of(name).codes((each,)) for each in rows]
    inputs = whole[0].codes.shape[1]
    codes = tuple(each.inputs(slice(0, inputs), inputs // shards) for each in whole)  # a shard has no part of a scale's inputs
    expected = linear.pack_codes(codes, gate=gate, shards=shards)

    def read(part: int, some: slice) -> Codes | BlockRows:
        return codes[1].outputs(some) if part and some.start >= 64 else BlockRows(rows[part][some], name)

    for threads in (1, 2):
        native.start(threads, 0)
        found = linear.pack_ranges(tuple(each.form for each in codes), read, gate=gate, shards=shards, together=32)
        assert np.array_equal(found.buffer, expected.buffer)
    native.start(1, 0)


def rows_in(data: np.ndarray, name: str, part: int, rows: slice) -> BlockRows:
    return BlockRows(data[rows], name)


@needs_native
@pytest.mark.parametrize("name", LINEAR)
def test_kernels_refuse_what_codes_refuse(name: str) -> None:
    """Every exponent of every scale, on the last row and block."""
    form = format_of(name).codes((drawn(name),)).form

    def is_refused(make: Callable[[], object]) -> bool:
        try:
            make()
        except ValueError as error:
            assert str(error) == "it has a scale that is not finite"
            return True
        return False

    for place in halves(name) or (-1,):
        for worst in (*range(0x74, 0x80), *range(0xF4, 256)):
            data = drawn(name)
            data.reshape(ROWS, COUNT, -1)[-1, -1, place + 1] = worst
            read = partial(rows_in, data, name)
            assert is_refused(partial(linear.pack_ranges, (form,), read)) == is_refused(partial(format_of(name).codes, (data,)))
