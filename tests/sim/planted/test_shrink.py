"""Shrinking: a long log that fails becomes a few legal events that fail in the same way, readable and replayable."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from types import ModuleType

import pytest
from msgspec.structs import replace

from planted_state_bugs import STATE_BUGS
from planting import Bug, plain_columns, planted, small_arenas
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify
from vnext.sim.shrink import Author, Voice, reduced, shrink, simpler_arrivals
from vnext.sim.findings import Finding, failing_like, check_events, kind_of, reported, toy_voice
from tests.sim.scenario_draw import scenario
from tests.sim.seeds import SeedFailed
from tests.sim.scenario import NEVER, Faults
from tests.sim.simulator import Simulation, simulate
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, RequestArrived, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start


def voice_of(events: Sequence[AnyEvent]) -> Voice:
    return toy_voice(events[0].config)


def failing_simulation() -> tuple[Simulation, Exception]:
    """The first failing scenario; a bug must be planted."""
    for seed in range(60):
        simulation = Simulation(scenario(seed))
        try:
            simulation.run_and_require_all()
        except Exception as error:  # any failure of any kind is what is looked for
            return simulation, error
    raise AssertionError("no scenario fails")


def failure() -> SeedFailed:
    simulation, error = failing_simulation()
    return SeedFailed(simulation.scenario.seed, len(simulation.scenario.clients), simulation, error)


def shrunk(events: list[AnyEvent]) -> tuple[tuple[AnyEvent, ...], Finding]:
    finding = check_events(events)
    assert finding is not None
    return shrink(events, failing_like(finding.kind), voice_of(events)), finding


def bug_named(name: str) -> Bug:
    return next(bug for bug in STATE_BUGS if bug.name == name)


@pytest.mark.parametrize(
    ("name", "events_max"),
    [("a double free on abort", 6), ("a request comes back in its old epoch", 20), ("the model's end token ignored", 6),
     ("usage tells the newest hit", 30), ("two futures share an arena", 12)],
)  # fmt: skip
def test_a_failure_becomes_small(name: str, events_max: int) -> None:
    bug = bug_named(name)
    with plain_columns(), small_arenas(), planted(bug):
        small, finding = shrunk(failing_simulation()[0].events)
        found = check_events(small)
        assert found is not None and found.kind == finding.kind and found.length == len(small) <= events_max
        earlier = check_events(small[:-1])
        assert earlier is None or earlier.kind != finding.kind, "the last event is needed for this kind of failure"
        assert len(reported(small)) == len(small)
    assert check_events(small) is None, "the events are legal, and right without the bug"


def test_a_log_that_is_right_stays_as_it_is() -> None:
    events = simulate(scenario(3)).events
    assert check_events(events) is None
    assert shrink(events, failing_like("M1"), voice_of(events), folded_max=500) == events


def test_what_an_author_writes_is_what_the_simulator_wrote() -> None:
    """The same moves decided anew and sampled again are the same events, with no event left out."""
    events = simulate(scenario(5)).events
    author = Author(events[0], voice_of(events))
    for place, move in enumerate(events[1:]):
        assert author.follow(place, move)
    assert author.events == list(events)


def test_what_is_left_out_is_numbered_anew() -> None:
    events = simulate(scenario(5)).events
    gone = {move.id for move in events[1:] if isinstance(move, RequestArrived) and move.id % 2}
    author = Author(events[0], voice_of(events))
    for place, move in enumerate(events[1:]):
        if not (isinstance(move, RequestArrived) and move.id in gone):
            assert author.follow(place, move)
    assert check_events(author.events) is None
    state = start(author.events[0])
    for event in author.events[1:]:
        state = reduce(state, event)
    assert state.next_id == sum(isinstance(event, RequestArrived) for event in events) - len(gone)


def test_delta_debugging_finds_a_pair() -> None:
    *_, smallest = reduced(range(100), lambda items: {17, 64} <= set(items))
    assert smallest == (17, 64)
    assert list(reduced(range(100), lambda items: False)) == []


def test_simpler_arrivals_ask_for_less() -> None:
    arrival = RequestArrived(
        id=0, name="", prompt=pack_tokens([1, 2, 3]), sampling=Sampling(seed=1, max_tokens=1), priority=0, arrival_ns=0
    )
    assert [len(simpler.prompt) // 4 for simpler in simpler_arrivals(arrival)] == [1, 2]
    richer = replace(arrival, prompt=pack_tokens([1]), cache_salt="a")
    assert list(simpler_arrivals(richer)) == [replace(richer, cache_salt="")]


def test_kinds_are_equal_for_equal_bugs() -> None:
    assert kind_of(LawBroken("M1", "3 of 4")) == kind_of(LawBroken("M1", "7 of 9")) == "M1"
    assert kind_of(ValueError("row 3 is at 4")) == kind_of(ValueError("row 1 is at 2")) != kind_of(KeyError("row 1"))


# ---- scripts/fuzz.py ---------------------------------------------------------------------------------------------


@pytest.fixture
def fuzz(root) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_script", root / "scripts" / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fuzz_writes_logs_that_replay_opens(fuzz, tmp_path, capsys) -> None:
    bug = bug_named("a leak on abort")
    with plain_columns(), small_arenas(), planted(bug):
        fuzz.explain(failure(), tmp_path / "seed")
        assert not verify(open_log(tmp_path / "seed" / "smallest"), all_laws=True).same
    assert re.search(r"requests \[.*\] leave", capsys.readouterr().err)
    for name in ("whole", "smallest"):
        *_, end = open_log(tmp_path / "seed" / name).items()
        assert end.kind == "complete"


def test_a_failure_of_one_rank_is_made_small_by_its_scenario(fuzz, tmp_path, capsys) -> None:
    bug = bug_named("one rank names blocks by other keys")
    with plain_columns(), small_arenas(), planted(bug):
        failed = failure()
        assert check_events(failed.simulation.events) is None
        fuzz.explain(failed, tmp_path)
    text = capsys.readouterr().err
    assert "Y1: rank 1" in text and f"of {len(failed.simulation.events)})" in text


def test_a_long_log_becomes_small() -> None:
    """Thousands of events of quiet life, and a burst in which requests give way."""
    base, quiet_us, count = scenario(0), 20_000, 330
    quiet = [replace(base.clients[n % 60], arrival_us=n * quiet_us, abort_us=NEVER) for n in range(count)]
    burst = [replace(client, arrival_us=count * quiet_us, abort_us=NEVER) for client in base.clients]
    bug = bug_named("a request comes back in its old epoch")
    with plain_columns(), planted(bug):
        simulation = Simulation(replace(base, clients=(*quiet, *burst), reset_us=(), faults=Faults()))
        with pytest.raises(LawBroken, match="law A2"):
            simulation.run_and_require_all()
        assert len(simulation.events) > 10 * count
        small, _ = shrunk(simulation.events)
    assert len(small) <= 40
