"""Ranks add and join tensors over shared memory: the bits of one tree of sums, whoever is late; who leaves is named.

exchange_ranks.py runs the ranks as processes, this file says what must have come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forking_program import NEEDS_LOCKS, Program, running

from vnext.kernels.arrays import dtype_name
from vnext.runtime.processes import futex
from vnext.runtime.transport.collectives import shared_group
from vnext.runtime.transport.collectives.exchange_plain import ADDED
from vnext.runtime.transport.collectives.shared_group import Exchange, ExchangeFile, SharedGroup

Ranks = Callable[..., list[Any]]
FORMS = ["compiled", "plain", "mixed"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    yield from running("exchange_ranks.py", tmp_path_factory)


@pytest.fixture
def ranks(program: Program) -> Ranks:
    """What each rank told, of a mode and its arguments."""

    def ran(mode: str, *arguments: object) -> list[Any]:
        if "plain" not in arguments and shared_group.implementation() != "compiled":
            pytest.skip("the compiled exchange is not built here: no C compiler was found")
        return program(mode, *arguments)

    return ran


DIGESTS: dict[int, str] = {}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("form", "shots", "spin_us"),
    [("compiled", "one", 0), ("compiled", "two", 0), ("compiled", "both", 300), ("plain", "both", 0), ("mixed", "two", 50)],
)
def test_sums_have_the_bits_of_the_tree(ranks: Ranks, world_size: int, form: str, shots: str, spin_us: int) -> None:
    """Odd sizes, all dtypes, several pieces, late ranks; every form and both shots give the same bits."""
    reported = ranks("sums", world_size, form, shots, spin_us)
    assert [rank["wrong"] for rank in reported] == [[]] * world_size
    expected = {"compiled": {"Exchange"}, "plain": {"PlainExchange"}, "mixed": {"Exchange", "PlainExchange"}}
    assert {rank["served"] for rank in reported} == expected[form]
    digests = {rank["digest"] for rank in reported}
    assert digests == {DIGESTS.setdefault(world_size, reported[0]["digest"])}


@pytest.mark.parametrize(("world_size", "form"), [(2, "compiled"), (3, "compiled"), (2, "plain"), (3, "mixed")])
def test_gathers_join_in_rank_order(ranks: Ranks, world_size: int, form: str) -> None:
    for rank in ranks("gathers", world_size, form, 0):
        assert rank["wrong"] == []
        assert rank["strided"] == [[each for each in range(world_size) for _ in range(3)]] * 4


@NEEDS_LOCKS
@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize(("world_size", "form"), [(2, "compiled"), (4, "compiled"), (2, "plain")])
def test_a_rank_that_leaves_is_named(ranks: Ranks, world_size: int, form: str, how: str) -> None:
    *others, last = ranks("leaves", world_size, form, how)
    assert last == ("left" if how == "closed" else -9)
    assert [count for count, _ in others] == [5] * (world_size - 1)
    for _, message in others:  # without a notice: that it did not come within 300 s
        assert message.endswith("has ended or left the group before all ranks had met")
    assert f"rank {world_size - 1} has ended" in others[0][1] + others[-1][1]


@NEEDS_LOCKS
@pytest.mark.parametrize("form", ["compiled", "plain"])
def test_a_rank_that_does_not_come_is_named(ranks: Ranks, form: str) -> None:
    first, second = ranks("late", form)
    assert first.startswith("rank 1 did not come within")
    assert second.startswith("rank 0 has ended or left")


@pytest.mark.parametrize("form", FORMS)
def test_ranks_out_of_step_are_named(ranks: Ranks, form: str) -> None:
    """Each of the two says so, and the group can go on."""
    first, second = ranks("out_of_step", form)
    assert first[0] == "the ranks are out of step: rank 0 came with 12 bytes of kind 0, rank 1 with 16 of kind 0"
    assert second[0] == "the ranks are out of step: rank 1 came with 16 bytes of kind 0, rank 0 with 12 of kind 0"
    assert "6 bytes of kind 2, rank 1 with 6 of kind 1" in first[1]
    assert "12 bytes of kind 0, rank 1 with 12 of kind 3" in first[2]
    assert first[3] == second[3] == [2.0, 2.0]


# ---- one rank: nothing of it needs another process -----------------------------------------------------------------


@pytest.fixture(params=["compiled", "plain"])
def alone(request: pytest.FixtureRequest) -> Any:
    """A group of one rank, as each form serves it."""
    if request.param == "compiled" and shared_group.implementation() != "compiled":
        pytest.skip("the compiled exchange is not built here: no C compiler was found")
    file = ExchangeFile(1, 2**20, 2**20)
    group = SharedGroup(Exchange(file.name, 0, None if request.param == "compiled" else futex.choose_wait_method()), 0)
    file.unlink()
    yield group
    group.close()


def test_every_half_is_widened_and_narrowed_as_torch_does(alone: SharedGroup) -> None:
    """All 65,536 patterns of each 16-bit type through float32 and back; a NaN may be another NaN."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = patterns.view(dtype)
        found = alone.all_reduce(values.clone())
        is_number = ~values.isnan()
        assert torch.equal(found.view(torch.int16)[is_number], patterns[is_number])
        assert found[~is_number].isnan().all() and (~is_number).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["compiled", "plain"])
