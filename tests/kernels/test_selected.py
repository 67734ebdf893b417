"""Attention to chosen keys: against dense float64 with the keys it should choose, and bit for bit against itself, asked in other ways."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from cpu_levels import LEVELS, needs_native, using

from vnext.kernels import paged_attention as plain, selected
from vnext.kernels.calls import AttentionCall, AttentionStep, Selection
from vnext.kernels.contracts import ContractError
from vnext.kernels.cpu import attention
from vnext.kernels.cpu.native import Level
from vnext.kernels.selected import Queries
from vnext.kernels.table import choose

COUNT, HEADS, WIDTH, BLOCK = 20, 3, 32, 5
LENGTHS = [70, 1, 20, 21, 150]


class Case(NamedTuple):
    """Sequences of LENGTHS: by token, their queries, rows and index keys, in the scattered blocks of two caches."""

    query: list[torch.Tensor]
    asking: list[torch.Tensor]
    weights: list[torch.Tensor]
    blocks: list[list[int]]
    cache: torch.Tensor
    index: torch.Tensor
    sinks: torch.Tensor | None = None


def make_case(dtype: torch.dtype, heads: int = 5, width: int = 8) -> Case:
    """Blocks of no sequence are poisoned, and lie apart, as those of other layers are between them."""
    generator = torch.Generator().manual_seed(4)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    counts = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    pages = torch.full((sum(counts) + 2, BLOCK * (WIDTH + width)), float("nan"), dtype=dtype)
    cache, index = pages[:, : BLOCK * WIDTH].view(-1, 1, BLOCK, WIDTH), pages[:, BLOCK * WIDTH :].view(-1, 1, BLOCK, width)
    for length, own in zip(LENGTHS, blocks):
        for at in range(length):
            cache[own[at // BLOCK], 0, at % BLOCK] = draw(WIDTH)
            index[own[at // BLOCK], 0, at % BLOCK] = draw(width)
    weights = [draw(length, heads).float() for length in LENGTHS]
    return Case([draw(each, HEADS, WIDTH) for each in LENGTHS], [draw(each, heads, width) for each in LENGTHS], weights, blocks, cache, index)


def attend(case: Case, ranges: list[tuple[int, int, int]], found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """One step: for each (sequence, start, stop) the result of its queries [start, stop) after stop tokens."""
    poisoned = min({*range(len(case.cache))}.difference(*case.blocks))  # what a fault may read behind a sequence
    table = np.full((len(ranges), max(map(len, case.blocks)) + 1), poisoned, dtype=np.int32)
    for row, (index, _, _) in enumerate(ranges):
        table[row, : len(case.blocks[index])] = case.blocks[index]
    starts = np.cumsum([0] + [stop - start for _, start, stop in ranges]).astype(np.int32)
    lengths = np.array([stop for _, _, stop in ranges], dtype=np.int32)
    metadata = choose("attention_metadata", "cpu")(AttentionStep(starts, lengths, torch.from_numpy(table), BLOCK, 1))
    query, asking, weights = (
        torch.cat([tensors[index][start:stop] for index, start, stop in ranges]) for tensors in (case.query, case.asking, case.weights)
    )
    selection = Selection(asking, weights, case.index, COUNT, [] if found is None else found)
    call = AttentionCall(case.cache, case.cache, metadata, WIDTH**-0.5, sinks=case.sinks, selection=selection)
    return list(choose("paged_attention", "cpu")(query, call).split([stop - start for _, start, stop in ranges]))


def kept(case: Case, cache: torch.Tensor, index: int) -> torch.Tensor:
    """What a sequence keeps in a cache, [L, D]."""
    return cache[case.blocks[index], 0].flatten(0, 1)[: LENGTHS[index]].double()


def expected(case: Case, index: int) -> torch.Tensor:
    """In float64: the scores as the paper has them, the best COUNT of those that a query may see, and plain attention to them."""
    scores = torch.einsum("qhi,ki->qhk", case.asking[index].double(), kept(case, case.index, index)).relu()
    scores = (scores * case.weights[index].double()[:, :, None]).sum(1)
    unseen = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    ranks = scores.masked_fill(unseen, float("-inf")).argsort(dim=1, descending=True, stable=True).argsort(1)
    rows = kept(case, case.cache, index)
    seen = torch.einsum("qhd,kd->qhk", case.query[index].double(), rows) * WIDTH**-0.5
    seen = seen.masked_fill((unseen | (ranks >= COUNT))[:, None], float("-inf"))
    sinks = torch.full((HEADS,), float("-inf")) if case.sinks is None else case.sinks
    shares = torch.cat((seen, sinks.double()[:, None].expand(len(seen), -1, 1)), 2).softmax(-1)[:, :, :-1]
    return torch.einsum("qhk,kd->qhd", shares, rows)


def whole() -> list[tuple[int, int, int]]:
    return [(index, 0, length) for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("sinks", [None, torch.tensor([-0.5, 0.5, 2.0])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_sees_the_keys_with_the_best_scores(dtype: torch.dtype, sinks: torch.Tensor | None) -> None:
    case = make_case(dtype)._replace(sinks=sinks)
    for index, found in enumerate(attend(case, whole())):
        torch.testing.assert_close(found.double(), expected(case, index), rtol=0, atol=2e-6 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_token_do_not_depend_on_its_chunk_or_batch(dtype: torch.dtype) -> None:
    case = make_case(dtype)
    together = attend(case, whole())
    for index, length in enumerate(LENGTHS):
        for size in (1, 7, 64):
            parts = [attend(case, [(index, at, min(length, at + size))])[0] for at in range(0, length, size)]
            assert torch.equal(torch.cat(parts), together[index])
    mixed = attend(case, [(4, 149, 150), (0, 15, 40), (3, 20, 21), (2, 0, 20)])
    for (index, first, last), found in zip(((4, 149, 150), (0, 15, 40), (3, 20, 21), (2, 0, 20)), mixed):
        assert torch.equal(found, together[index][first:last])


def test_plain_attention_chooses_as_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(torch.float32)
    of_kernels = attend(case, whole())
    monkeypatch.setattr(f"{__name__}.choose", lambda operation, device: getattr(plain, operation))
    for one, other in zip(attend(case, whole()), of_kernels):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_layers_without_an_index_see_what_the_last_one_chose() -> None:
    case = make_case(torch.float32)
    found: list[torch.Tensor] = []
    first = attend(case, whole(), found)
    other = case._replace(asking=[-each for each in case.asking])
    assert not torch.equal(torch.cat(attend(other, whole())), torch.cat(first))
    assert len(found) == 1 and torch.equal(torch.cat(attend(other, whole(), found)), torch.cat(first))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, width, limits", [(1, 2, [21, 300]), (16, 64, [128, 129]), (37, 8, [60]), (64, 128, [500])])
def test_each_level_chooses_what_the_plain_form_does(
    level: Level, dtype: torch.dtype, heads: int, width: int, limits: list[int]
) -> None:
    """With a head of two numbers many scores are 0: of equal ones the first keys are chosen."""
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn((200, 1, 3, width), generator=generator).to(dtype)
    table = torch.stack([torch.randperm(200, generator=generator) for _ in limits]).int()
    query, weights = torch.randn((len(limits), heads, width), generator=generator), torch.randn((len(limits), heads), generator=generator)
    selection = Selection(query.to(dtype), weights, cache, COUNT, [])
    queries = Queries(selection.query, weights, np.arange(len(limits)), np.array(limits))
    with using(level):
        assert torch.equal(attention.choose_keys(queries, selection, table), selected.chosen_keys(queries, selection, table))


def test_a_selection_that_does_not_fit_is_refused() -> None:
    case = make_case(torch.float32)
    with pytest.raises(ContractError, match="selection.cache"):
        attend(case._replace(index=case.index[:-1]), whole())
    with pytest.raises(ContractError, match="selection.query"):
        attend(case._replace(asking=[each[:1] for each in case.asking]), whole())
