"""A rank is killed at any instruction: the other ranks have equally many correct sums, notice the loss, and do not hang.

exchange_killing.py kills; this file checks the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forking_program import NEEDS_LOCKS, Failed, Program, running

from vnext.runtime.transport.collectives import shared_group

OPERATIONS, KILLS = 4, 6
Killing = Callable[..., list[dict[str, Any]]]
LOST = "rank 1 has ended or left the group before all ranks had met"

pytestmark = NEEDS_LOCKS


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    yield from running("exchange_killing.py", tmp_path_factory)


@pytest.fixture
def killing(program: Program) -> Killing:
    """One account for each kill, of a mode and its arguments; the last victim of a series came to its end."""

    def ran(mode: str, form: str, *arguments: object) -> list[dict[str, Any]]:
        if form != "plain" and shared_group.implementation() != "compiled":
            pytest.skip("the compiled exchange is not built here: no C compiler was found")
        return program(mode, form, *arguments)

    return ran


def assert_survivors_agree(reported: list[dict[str, Any]]) -> None:
    for account in reported:
        first, second = account["ends"]
        assert first == second
        assert first[1], "a sum was wrong"
        assert first[2] in (LOST, "finished")


@pytest.mark.parametrize(("form", "stride"), [("compiled", 7), ("plain", 61)])
def test_a_rank_killed_before_any_opcode(killing: Killing, form: str, stride: int) -> None:
    """One-shot, two-shot, several pieces: survivors have what the victim had published, no more and no less."""
    reported = killing("opcodes", form, stride)
    assert_survivors_agree(reported)
    counts = [account["ends"][0][0] for account in reported]
    assert set(counts) == set(range(OPERATIONS + 1))  # not in order: a victim that waits longer takes more opcodes
    assert reported[-1]["finished"] and reported[-1]["ends"][0][2] == "finished"


@pytest.mark.parametrize("form", ["compiled", "plain"])
def test_a_busy_rank_killed_at_random_moments(killing: Killing, form: str) -> None:
    reported = killing("busy", form, KILLS)
    assert len(reported) == KILLS
    assert_survivors_agree(reported)
    assert {account["ends"][0][2] for account in reported} == {LOST}


def test_a_rank_killed_at_any_change_of_the_memory(killing: Killing) -> None:
    """Between two machine instructions of the compiled form: the sum is there once the victim has ticked, never before."""
    try:
        reported = killing("stepped", "compiled")
    except Failed as failed:
        if "no single steps" in str(failed) or "ended by itself with 3" in str(failed):
            pytest.skip("this sandbox lets no process step through another (ptrace)")
        raise
    assert [account["end"] for account in reported] == ["right" if account["has_ticked"] else LOST for account in reported]
    assert {account["has_ticked"] for account in reported} == {False, True} and len(reported) > 4
    touched = [account["touched"] for account in reported]
    assert touched == sorted(touched) and reported[-1]["finished"]
