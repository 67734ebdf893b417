"""Paged attention of the CPU's kernels against dense float64, and bit for bit against itself, asked in other ways."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from attention_cases import Sequences, make_sequences
from cpu_levels import LEVELS, OWN_ATTENTION, ROUNDING, needs_native, using, within

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cpu import attention
from vnext.kernels.cpu.native import Level

pytestmark = needs_native
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [300, 1, 77, 64, 65, 257, 17, 5]
SHAPES = [(9, 3, 64, 16), (8, 4, 8, 16), (4, 4, 4, 5), (6, 2, 80, 3), (4, 2, 128, 32), (7, 1, 96, 1), (2, 2, 256, 200)]


SINKS = torch.tensor([-3.0, 0.0, 0.5, 2.0, 9.0, 30.0])


class Options(NamedTuple):
    """What a layer may ask for."""

    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def typed(sequences: Sequences, dtype: torch.dtype) -> Sequences:
    """The same sequences, rounded to another dtype."""
    lists = ([tensor.to(dtype) for tensor in tensors] for tensors in sequences[:3])
    return Sequences(*lists, sequences.blocks, sequences.key_cache.to(dtype), sequences.value_cache.to(dtype))


def attend(
    sequences: Sequences, ranges: list[tuple[int, int, int]], options: Options = Options()
) -> list[torch.Tensor]:
    """One step: for each (sequence, start, stop) the result of its queries [start, stop) after stop tokens."""
    table = np.full((len(ranges), max(map(len, sequences.blocks))), -1, dtype=np.int32)
    for row, (index, _, _) in enumerate(ranges):
        table[row, : len(sequences.blocks[index])] = sequences.blocks[index]
    starts = np.cumsum([0] + [stop - start for _, start, stop in ranges]).astype(np.int32)
    lengths = np.array([stop for _, _, stop in ranges], dtype=np.int32)
    query = torch.cat([sequences.query[index][start:stop] for index, start, stop in ranges])
    _, kv_heads, block_size, _ = sequences.key_cache.shape
    step = attention.plan(AttentionStep(starts, lengths, torch.from_numpy(table), block_size, kv_heads), query.shape[1])
    call = AttentionCall(sequences.key_cache, sequences.value_cache, step, query.shape[2] ** -0.5, **options._asdict())
    found = attention.paged_attention(query, call)
    return list(found.split([stop - start for _, start, stop in ranges]))


def check(found: torch.Tensor, sequences: Sequences, index: int, options: Options = Options()) -> None:
    """Against dense float64: float32 by its scores' rounding; bfloat16 by one of each weight and one of the result."""
    query, key, value = (tensors[index].double() for tensors in (sequences.query, sequences.key, sequences.value))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    place = torch.arange(len(query))
    hidden = place[None, :] > place[:, None]
    if options.window:
        hidden |= place[None, :] <= place[:, None] - options.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.double()[:, None, None].expand(-1, len(query), 1)), 2)
    weights = scores.softmax(-1)[:, :, : len(query)]
    expected, size = torch.einsum("hqk,khd->qhd", weights, value), torch.einsum("hqk,khd->qhd", weights, value.abs())
    bound = 128 * 2.0**-24 * size
    if found.dtype == torch.bfloat16:
        bound += 1.01 * ROUNDING[found.dtype] * (size + expected.abs())
    within(found, expected, bound)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_decodes_and_chunks_agree(shape: tuple[int, int, int, int], dtype: torch.dtype, level: Level) -> None:
    """Stale blocks hold NaN, and tables -1 behind a context: neither may be touched."""
    sequences = typed(make_sequences(LENGTHS, *shape), dtype)
    with using(level):
        together = attend(sequences, [(index, 0, length) for index, length in enumerate(LENGTHS)])
        for index, length in enumerate(LENGTHS):
            check(together[index], sequences, index)
            assert torch.equal(attend(sequences, [(index, 0, length)])[0], together[index]), "alone"
        for size in (1, 7, 50, 150):
            for start in range(0, LENGTHS[0], size * (20 if size < 50 else 1)):
                stop = min(start + size, LENGTHS[0])
                found = attend(sequences, [(2, 0, 30), (0, start, stop), (3, 63, 64)])
                assert torch.equal(found[1], together[0][start:stop]), f"chunk of {size} at {start}"
                assert torch.equal(found[2], together[3][63:]), "decode"
    for threads in (2, 3):
        with using(level, threads):
            last = attend(sequences, [(index, length - 1, length) for index, length in enumerate(LENGTHS)])
            for index in range(len(LENGTHS)):
                assert torch.equal(last[index], together[index][-1:]), "a step of decodes"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 1, 40, 16), (9, 1, 576, 5), (70, 1, 288, 16)])
