"""Verification rows, a request's last token and the drafts behind it, on the host shim: each has the bits that it has alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_steps import Options, Range, Sequences, Shape, attend, check, make_sequences
from host_shim import ORDERS, HostBackend

from vnext.kernels.calls import AttentionCall
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import attention
from vnext.kernels.cuda.decode_plan import slot_count, tiles_of, view_plan, word_count, write_plan
from vnext.kernels.cuda.plan import StepPlan

BF16, FLOAT = torch.bfloat16, torch.float32
LENGTHS = [700, 9, 259, 513, 40]
RUNS = [Range(0, 696, 700), Range(1, 8, 9), Range(2, 254, 259), Range(3, 497, 513), Range(4, 38, 40)]
"""Of 4, 1, 5, 16 and 2 rows. Two cross the end of a split, so that their first rows see none of its keys."""
SHAPES = [(Shape(4, 2, 64, 16), BF16), (Shape(8, 1, 64, 32), FLOAT), (Shape(2, 2, 128, 16), BF16), (Shape(20, 1, 64, 16), BF16)]
"""Groups of 2, 8, 1 and 20 heads: a tile has room for 8, 2, 16 rows and for a part of one."""
WINDOWS = [Options(), Options(40), Options(256), Options(3, 2.0)]


def ids(case: object) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)


def one_at_a_time(sequences: Sequences, options: Options) -> list[torch.Tensor]:
    """Each row as a decode of its own, in a step without others."""
    return [
        torch.cat([attend(sequences, [Range(index, at, at + 1)], options)[0] for at in range(start, stop)])
        for index, start, stop in RUNS
    ]


def planned(shape: Shape, window: int, room: int = 0) -> StepPlan:
    """The plan that a graph of 32 rows reads: RUNS, and padding that sees one token of row 0."""
    runs = np.array([stop - start for _, start, stop in RUNS])
    rows = 32
    pads = rows - int(runs.sum())
    contexts = np.concatenate([*(np.arange(start, stop) + 1 for _, start, stop in RUNS), np.ones(pads, dtype=np.int64)])
    table_rows = np.append(np.repeat(np.arange(len(RUNS)), runs), np.zeros(pads, dtype=np.int64))
    tiles = tiles_of(np.append(runs, np.ones(pads, dtype=np.int64)), shape.heads // shape.kv_heads)
    units = slot_count(tiles, contexts, window) + room
    flat = np.full(word_count(rows, units), 12345, dtype=np.int32)
    write_plan(flat, units, contexts, table_rows, window, tiles)
    return view_plan(torch.from_numpy(flat), rows, units)


def in_a_graph(sequences: Sequences, options: Options, plan: StepPlan) -> list[torch.Tensor]:
    """RUNS by a plan of fixed shape."""
    shape = sequences.shape
    table = np.zeros((len(RUNS), max(map(len, sequences.blocks))), dtype=np.int32)
    for row, (index, _, _) in enumerate(RUNS):
        table[row, : len(sequences.blocks[index])] = sequences.blocks[index]
    rows = torch.cat([sequences.query[index][start:stop] for index, start, stop in RUNS])
    query = torch.cat((rows, sequences.query[0][:1].expand(plan.limits.shape[0] - len(rows), -1, -1)))
    found = attention.paged_attention(query, torch.from_numpy(table), AttentionCall(*sequences.caches, plan, shape.head_dim**-0.5, *options))
    assert found.isfinite().all(), "padding must not spoil what reads it"
    return list(found[: len(rows)].split([stop - start for _, start, stop in RUNS]))


@pytest.mark.parametrize("options", WINDOWS, ids=ids)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=ids)
def test_rows_of_one_request_have_the_bits_of_single_rows(
    shim: HostBackend, shape: Shape, dtype: torch.dtype, options: Options
) -> None:
    """In a graph's plan, where they share tiles, and in a plan of the step's own, where long runs become wide units."""
    sequences = make_sequences(LENGTHS, shape, dtype)
    alone = one_at_a_time(sequences, options)
    for each, found in zip(RUNS, alone, strict=True):
        check(found, sequences, each, options)
    plan = planned(shape, options.window, room=3)
    for shim.order in ORDERS:
        for found in (in_a_graph(sequences, options, plan), attend(sequences, RUNS, options)):
            assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


@pytest.mark.parametrize(("shape", "dtype"), SHAPES[:2], ids=ids)
def test_rows_behind_a_shared_prefix_have_the_bits_of_single_rows(shim: HostBackend, shape: Shape, dtype: torch.dtype) -> None:
    """Three requests with drafts and one without begin with the same 512 tokens, which are read once for all."""
    sequences = make_sequences([700, 530, 519, 600], shape, dtype, 512)
    given = [Range(0, 696, 700), Range(1, 528, 530), Range(2, 518, 519), Range(3, 598, 600)]
    alone = [torch.cat([attend(sequences, [Range(index, at, at + 1)])[0] for at in range(start, stop)]) for index, start, stop in given]
    for shim.order in ORDERS:
        found = attend(sequences, given, shared=512)
        assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


def test_rows_share_tiles_as_far_as_they_have_room() -> None:
    """And a request's keys are read once a tile, not once a row."""
    counts = {group: tiles_of(np.array([4, 1, 5]), group).count.tolist() for group in (1, 2, 4, 8, 16, 40)}
    assert counts[1] == counts[2] == [4, 1, 5] and counts[4] == [4, 1, 4, 1] and counts[8] == [2, 2, 1, 2, 2, 1]
    assert counts[16] == counts[40] == [1] * 10
    for (shape, _), units in zip(SHAPES, (16, 34, 14, 60), strict=True):
        used = planned(shape, 0).narrow.numpy()[:, 1]
        assert used.sum() == units and all(one >= other for one, other in pairwise(used)), "the units without tiles come last"


def test_partial_sums_that_do_not_fit_are_refused() -> None:
    tiles, contexts = tiles_of(np.array([3]), 2), np.array([300, 301, 302])
    assert slot_count(tiles, contexts, 0) == 6
    with pytest.raises(ContractError, match="6 splits do not fit a plan with room for 5"):
        write_plan(np.zeros(word_count(3, 5), dtype=np.int32), 5, contexts, np.zeros(3, dtype=np.int64), 0, tiles)


def forget_the_token_before(plan: StepPlan) -> StepPlan:
    """The first row's limit for the second one: a draft that does not see itself."""
    limits = plan.limits.clone()
    limits[1] = limits[0]
    return plan._replace(limits=limits)


def end_too_early(plan: StepPlan) -> StepPlan:
    """Units that end at the first row's last key."""
    units = plan.narrow.clone()
    units[2, 4] -= 3
    return plan._replace(narrow=units)


@pytest.mark.parametrize("bug", [forget_the_token_before, end_too_early])
def test_planted_faults_of_a_plan_change_bits(shim: HostBackend, bug: object) -> None:
    shape, dtype = SHAPES[0]
    sequences, options = make_sequences(LENGTHS, shape, dtype), Options()
    right, wrong = planned(shape, 0), bug(planned(shape, 0))
    found = [torch.cat(in_a_graph(sequences, options, plan)) for plan in (right, wrong)]
    assert not torch.equal(*found)