def test_sums_round_at_the_edges_as_torch_does(form: str, dtype: torch.dtype) -> None:
    """Ties, the largest finite numbers, subnormal ones, zeros of both signs, infinities: every pair of them is added."""
    if form == "compiled" and shared_group.implementation() != "compiled":
        pytest.skip("the compiled exchange is not built here: no C compiler was found")
    limits = torch.finfo(dtype)
    one_up = 1 + limits.eps
    edges = [0.0, 1.0, one_up, one_up + limits.eps, limits.eps / 2, limits.max, limits.max * limits.eps / 4, limits.tiny,
             limits.smallest_normal * limits.eps, 3 * limits.tiny * limits.eps, 65504.0, 16.0, 15.99, 1e-7, torch.inf]  # fmt: skip
    signed = torch.tensor([*edges, *(-edge for edge in edges)], dtype=torch.float64).to(dtype)
    pairs = torch.cartesian_prod(signed, signed)
    file = ExchangeFile(2, 2**16, 2**16)
    exchanges = [Exchange(file.name, rank, None if form == "compiled" else futex.choose_wait_method()) for rank in (0, 1)]
    file.unlink()
    parts, kind = [pairs[:, 0].clone(), pairs[:, 1].clone()], ADDED.index(dtype_name(dtype))
    for exchange, part in zip(exchanges, parts):
        exchange.memory.enter(1, 1, kind, part.data_ptr(), part.nbytes)
    found = torch.empty_like(parts[0])
    exchanges[0].memory.add(1, kind, 0, found.numel(), found.data_ptr())
    expected = (parts[0].float() + parts[1].float()).to(dtype)
    is_number = ~expected.isnan()
    assert torch.equal(found[is_number].view(torch.uint8), expected[is_number].view(torch.uint8))
    assert found[~is_number].isnan().all() and (~is_number).any()
    for exchange in exchanges:
        exchange.close()


def test_other_types_are_refused(alone: SharedGroup) -> None:
    with pytest.raises(TypeError, match="int64 is not added over ranks; there are: float32, bfloat16"):
        alone.all_reduce(torch.ones(2, dtype=torch.int64))


def test_a_closed_group_refuses(alone: SharedGroup) -> None:
    alone.close()
    alone.close()
    with pytest.raises(ValueError, match="memory was released"):
        alone.all_reduce(torch.ones(2))


def test_a_strided_tensor_is_left_alone(alone: SharedGroup) -> None:
    given = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(alone.all_reduce(given), given)
