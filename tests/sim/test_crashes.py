"""A crash after every event of some stories (scripts/crash_stories.py takes as many as it is given), in copies as from the beginning.

That a wrong recovery is noticed: planted/test_planted_crashes.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.sim import copying
from tests.sim.copying import copy_of
from tests.sim.crashes import (
    KINDS,
    Branching,
    CrashFailed,
    Crashing,
    Ran,
    Story,
    crash_everywhere,
    require_alike,
    story_of,
)
from tests.sim.scenario_draw import scenario
from tests.sim.seeds import Form
from tests.sim.simulator import Simulation
from tests.sim.streams import Streams
from tests.sim.tier import SimTier
from vnext.sim.checks.accounting import Accounting
from vnext.sim.checks.plain_state import Divergence
from vnext.sim.rank import Rank
from vnext.sim.rng import Rng
from vnext.sim.toy import Answer
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent, LawBroken

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(20_000, 20_048))
def test_a_crash_after_every_event_changes_no_answer(seed: int) -> None:
    found = crash_everywhere(seed, clients=2)
    assert sum(found.crashes) <= found.events


@pytest.mark.parametrize("seed", [20_000, 20_001, 20_006, 20_010, 20_012, 20_015, 20_021])
def test_copies_crash_as_stories_do_from_their_beginning(seed: int) -> None:
    """A disk, drafts, weights, adapters, pins, constraints and 70,000 tokens among them: the same events, state and answers."""
    drawn = story_of(seed, 2)
    drawn = replace(drawn, faults=replace(drawn.faults, logged=False))
    with Form(seed):
        branching = Branching(drawn, seed)
        branching.run_and_require_all()
        story = Story(seed, 2, drawn, branching.outcome().answers)
        plain = [story.crashed(after) for after in range(1, branching.places + 1)]
    assert [replace(story.judged(end), folded=end.events) for end in branching.ended] == plain and len(plain) > 4
    assert sum(end.folded for end in branching.ended) < sum(end.folded for end in plain)


def test_an_undisturbed_story_ends_as_without_copies() -> None:
    drawn = story_of(20_000, 2)
    branching, calm = Branching(drawn, 20_000), Simulation(drawn)
    branching.run_and_require_all(), calm.run_and_require_all()
    assert branching.events == calm.events and branching.outcome().answers == calm.outcome().answers
    assert digest(branching.state) == digest(calm.state) and branching.now_us == calm.now_us


@pytest.mark.parametrize("shared", [Rng, Streams, Accounting, Rank, SimTier])
def test_a_copy_that_shares_what_it_may_not_is_noticed(shared: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the state that the copies have wrought, the story itself or another copy goes another way than from the beginning."""
    monkeypatch.setattr(copying, "VALUES", copying.VALUES | {shared})
    with pytest.raises((Divergence, LawBroken, IllegalEvent, AssertionError, KeyError, IndexError)):
        for seed in range(20_000, 20_048):
            test_copies_crash_as_stories_do_from_their_beginning(seed)


def test_what_nobody_knows_is_not_copied() -> None:
    for faults in (story_of(seed, 2).faults for seed in range(20_000, 20_048)):
        if faults.logged:
            break
    started = Simulation(replace(story_of(20_000, 2), faults=faults))
    with pytest.raises(TypeError, match="holds a Tape cannot be copied"):
        copy_of(started)
    started.fleet._tapes = None
    assert copy_of(started).rng is not started.rng
    started.rng = object()
    with pytest.raises(TypeError, match="holds a object"):
        copy_of(started)


def test_a_failure_of_a_copy_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "_resume", lambda simulation, number: None)
    with pytest.raises(CrashFailed, match="are forgotten") as failure:
        for seed in range(20_000, 20_048):
            crash_everywhere(seed, 2)
    assert failure.value.simulation.deaths
    monkeypatch.setattr(Story, "crashed", lambda story, after: Ran())
    with pytest.raises(Divergence, match="in a copy after event .*, and not from its beginning") as failure:
        for seed in range(20_000, 20_048):
            crash_everywhere(seed, 2)
    assert "are forgotten" in str(failure.value.__cause__)


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


def test_answers_are_compared_as_far_as_both_have_them() -> None:
    whole, cut = Answer((1, 2, 3), "stop"), Answer((1, 2), "abort")
    require_alike({0: whole, 1: cut}, {0: whole, 1: Answer((1, 2, 3), "abort")})
    for right, got in ((whole, Answer((1, 2, 4), "stop")), (whole, Answer((1, 2), "stop")), (cut, Answer((1, 3), "abort"))):
        with pytest.raises(Divergence, match="C5"):
            require_alike({0: right}, {0: got})
    with pytest.raises(Divergence, match="one side only"):
        require_alike({0: whole}, {})


def test_the_script_says_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for stories, more in (("2", ()), ("3", ("--continue",))):
        command = [sys.executable, "scripts/crash_stories.py", "--first-seed", "1", "--stories", stories, "--record", str(path)]
        ran = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr
        record = json.loads(path.read_text())
        assert record["stories"] == int(stories) and record["failures"] == 0
        assert f"{sum(record['crashes'].values())} crashes in {stories} stories" in ran.stdout
    assert record["events"] == sum(crash_everywhere(seed, 2).events for seed in (1, 2, 3))
