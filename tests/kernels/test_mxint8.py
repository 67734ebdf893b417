"""Caches of int8: rows of codes equal the plain ones byte for byte, and attention reads exactly the numbers that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import make_sequences
from cpu_levels import LEVELS, needs_native, using
from test_cpu_attention import DTYPES, LENGTHS, SHAPES, Options, attend, typed

from vnext.kernels import mxint8, references
from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cpu import rows
from vnext.kernels.cpu.native import Level


def numbers(tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of many sizes, among them zeros, numbers far too small, infinities and NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    sizes = torch.exp2(torch.randint(-30, 30, (tokens, 1), generator=generator).float())
    found = torch.randn(tokens, head_dim, generator=generator) * sizes
    found[0], found[1] = 0, found[1] * 2.0**-110
    found[2, 0], found[3, head_dim - 1], found[4, ::3] = float("inf"), float("-inf"), float("nan")
    found[5] = torch.tensor([1.9999, -1.0]).repeat(head_dim // 2)
    return found.to(dtype)


@pytest.mark.parametrize("head_dim", [2, 8, 32, 64, 80, 96, 128, 256])
def test_a_row_names_its_head_dim_and_each_number_keeps_seven_bits(head_dim: int) -> None:
    given = numbers(64, head_dim, torch.float32)[6:]
    packed = mxint8.pack(given)
    assert packed.dtype is torch.int8 and mxint8.head_dim_of(packed) == head_dim
    blocks = torch.nn.functional.pad(given, (0, -head_dim % 32)).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(-2)[..., :head_dim]
    found = mxint8.unpack(packed, head_dim)
    assert ((found - given).abs() <= largest / 64).all() and torch.equal(found, found.bfloat16().float())
    assert torch.equal(mxint8.pack(found), packed)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 256, 576])
def test_the_kernels_write_the_plain_rows(head_dim: int, dtype: torch.dtype, level: Level) -> None:
    tokens, heads, kv_heads, block_size = 64, 4, 2, 5
    joined = numbers(tokens * (heads + 2 * kv_heads), head_dim, dtype).view(tokens, -1)
    slots = torch.from_numpy(np.random.default_rng(1).permutation(80)[:tokens].astype(np.int64))
    shape = (16, kv_heads, block_size, mxint8.packed_width(head_dim))
    caches = [torch.zeros(shape, dtype=torch.int8) for _ in range(4)]
    with using(level):
        rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, None, None, *caches[:2], slots))
    references.rotary_kv_write(joined.clone(), RotaryWrite(None, None, 1e-6, None, None, *caches[2:], slots))
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3]) and caches[0].any()


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [Options(), Options(window=70, softcap=5.0)], ids=["plain", "window"])
def test_attention_reads_what_the_codes_stand_for(
    shape: tuple[int, int, int, int], options: Options, dtype: torch.dtype, level: Level
) -> None:
    """The same bits as from a cache of the activations' dtype with those numbers: for prompts, chunks and decodes."""
    sequences = typed(make_sequences(LENGTHS, *shape), dtype)
    coded = sequences._replace(key_cache=mxint8.pack(sequences.key_cache), value_cache=mxint8.pack(sequences.value_cache))
    plain = sequences._replace(
        key_cache=mxint8.unpack(coded.key_cache, shape[2]).to(dtype), value_cache=mxint8.unpack(coded.value_cache, shape[2]).to(dtype)
    )
    whole = [(index, 0, length) for index, length in enumerate(LENGTHS)]
    last = [(index, length - 1, length) for index, length in enumerate(LENGTHS)]
    some = [(0, 290, 300), (2, 3, 77), (5, 255, 257)]
    for ranges in (whole, last, some):
        with using(level):
            found, expected = (attend(each, ranges, options) for each in (coded, plain))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 576])
def test_a_decode_reads_codes_of_every_size(head_dim: int, group: int, dtype: torch.dtype, level: Level) -> None:
    """Heads of whole blocks, up to eight queries a key head, which are read from codes, and nine; numbers from 0 to near the largest."""
    sequences = typed(make_sequences([300, 65], 2 * group, 2, head_dim, 7), dtype)
    sizes = torch.exp2(torch.arange(sequences.key_cache[..., 0].numel()).float().remainder(200) - 100).view(sequences.key_cache.shape[:-1])
    sizes[:, :, 3] = 0
    values = mxint8.pack(sequences.value_cache.float() * sizes[..., None])
    coded = sequences._replace(key_cache=mxint8.pack(sequences.key_cache), value_cache=values)
    plain = sequences._replace(
        key_cache=mxint8.unpack(coded.key_cache, head_dim).to(dtype), value_cache=mxint8.unpack(values, head_dim).to(dtype)
    )
    with using(level):
        found, expected = (attend(each, [(0, 299, 300), (1, 64, 65), (0, 99, 100)], Options()) for each in (coded, plain))
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(found, expected, strict=True))
