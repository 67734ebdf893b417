"""A crash after every event of some stories (scripts/crash_stories.py takes as many as it is given), and that one would be noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from scripts.crash_stories import Forks
from vnext.sched.sim.checks.errors import Divergence
from vnext.sched.sim.crashes import KINDS, Branching, CrashFailed, Crashing, Ran, Story, crash_everywhere, require_alike
from vnext.sched.sim.scenario_draw import scenario
from vnext.sched.sim.simulator import Simulation
from vnext.sched.sim.streams import Streams
from vnext.sched.sim.toy import Answer
from vnext.state import reduce as reducer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(20_000, 20_048))
def test_a_crash_after_every_event_changes_no_answer(seed: int) -> None:
    found = crash_everywhere(seed, clients=2)
    assert sum(found.crashes) <= found.events


@pytest.mark.parametrize(("seed", "few"), [(20_014, 0), (20_018, 4)])
def test_copies_crash_as_stories_do_from_their_beginning(seed: int, few: int) -> None:
    again, copied = crash_everywhere(seed, 2), crash_everywhere(seed, 2, Forks(), few)
    assert (copied.events, copied.crashes) == (again.events, again.crashes) and sum(again.crashes) > 4
    assert copied.folded < again.folded


def test_a_failure_of_a_copy_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "_resume", lambda simulation, number: None)
    with pytest.raises(CrashFailed, match="are forgotten") as failure:
        for seed in range(20_000, 20_048):
            crash_everywhere(seed, 2, Forks(), few=0)
    assert failure.value.simulation.deaths
    monkeypatch.setattr(Story, "crashed", lambda story, after: Ran())
    with pytest.raises(Divergence, match="in a copy after event .*, and not from its beginning: Divergence: .*are forgotten"):
        crash_everywhere(seed, 2, Forks(), few=0)


def test_a_copy_that_ends_in_another_way_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branching, "_die", lambda simulation: os._exit(7))
    with pytest.raises(Divergence, match="the copy ended with status 7"):
        crash_everywhere(20_018, 2, Forks(), few=0)


def test_each_kind_of_crash_happens_after_each_event() -> None:
    """Of one story: deaths are counted where they are due, and the engine is another one, or its ranks are."""
    drawn = scenario(20_001, 3)
    drawn = replace(drawn, faults=replace(drawn.faults, deaths=0))
    calm = Simulation(drawn)
    calm.run_and_require_all()
    last = calm.event_count
    assert last > 8
    for kind in KINDS:
        for after in (1, last // 2, last):
            crashing = Crashing(drawn, after, kind)
            core, ranks = crashing.core, crashing.fleet.ranks
            crashing.run_and_require_all()
            assert 1 <= crashing.deaths <= kind.times and (crashing.deaths == kind.times or after >= last - 1)
            assert (crashing.core is not core) == kind.is_core and crashing.fleet.ranks is not ranks


def test_a_client_that_loses_a_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on behind one token fewer than the client has been told, and tells it that one again."""
    right = Streams.lose_engine

    def lose_engine(streams, entries, rng):
        right(streams, entries, rng)
        for tokens in streams.waiting.values():
            tokens[-1:] = [9] if tokens else []

    monkeypatch.setattr(Streams, "lose_engine", lose_engine)
    with pytest.raises(CrashFailed, match="was answered"):
        for seed in range(20_000, 20_048):
            crash_everywhere(seed, clients=2)


def test_a_request_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "_resume", lambda simulation, number: None)
    with pytest.raises(CrashFailed, match="are forgotten"):
        for seed in range(20_000, 20_048):
            crash_everywhere(seed, clients=2)


def test_ranks_that_keep_their_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reducer._fold_engine_recovered
    monkeypatch.setattr(reducer, "_fold_engine_recovered", lambda state, event: replace(right(state, event), slots=state.slots))
    with pytest.raises(CrashFailed, match="C1"):
        for seed in range(20_000, 20_100):
            crash_everywhere(seed, clients=2)


def test_answers_are_compared_as_far_as_both_have_them() -> None:
    whole, cut = Answer((1, 2, 3), "stop"), Answer((1, 2), "abort")
    require_alike({0: whole, 1: cut}, {0: whole, 1: Answer((1, 2, 3), "abort")})
    for right, got in ((whole, Answer((1, 2, 4), "stop")), (whole, Answer((1, 2), "stop")), (cut, Answer((1, 3), "abort"))):
        with pytest.raises(Divergence, match="C5"):
            require_alike({0: right}, {0: got})
    with pytest.raises(Divergence, match="one side only"):
        require_alike({0: whole}, {})


def test_the_script_says_what_it_did(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/crash_stories.py", "--stories", "3", "--record", str(tmp_path / "record.json")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["stories"] == 3 and record["failures"] == 0
    assert f"{sum(record['crashes'].values())} crashes in 3 stories" in ran.stdout
