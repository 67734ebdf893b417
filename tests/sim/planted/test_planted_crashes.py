"""Recoveries that are wrong: crash stories find each, in copies and from the beginning, at the same place of the same story."""

from __future__ import annotations

from itertools import islice

import pytest

from planted_recovery_bugs import CRASH_BUGS, RECOVERY_BUGS
from planting import Bug, blank_arenas, is_found_by, plain_columns, planted, without_twins
from seen_before import SeenBefore
from tests.sim.crashes import LONG_SEEDS, CrashFailed, crash_everywhere

STORIES_MAX = 300
NEITHER = 2**30
"""What stands where an arena was never written: neither a token nor a block."""
ELSEWHERE = ("a request that has ended is resumed", "a steady turn knows no caution")
"""Found where nothing crashes, and in turns, which short stories hardly have: test_planted.py has both."""
RECOVERIES = [*CRASH_BUGS, *(bug for bug in RECOVERY_BUGS if bug.name not in ELSEWHERE)]


@pytest.mark.parametrize("bug", RECOVERIES, ids=lambda bug: bug.name)
def test_a_wrong_recovery_is_found(bug: Bug, pytestconfig: pytest.Config) -> None:
    seen = SeenBefore(pytestconfig.getoption("--rewrite"))
    with plain_columns(), blank_arenas(NEITHER), planted(bug), without_twins():
        short = (seed for seed in seen.seeds("crash", bug.name) if seed % LONG_SEEDS)
        for seed in islice(short, STORIES_MAX):
            if (copied := failure_of(seed, False)) is not None:
                break
        assert copied is not None, f"{STORIES_MAX} stories and nobody noticed"
        seen.keep("crash", bug.name, seed)
        plain = failure_of(seed, True)
    assert is_found_by(copied.error, bug.found_by), f"seed {seed} failed otherwise: {copied.error!r}"
    assert str(copied) == str(plain)


def failure_of(seed: int, from_the_beginning: bool) -> CrashFailed | None:
    try:
        crash_everywhere(seed, 2, from_the_beginning)
    except CrashFailed as failure:
        return failure
    return None
