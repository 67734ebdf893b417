"""Groups of 16 splits on the host shim: contexts of more than 4,096 tokens, in narrow caches, behind shared prefixes and in graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attention_steps import Options, Range, Sequences, Shape, attend, check, in_codes, in_fp8, make_sequences
from host_shim import ORDERS, HostBackend

from vnext.kernels.calls import AttentionCall
from vnext.kernels.cuda import attention
from vnext.kernels.cuda.decode_plan import slot_count, tiles_of, view_plan, word_count, write_plan
from vnext.kernels.cuda.plan import GROUP_SPLITS, StepPlan

SHAPE = Shape(4, 2, 16, 16)
RUNS = [Range(0, 8188, 8197), Range(1, 4090, 4100)]
"""Both cross the end of a group, so that their first rows see none of the last one's keys."""


@pytest.mark.parametrize("narrowed", [in_codes, in_fp8])
def test_narrow_caches(shim: HostBackend, narrowed: Callable[[Sequences], tuple[Sequences, Sequences]]) -> None:
    """As if they held what they stand for, walked by one unit, cut into groups and into splits; and as a decode."""
    kept, exact = narrowed(make_sequences([8240], Shape(2, 1, 16, 16), torch.bfloat16))
    given = [Range(0, 8205, 8240), Range(0, 4096, 4097)]
    expected = attend(exact, given)
    for units_wanted, shim.order in zip((0, 2, 100), ORDERS[1:], strict=True):
        for found, one in zip(attend(kept, given, units_wanted=units_wanted), expected, strict=True):
            assert torch.equal(found, one)
    assert torch.equal(attend(kept, [Range(0, 8239, 8240)])[0], expected[0][-1:])


def test_a_shared_prefix_that_ends_within_a_group(shim: HostBackend) -> None:
    lengths = [4700, 4500, 4600]
    sequences = make_sequences(lengths, SHAPE, torch.bfloat16, 4352)
    given = [*(Range(index, length - 1, length) for index, length in enumerate(lengths)), Range(1, 4440, 4475)]
    alone = [attend(sequences, [one])[0] for one in given]
    for units_wanted, shim.order in ((0, ORDERS[0]), (50, ORDERS[3])):
        together = attend(sequences, given, shared=4352, units_wanted=units_wanted)
        for found, expected, one in zip(together, alone, given, strict=True):
            check(found, sequences, one)
            assert torch.equal(found, expected), one


def in_a_graph(sequences: Sequences, window: int, change: Callable[[StepPlan], StepPlan] = lambda plan: plan) -> torch.Tensor:
    """RUNS by a plan of fixed shape."""
    counts = np.array([stop - start for _, start, stop in RUNS])
    contexts = np.concatenate([np.arange(start, stop) + 1 for _, start, stop in RUNS])
    tiles = tiles_of(counts, SHAPE.heads // SHAPE.kv_heads)
    units = slot_count(tiles, contexts, window) + 3
    flat = np.full(word_count(len(contexts), units), 12345, dtype=np.int32)
    write_plan(flat, units, contexts, np.repeat(np.arange(len(RUNS)), counts), window, tiles)
    table = np.zeros((len(RUNS), max(map(len, sequences.blocks))), dtype=np.int32)
    for row, (index, _, _) in enumerate(RUNS):
        table[row, : len(sequences.blocks[index])] = sequences.blocks[index]
    query = torch.cat([sequences.query[index][start:stop] for index, start, stop in RUNS])
    plan = change(view_plan(torch.from_numpy(flat), len(contexts), units))
    return attention.paged_attention(query, torch.from_numpy(table), AttentionCall(*sequences.caches, plan, 0.25, window))


def count_from_the_first_split(plan: StepPlan) -> StepPlan:
    """A planted fault: the first group is a whole one wherever the window begins."""
    merges = plan.merges.clone()
    merges[:, 3] = GROUP_SPLITS
    return plan._replace(merges=merges)


@pytest.mark.parametrize("window", [0, 4200, 5000])
def test_rows_of_a_graph(shim: HostBackend, window: int) -> None:
    """Tiles of several rows, with windows that begin within a group, have the bits of single rows and of chunks."""
    sequences, options = make_sequences([8240, 4110], SHAPE, torch.float32), Options(window)
    expected = in_a_graph(sequences, window)
    for one, found in zip(RUNS, expected.split([stop - start for _, start, stop in RUNS]), strict=True):
        check(found, sequences, one, options)
    single = [attend(sequences, [Range(0, at, at + 1)], options)[0] for at in (8188, 8191, 8192, 8196)]
    assert torch.equal(torch.cat(single), expected[[0, 3, 4, 8]])
    for units_wanted, shim.order in zip((0, 4, 60), ORDERS[1:], strict=True):
        chunks = attend(sequences, [Range(0, 8170, 8215), Range(1, 4070, 4110)], options, units_wanted=units_wanted)
        assert torch.equal(torch.cat((chunks[0][18:27], chunks[1][20:30])), expected)
    if window:
        assert not torch.equal(in_a_graph(sequences, window, count_from_the_first_split), expected)
