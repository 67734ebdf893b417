"""A rank killed at whatever instruction: the others have right sums, equally many, and are told; nobody hangs.

exchange_killing.py kills, this file says what must have come of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vnext.runtime import exchange_memory, futex

ROOT = Path(__file__).parents[2]
OPERATIONS = 4
LOST = "rank 1 has ended or left the group before all ranks had met"

pytestmark = pytest.mark.skipif(
    not isinstance(futex.choose_wait_method(), futex.Futex), reason="deaths are noticed by locks that only Linux has"
)


def run_killing(*arguments: object) -> subprocess.CompletedProcess[str]:
    if "plain" not in arguments and exchange_memory.implementation() != "compiled":
        pytest.skip("the compiled exchange is not built here: no C compiler was found")
    command = [sys.executable, str(Path(__file__).with_name("exchange_killing.py")), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def accounts(ran: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """One for each kill; the last victim of a series came to its end."""
    assert (ran.returncode, ran.stderr) == (0, "")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def assert_survivors_agree(told: list[dict[str, Any]]) -> None:
    for account in told:
        first, second = account["ends"]
        assert first == second and account["orderly"] == [True, True]
        assert first[1], "a sum was wrong"
        assert first[2] in (LOST, "finished")


@pytest.mark.parametrize(("form", "stride"), [("compiled", 7), ("plain", 61)])
def test_a_rank_killed_before_any_opcode(form: str, stride: int) -> None:
    """One-shot, two-shot, several pieces: survivors have what the victim had published, no more and no less."""
    told = accounts(run_killing("opcodes", form, stride))
    assert_survivors_agree(told)
    counts = [account["ends"][0][0] for account in told]
    assert set(counts) == set(range(OPERATIONS + 1))  # not in order: a victim that waits longer takes more opcodes
    assert told[-1]["finished"] and told[-1]["ends"][0][2] == "finished"


@pytest.mark.parametrize("form", ["compiled", "plain"])
def test_a_busy_rank_killed_at_random_moments(form: str) -> None:
    told = accounts(run_killing("busy", form, 1.0))
    assert len(told) > 3
    assert_survivors_agree(told)
    assert {account["ends"][0][2] for account in told} == {LOST}


def test_a_rank_killed_at_any_change_of_the_memory() -> None:
    """Between two machine instructions of the compiled form: the sum is there once the victim has ticked, never before."""
    ran = run_killing("stepped", "compiled")
    if "no single steps" in ran.stderr or "ended by itself with 3" in ran.stderr:
        pytest.skip("this sandbox lets no process step through another (ptrace)")
    told = accounts(ran)
    assert [account["end"] for account in told] == ["right" if account["has_ticked"] else LOST for account in told]
    assert {account["has_ticked"] for account in told} == {False, True} and len(told) > 4
    touched = [account["touched"] for account in told]
    assert touched == sorted(touched) and told[-1]["finished"]