def test_rows_that_are_keys_and_values(shape: tuple[int, int, int, int], dtype: torch.dtype, level: Level) -> None:
    """As latent attention keeps them: one head of one cache, as wide as DeepSeek's, for many heads of queries."""
    lengths = [270, 65, 17]
    sequences = typed(make_sequences(lengths, *shape), dtype)
    sequences = sequences._replace(value=sequences.key, value_cache=sequences.key_cache)
    with using(level):
        together = attend(sequences, [(index, 0, length) for index, length in enumerate(lengths)])
        for index in range(len(lengths)):
            check(together[index], sequences, index)
        found = attend(sequences, [(2, 0, 7), (0, 250, 261), (1, 64, 65)])
        assert torch.equal(found[1], together[0][250:261]) and torch.equal(found[2], together[1][64:])
    with using(level, threads=2):
        last = attend(sequences, [(index, length - 1, length) for index, length in enumerate(lengths)])
        assert all(torch.equal(one, whole[-1:]) for one, whole in zip(last, together, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        Options(window=40), Options(window=1), Options(window=300, softcap=2.0), Options(softcap=2.0), Options(sinks=SINKS),
        Options(window=128, sinks=SINKS), Options(softcap=2.0, sinks=SINKS),
    ],
)  # fmt: skip
def test_windows_caps_and_sinks(options: Options, dtype: torch.dtype, level: Level) -> None:
    lengths = [700, 30, 290]
    sequences = typed(make_sequences(lengths, 6, 2, 32, 16), dtype)
    with using(level):
        together = attend(sequences, [(index, 0, length) for index, length in enumerate(lengths)], options)
        for index, length in enumerate(lengths):
            check(together[index], sequences, index, options)
            last = attend(sequences, [(index, length - 1, length)], options)[0]
            assert torch.equal(last, together[index][-1:])
        chunk = attend(sequences, [(0, 333, 410), (1, 29, 30)], options)
        assert torch.equal(chunk[0], together[0][333:410])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 40])
def test_rows_that_share_blocks_get_what_each_would_get_alone(heads: int, dtype: torch.dtype, level: Level) -> None:
    """Five rows share two splits, some of them a third one; all are decodes or short chunks of other lengths."""
    lengths = [800, 600, 700, 530, 800]
    sequences = typed(make_sequences(lengths, heads, 1, 64, 16), dtype)
    for index, shared in ((1, 512), (2, 640), (3, 512), (4, 768)):
        sequences.blocks[index][: shared // 16] = sequences.blocks[0][: shared // 16]
    ranges = [(index, length - 1 - index % 2, length) for index, length in enumerate(lengths)]
    with using(level):
        alone = [attend(sequences, [one])[0] for one in ranges]
        for found, expected in zip(attend(sequences, ranges), alone, strict=True):
            assert torch.equal(found, expected)
    with using(level, threads=2):
        for found, expected in zip(attend(sequences, ranges[::-1]), alone[::-1], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("level", [level for level in LEVELS if level in OWN_ATTENTION])
@pytest.mark.parametrize("shape", [(3, 1, 64, 16), (4, 2, 128, 8)])
def test_many_decodes_are_their_prompts(shape: tuple[int, int, int, int], level: Level) -> None:
    """A wrong last bit of a sum shows in one rounded result of some ten thousands: so there are many of them."""
    lengths = [100 + index % 90 for index in range(400)]
    sequences = typed(make_sequences(lengths, *shape), torch.bfloat16)
    with using(level):
        prompts = attend(sequences, [(index, 0, length) for index, length in enumerate(lengths)])
        for back in range(5):
            decodes = attend(sequences, [(i, length - 1 - back, length - back) for i, length in enumerate(lengths)])
            expected = [prompt[length - 1 - back] for prompt, length in zip(prompts, lengths)]
            assert torch.equal(torch.cat(decodes), torch.stack(expected)), f"{back} tokens before the last"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vector_levels_agree_in_every_bit(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Their tiles differ in both directions; the order of every lane's sums does not. Levels that multiply bfloat16 by
    instructions of their own have an order of their own."""
    sequences = typed(make_sequences([300, 77, 17], *shape), dtype)
    found = []
    for level in LEVELS:
        if level != Level.PORTABLE and (level not in OWN_ATTENTION or dtype is torch.float32):
            with using(level):
                found.append(torch.cat(attend(sequences, [(0, 0, 300), (1, 70, 77), (2, 16, 17)], Options(200, sinks=torch.ones(shape[0])))))
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_no_row_and_idle_rows(dtype: torch.dtype) -> None:
    sequences = typed(make_sequences([40, 20], 4, 2, 16, 16), dtype)
    found = attend(sequences, [(0, 39, 40), (1, 20, 20), (1, 0, 20)])
    assert found[1].shape == (0, 4, 16)
    check(found[2], sequences, 1)
    table = torch.tensor([sequences.blocks[0]], dtype=torch.int32)
    step = attention.plan(AttentionStep(np.array([0, 1]), np.array([40]), table, 16, 2), 4)
    padded = torch.cat((sequences.query[0][-1:], sequences.query[0][:2]))
    result = attention.paged_attention(padded, AttentionCall(sequences.key_cache, sequences.value_cache, step, 0.25))
    assert torch.equal(result[:1], found[0]) and not result[1:].any()
