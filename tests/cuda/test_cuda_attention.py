"""The paged attention kernel on the host shim: against dense float64, and bit for bit against itself, asked otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attention_steps import Options, Range, Sequences, Shape, attend, check, in_codes, in_fp8, make_sequences
from host_shim import ORDERS, HostBackend

from vnext.kernels.calls import AttentionCall
from vnext.kernels.cuda import attention
from vnext.kernels.cuda.plan import GROUP_KEYS, StepPlan, make_plan

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
FORMS = [
    (Shape(4, 2, 64, 16), BF16),
    (Shape(3, 1, 80, 32), HALF),
    (Shape(2, 1, 96, 16), BF16),
    (Shape(8, 2, 128, 16), BF16),
    (Shape(2, 2, 256, 32), BF16),
    (Shape(4, 2, 64, 16), FLOAT),
]


def ids(form: object) -> str:
    return "-".join(map(str, form)) if isinstance(form, tuple) else str(form)


@pytest.mark.parametrize(("shape", "dtype"), FORMS, ids=ids)
def test_prompts_decodes_and_chunks_agree(shim: HostBackend, shape: Shape, dtype: torch.dtype) -> None:
    """Blocks that hold no tokens are NaN, places of the table that nobody needs -1: neither may be touched."""
    lengths = [300, 1, 31, 33, 257]
    sequences = make_sequences(lengths, shape, dtype)
    whole = [Range(index, 0, length) for index, length in enumerate(lengths)][1:]
    together = attend(sequences, whole)
    for found, given in zip(together, whole, strict=True):
        check(found, sequences, given)
    last = [Range(index, length - 1, length) for index, length in enumerate(lengths)]
    mixed = [last[2], Range(0, 270, 300), last[4], Range(0, 255, 257)]
    for shim.order in ORDERS[1:]:
        chunk = attend(sequences, mixed)
        check(chunk[1], sequences, mixed[1])
        assert torch.equal(chunk[0], together[1][-1:]) and torch.equal(chunk[2], together[3][-1:])
        decodes = attend(sequences, last)
        assert torch.equal(decodes[0], chunk[1][-1:])
        for found, expected in zip(decodes[1:], together, strict=True):
            assert torch.equal(found, expected[-1:])
    shim.order = 0
    pieces = [attend(sequences, [Range(4, start, stop)])[0] for start, stop in ((0, 40), (40, 41), (41, 256), (256, 257))]
    assert torch.equal(torch.cat(pieces), together[3])


@pytest.mark.parametrize("options", [Options(), Options(700, 2.0)], ids=ids)
@pytest.mark.parametrize(("shape", "dtype"), [FORMS[0], FORMS[4], FORMS[5]], ids=ids)
def test_chunks_behind_a_long_prefix_are_cut_and_it_shows_in_no_bit(
    shim: HostBackend, shape: Shape, dtype: torch.dtype, options: Options
) -> None:
    """Into pieces of one split, of two, and not at all; beside decodes; one chunk begins within a split and ends in another."""
    sequences = make_sequences([1100, 800, 300], shape, dtype)
    given = [Range(2, 299, 300), Range(0, 1010, 1050), Range(1, 500, 540), Range(1, 799, 800)]
    whole = attend(sequences, given, options)
    for found, one in zip(whole, given, strict=True):
        check(found, sequences, one, options)
    for units_wanted, shim.order in zip((100, 6, 4), ORDERS[1:]):
        for found, expected in zip(attend(sequences, given, options, units_wanted=units_wanted), whole, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [Options(), Options(4500)], ids=ids)
@pytest.mark.parametrize(("shape", "dtype"), [(Shape(2, 1, 16, 16), BF16), (Shape(2, 1, 16, 16), FLOAT)], ids=ids)
def test_groups_are_joined_in_one_order(shim: HostBackend, shape: Shape, dtype: torch.dtype, options: Options) -> None:
    """Chunks behind 4,096 keys and twice as many: walked by one unit, cut into groups and into splits; one begins before a group
    and ends in it. And decodes beside them, of which one sees whole groups alone."""
    sequences = make_sequences([8300, 4200, 8192], shape, dtype)
    given = [Range(0, 8180, 8300), Range(1, 4080, 4200), Range(2, 8191, 8192), Range(0, 4095, 4096)]
    whole = attend(sequences, given, options)
    for found, one in zip(whole, given, strict=True):
        check(found, sequences, one, options)
    for units_wanted, shim.order in zip((4, 40), ORDERS[1:]):
        for found, expected in zip(attend(sequences, given, options, units_wanted=units_wanted), whole, strict=True):
            assert torch.equal(found, expected)
    last = [Range(0, 8299, 8300), Range(1, 4199, 4200), Range(0, 8200, 8211), Range(1, 4095, 4104)]
    parts = whole[0][-1:], whole[1][-1:], whole[0][20:31], whole[1][15:24]
    for units_wanted in (0, 100):
        for found, expected in zip(attend(sequences, last, options, units_wanted=units_wanted), parts, strict=True):
            assert torch.equal(found, expected)


def planned(new: int, behind: int, group: int = 4, units_wanted: int = 0) -> StepPlan:
    return make_plan(np.array([0, new]), np.array([behind + new]), group, 0, 0, 4, torch.device("cpu"), units_wanted)


def test_units_are_cut_where_they_are_too_few() -> None:
    plain, cut = planned(64, 32_704), planned(64, 32_704, units_wanted=16)
    assert len(plain.wide) == 4 and not plain.merges.numel() and plain.slot_count == 64
    assert len(cut.wide) == 32 and longest(cut) == 16 * 256 and cut.slot_count == 64 * 8
    assert cut.merges[:, 2:].unique(dim=0).tolist() == [[8, 8]]
    short = planned(64, 4000, units_wanted=16)
    assert len(short.wide) == 32 and longest(short) == 2 * 256 and short.slot_count == 64 * 16 and short.merges[0, 3] == 16
    assert len(planned(64, 32_704, units_wanted=2).wide) == 4, "there are enough"
    assert len(planned(200, 0, units_wanted=16).wide) == 13 and planned(200, 0, units_wanted=16).slot_count == 0


@pytest.mark.parametrize("multiprocessors", [132, 108, 58])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32), (8, 8), (64, 8), (8, 2)])
def test_no_chunk_behind_a_long_context_leaves_a_device_idle(multiprocessors: int, heads: int, kv_heads: int) -> None:
    """Twice as many blocks as there are multiprocessors, or none that walks more than a group. Partial sums are bounded."""
    for new in (17, 31, 64, 65, 100, 129, 200, 240, 300, 513, 1000, 2048):
        for behind in (1000, 4000, 8192, 16_000, 32_768, 60_001, 131_072):
            plan = planned(new, behind, heads // kv_heads, multiprocessors // kv_heads)
            blocks = (len(plan.wide) + len(plan.narrow)) * kv_heads
            told = (new, behind, blocks, longest(plan))
            assert blocks >= 2 * (multiprocessors - kv_heads) or longest(plan) <= GROUP_KEYS, told
            assert plan.slot_count * heads * 520 <= 352e6 * max(multiprocessors / 132, new / 2000), told
    most, over = planned(496, 160_000, units_wanted=16), planned(496, 170_000, units_wanted=16)
    assert longest(most) == GROUP_KEYS and most.slot_count == 496 * 40
    assert len(over.wide) == 31 and over.slot_count == 496, "too many sums would be left"


def longest(plan: StepPlan) -> int:
    units = torch.cat((plan.wide, plan.narrow))
    return int((units[:, 4] - units[:, 3]).max())


@pytest.mark.parametrize("options", [Options(40), Options(1), Options(300, 2.0), Options(0, 5.0)], ids=ids)
@pytest.mark.parametrize(("shape", "dtype"), [FORMS[0], FORMS[5]], ids=ids)
def test_windows_and_caps(shim: HostBackend, shape: Shape, dtype: torch.dtype, options: Options) -> None:
    sequences = make_sequences([600, 30], shape, dtype)
    given = [Range(0, 560, 600), Range(1, 0, 30)]
    together = attend(sequences, given, options)
    for found, one in zip(together, given, strict=True):
        check(found, sequences, one, options)
    for shim.order in ORDERS[1:3]:
        last = attend(sequences, [Range(1, 29, 30), Range(0, 599, 600), Range(0, 570, 574)], options)
        assert torch.equal(last[0], together[1][-1:]) and torch.equal(last[1], together[0][-1:])
        assert torch.equal(last[2], together[0][10:14])


@pytest.mark.parametrize(("shape", "shared"), [(Shape(4, 2, 64, 16), 512), (Shape(12, 1, 64, 16), 300)], ids=ids)
def test_a_shared_prefix_is_read_together_and_shows_in_no_bit(shim: HostBackend, shape: Shape, shared: int) -> None:
    """Decodes, drafts and a chunk; one row ends exactly where the shared part does."""
    lengths = [700, 530, 513, 600, 515, 640]
    shared = shared // shape.block_size * shape.block_size
    sequences = make_sequences(lengths, shape, BF16, shared)
    given = [Range(index, length - 1, length) for index, length in enumerate(lengths)]
    given[3] = Range(3, 597, 600)
    given.append(Range(1, 520, 525))
    alone = [attend(sequences, [one])[0] for one in given]
    for shim.order in ORDERS[::3]:
        for found, expected, one in zip(attend(sequences, given, shared=shared), alone, given, strict=True):
            check(found, sequences, one)
            assert torch.equal(found, expected), one
    given = [Range(0, 511, 512), Range(2, 512, 513)]
    if shared >= 512:
        for found, one in zip(attend(sequences, given, shared=shared), given, strict=True):
            assert torch.equal(found, attend(sequences, [one])[0])


def test_more_heads_a_group_than_a_tile_has_rows(shim: HostBackend) -> None:
    sequences = make_sequences([70, 290], Shape(40, 2, 64, 16), BF16)
    given = [Range(0, 60, 70), Range(1, 289, 290)]
    for shim.order in ORDERS[:2]:
        for found, one in zip(attend(sequences, given), given, strict=True):
            check(found, sequences, one)


def test_fp8_caches_and_their_scales(shim: HostBackend) -> None:
    """As if the cache held what it stands for, in the query's type: all of it is exact there."""
    sequences = make_sequences([300, 20], Shape(4, 2, 64, 16), BF16)
    small, exact = in_fp8(sequences)
    given = [Range(0, 299, 300), Range(1, 0, 20)]
    for shim.order in ORDERS:
        for found, expected in zip(attend(small, given), attend(exact, given), strict=True):
            assert torch.equal(found, expected)
    doubled = exact._replace(caches=exact.caches * 2)
    for found, expected in zip(attend(small, given, scales=(2, 2)), attend(doubled, given), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*FORMS, (Shape(2, 1, 16, 5), FLOAT), (Shape(4, 2, 32, 16), HALF), (Shape(4, 2, 64, 7), BF16)], ids=ids
)
def test_codes_and_what_they_stand_for(shim: HostBackend, shape: Shape, dtype: torch.dtype) -> None:
    """The same bits as from a cache of the query's type with those numbers, for decodes, prompts and chunks. Rows of codes begin
    at any byte; those that nobody wrote stand for infinities."""
    sequences = make_sequences([300, 20, 33], shape, dtype)
    coded, exact = in_codes(sequences)
    given = [Range(0, 299, 300), Range(1, 0, 20), Range(2, 27, 33), Range(0, 250, 290)]
    for shim.order in ORDERS:
        for found, expected in zip(attend(coded, given), attend(exact, given), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("narrowed", [in_codes, in_fp8])
@pytest.mark.parametrize(("shape", "dtype"), [*FORMS[:5], (Shape(4, 2, 64, 7), BF16)], ids=ids)
def test_helping_warps_show_in_no_bit(
    shim: HostBackend,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape,
    dtype: torch.dtype,
    narrowed: Callable[[Sequences], tuple[Sequences, Sequences]],
) -> None:
    """Decodes of one step and of two splits, and drafts: the bits of one warp alone, which are those of the exact numbers."""
    kept, exact = narrowed(make_sequences([290, 20], shape, dtype))
    given = [Range(0, 289, 290), Range(1, 18, 20)]
    expected = attend(exact, given)
    for warps, shim.order in zip(range(1, 5), ORDERS, strict=True):
        monkeypatch.setattr(attention, "WIDENING_WARPS", warps)
        for found, one in zip(attend(kept, given), expected, strict=True):
            assert torch.equal(found, one), warps


def test_tokens_of_no_row_and_idle_rows(shim: HostBackend) -> None:
    sequences = make_sequences([40, 20], Shape(4, 2, 64, 16), BF16)
    found = attend(sequences, [Range(0, 39, 40), Range(1, 20, 20), Range(1, 0, 20)])
    assert found[1].shape == (0, 4, 64)
    check(found[2], sequences, Range(1, 0, 20))
    padded = torch.cat((sequences.query[0][-1:], sequences.query[0][:2]))
    table = torch.tensor([sequences.blocks[0]], dtype=torch.int32)
    plan = make_plan(np.array([0, 1]), np.array([40]), 2, 0, 0, 4, padded.device)
    result = attention.paged_attention(padded, table, AttentionCall(*sequences.caches, plan, 0.125))
    assert torch.equal(result[:1], found[0]) and not result[1:].any()


def test_it_serves_what_it_was_written_for() -> None:
    def ask(dtype: torch.dtype, cache: torch.dtype, head_dim: int) -> bool:
        return attention.serves(torch.empty(1, 1, head_dim, dtype=dtype), torch.empty(1, 1, 1, head_dim, dtype=cache))

    assert ask(BF16, BF16, 128) and ask(HALF, torch.float8_e4m3fn, 80) and ask(FLOAT, FLOAT, 256)
    assert not ask(BF16, HALF, 64) and not ask(FLOAT, torch.float8_e4m3fn, 64)
    assert all(ask(dtype, torch.int8, 96) for dtype in (BF16, HALF, FLOAT)) and not ask(torch.int8, torch.int8, 64)
    assert not ask(BF16, BF16, 72) and not ask(BF16, BF16, 512)


def poisoned(sequences: Sequences) -> bool:
    return bool(sequences.caches.isnan().any())


def test_the_oracle_would_notice(shim: HostBackend) -> None:
    """The bound is narrow: one key fewer, or another scale by a hundredth, breaks it."""
    sequences = make_sequences([64], Shape(2, 1, 64, 16), BF16)
    assert poisoned(sequences)
    (found,) = attend(sequences, [Range(0, 63, 64)])
    with pytest.raises(AssertionError, match="too much"):
        check(found, sequences, Range(0, 62, 63))
