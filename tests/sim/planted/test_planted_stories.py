"""Every planted bug of the state or the scheduler that a story shows becomes a small pytest file: it fails with the bug and
passes without, and needs nothing but the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import pytest
from planted_sched_bugs import SCHED_BUGS
from planted_state_bugs import ONE_RANK, STATE_BUGS
from planting import blank_arenas, Bug, plain_columns, planted, small_arenas
from seen_before import SeenBefore
from test_planted import CLIENTS, EVENTS_MAX

from vnext.replay.futures.redecided import checked_events, voice_of
from vnext.replay.futures.to_test import file_text
from vnext.sim.findings import failing_like
from tests.sim.scenario_draw import scenario
from vnext.sim.shrink import shrink, without_ends
from tests.sim.simulator import Simulation
from vnext.state.events import AnyEvent

STORY_EVENTS_MAX = 40
LONG_STORIES = {"an own policy without patience": 200}
"""One request gives way nine times before anything is wrong."""
FOLDED_MAX = (1_500, 1_500, 1_500, 8_000, 8_000, 8_000)
"""Events of the search: most bugs are small soon, else another scenario that fails is easier as a rule."""
EVENTS_SCANNED_IN_VAIN = 2_000
"""Of a bug that no law of a story finds, unless a story did when all seeds were scanned."""
BUGS = [bug for bug in (*STATE_BUGS, *SCHED_BUGS) if bug not in ONE_RANK]  # a story has one rank


def failing_events(seeds: Iterable[int], events_max: int = EVENTS_MAX) -> Iterator[tuple[int, tuple[AnyEvent, ...]]]:
    """(seed, events) of scenarios in which a story shows the bug that is planted."""
    events = 0
    for seed in seeds:
        simulation = Simulation(scenario(seed, CLIENTS))
        try:
            simulation.run_and_require_all()
        except Exception:  # any failure of any kind is what is looked for
            if checked_events(simulation.events)[0] is not None:
                yield seed, tuple(simulation.events)
        events += len(simulation.events)
        if events >= events_max:
            return


class SmallEnough(Exception):
    """A search has found so few events that fail that nobody asks for fewer."""

    def __init__(self, events: tuple[AnyEvent, ...]) -> None:
        super().__init__(f"{len(events)} events")
        self.events = events


def made_small(events: tuple[AnyEvent, ...], folded_max: int, events_max: int) -> tuple[AnyEvent, ...]:
    """A failing story of at most `events_max`, or the smallest that the search found."""
    found, toy = checked_events(events)
    failure = failing_like(found.kind, toy)

    def failing(candidate: Sequence[AnyEvent]) -> int | None:
        length = failure(candidate)
        if length is not None and length <= events_max:
            raise SmallEnough(tuple(candidate[:length]))
        return length

    try:
        return shrink(events[: found.length], failing, voice_of(events, toy), folded_max)
    except SmallEnough as small:
        return without_ends(small.events, failure)


def small_story(events_max: int, bug: Bug, seen: SeenBefore) -> tuple[AnyEvent, ...]:
    """The first story that is small enough, or the smallest of some; none if no scenario shows the bug."""
    smallest: tuple[AnyEvent, ...] = ()
    last, name = seen.last("story", bug.name), bug.name
    scanned = EVENTS_MAX if found_by_laws(bug) or seen.rewrites else EVENTS_SCANNED_IN_VAIN
    for _, events in failing_events(last[:1]):
        smallest = made_small(events, last[1], events_max)
    for (seed, events), folded_max in (
        zip(failing_events(count(), scanned), FOLDED_MAX) if not 0 < len(smallest) <= events_max else ()
    ):
        small = made_small(events, folded_max, events_max)
        smallest = min(smallest or small, small, key=len)
        if len(smallest) <= events_max:
            seen.keep("story", name, seed, folded_max)
            break
    return smallest


@pytest.fixture(scope="module")
def seen(pytestconfig: pytest.Config) -> SeenBefore:
    return SeenBefore(pytestconfig.getoption("--rewrite"))


def outcome(text: str) -> str:
    """What the file's one test says: "" if it passes. Run here, as a fresh module."""
    module: dict = {}
    exec(compile(text, "test_story.py", "exec"), module)
    test = next(value for name, value in module.items() if name.startswith("test_"))
    try:
        test()
    except AssertionError as failed:
        return str(failed)
    return ""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_becomes_a_test(bug: Bug, seen: SeenBefore) -> None:
    with plain_columns(), small_arenas(), blank_arenas(), planted(bug):
        events_max = LONG_STORIES.get(bug.name, STORY_EVENTS_MAX)
        small = small_story(events_max, bug, seen)
        if not small:
            assert not found_by_laws(bug), f"{EVENTS_MAX} events and no story shows it"
            return
        text, found = file_text(small)
        assert found is not None and len(small) <= events_max
        assert found.message in outcome(text)
    with small_arenas():
        assert outcome(text) == ""


def found_by_laws(bug: Bug) -> bool:
    """Whether the bug breaks a law that a story asks; clocks, transport and clients are not in a story."""
    return not set(bug.found_by) <= {"L1", "L2", "M5", "ValueError"}
