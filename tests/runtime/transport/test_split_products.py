"""Products whose sums travel beside the work, over TCP on loopback: the bits of the whole, one choice on all ranks, lost ranks named."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.run.ports import held_port
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.shards import SHARDS_MAX
from vnext.models.layers.layers import Attention, GatedMlp, Linear, operations, row
from vnext.models.layers.sharding import Parallel, alone
from vnext.runtime.transport.collectives import split_products
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.collectives.gloo_group import GlooGroup, group_of_hosts
from vnext.runtime.transport.collectives.split_products import NEVER, ROWS, measured

INPUTS, OUT, RANKS = 8 * 32, 96, 2
DTYPES = [torch.float32, torch.bfloat16]


def on_ranks(work: Callable[[Parallel, GlooGroup], Any]) -> list[Any]:
    """`work` of ranks that meet as those of several hosts do; they are threads, and gloo knows no difference."""
    store = f"127.0.0.1:{held_port()}"

    def run(rank: int) -> Any:
        group = group_of_hosts(store, "127.0.0.1", rank, RANKS)
        given = {"all_reduce": group.all_reduce, "all_gather": group.all_gather, "begin_all_reduce": group.begin_all_reduce}
        try:
            return work(Parallel(rank=rank, world_size=RANKS, beside_bytes_min=group.beside_bytes_min, **given), group)
        finally:
            group.close()

    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(run, range(RANKS)))


def product(parallel: Parallel, rows: int, dtype: torch.dtype, bias: bool = False) -> torch.Tensor:
    """This rank's row-parallel product of values that are the same in every call."""
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, INPUTS, generator=random).to(dtype) for size in (rows, OUT))
    mine = slice(parallel.rank * INPUTS // parallel.world_size, (parallel.rank + 1) * INPUTS // parallel.world_size)
    packed = operations("cpu").pack_weight(weight[:, mine].contiguous(), PLAIN, SHARDS_MAX // parallel.world_size)
    linear = Linear(packed, weight[:, 0].contiguous() if bias else None)
    return row(x[:, mine].contiguous(), linear, split_products.step_of(parallel))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_split_product_has_the_bits_of_the_whole_and_of_one_rank(dtype: torch.dtype) -> None:
    begun: list[int] = []

    def counted(parallel: Parallel) -> Parallel:
        def begin(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            begun.append(tensor.shape[0])
            return parallel.begin_all_reduce(tensor)

        return replace(parallel, begin_all_reduce=begin, beside_rows_min={(OUT, INPUTS // RANKS): 0})

    def every(parallel: Parallel) -> list[torch.Tensor]:
        return [product(parallel, rows, dtype, bias) for rows in (65, 128, 200) for bias in (False, True)]

    one = every(alone())
    for whole, split in on_ranks(lambda parallel, _: (every(parallel), every(counted(parallel)))):
        assert all(map(torch.equal, whole, one)) and all(map(torch.equal, split, one))
    assert sorted(begun) == sorted(RANKS * 2 * [64, 1, 64, 64, 128, 72])


def tree_of(inputs: tuple[int, ...]) -> tuple[Any, ...]:
    """Parameters of a layer whose row-parallel products have these inputs."""
    output, down = (Linear(torch.ones(OUT, each), None) for each in inputs)
    return ((Attention(output, output), GatedMlp(output, down)), torch.ones(2))


def test_every_rank_takes_the_choice_of_rank_0_and_those_that_follow_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 measures the opposite of what rank 0 does: each alone would choose otherwise, and one would wait for ever. Only a
    shape of which nothing is known is measured later."""
    asked: list[tuple[int, int, int]] = []

    def ratio(linear: Linear, rows: int, dtype: torch.dtype, parallel: Parallel) -> float:
        asked.append((parallel.rank, linear.weight.shape[1], rows))
        pays = linear.weight.shape[1] > 32 or (linear.weight.shape[1] == 32 and rows == max(ROWS))
        return 0.5 if pays == (parallel.rank == 0) else 1.5

    monkeypatch.setattr(split_products, "ratio", ratio)
    expected = {16: NEVER, 32: 512, 64: 128}
    params = (tree_of((16, 32)), tree_of((32, 64)))
    for parallel in on_ranks(lambda each, _: measured(params, torch.float32, each, tmp_path / f"of {each.rank}")):
        assert parallel.beside_rows_min == {(OUT, each): rows_min for each, rows_min in expected.items()}
    assert {rows for _, inputs, rows in asked if inputs == 16} == {512}, "nothing is measured below what does not pay"
    asked.clear()
    (tmp_path / "of 1").write_text("is not read")
    for parallel in on_ranks(lambda each, _: measured((params, tree_of((48, 64))), torch.float32, each, tmp_path / f"of {each.rank}")):
        assert parallel.beside_rows_min == {(OUT, each): rows_min for each, rows_min in (expected | {48: 128}).items()}
    assert {inputs for _, inputs, _ in asked} == {48}


def test_a_measured_choice_serves_and_inexact_ranks_have_none(tmp_path: Path) -> None:
    def work(parallel: Parallel, _: GlooGroup) -> tuple[Parallel, torch.Tensor]:
        found = measured(tree_of((INPUTS // RANKS, 16)), torch.float32, parallel, tmp_path / "splits")
        inexact = replace(parallel, is_exact=False)
        assert measured(tree_of((16, 32)), torch.float32, inexact, tmp_path / "none").beside_rows_min == {}
        return found, product(found, 200, torch.float32)

    (first, one), (second, other) = on_ranks(work)
    assert first.beside_rows_min == second.beside_rows_min and set(first.beside_rows_min) == {(OUT, INPUTS // RANKS), (OUT, 16)}
    assert torch.equal(one, other) and torch.equal(one, product(alone(), 200, torch.float32))


def test_what_was_not_measured_is_not_split_over_gloo() -> None:
    def begins(parallel: Parallel, _: GlooGroup) -> tuple[bool, ...]:
        measured_ones = replace(parallel, beside_rows_min={(8, 4): 100})
        return parallel.goes_beside((8, 4), 512, 2**40), *(measured_ones.goes_beside((8, 4), rows, 1) for rows in (99, 100))

    assert on_ranks(begins) == [(False, False, True)] * RANKS


def test_the_end_of_a_sum_names_a_lost_rank() -> None:
    def work(parallel: Parallel, group: GlooGroup) -> str:
        parallel.all_reduce(torch.ones(3))
        if parallel.rank == 1:
            return ""
        end = parallel.begin_all_reduce(torch.ones(2**20))
        with pytest.raises(RankLost) as lost:
            end()
        return str(lost.value)

    assert "another rank has ended" in on_ranks(work)[0]


def test_the_choice_in_words() -> None:
    assert split_products.describe({(576, 288): NEVER, (576, 768): 128}) == "of [576, 768] from 128 rows on"
    assert split_products.describe({(576, 288): NEVER}) == "none, since none was faster so"
