"""what-if on logs with LoRA adapters, drafts and structured output: loads, evictions and drafts are decided and made again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from test_replay_what_if import Machine, machine_log, real_config, ring_of

from vnext.replay.futures import forking, loads, recording
from vnext.replay.futures.ground import ground_of, timed
from vnext.replay.futures.recording import Recorded, recorded
from vnext.replay.futures.redecided import answers_of, events_of, recorded_events
from vnext.replay.futures.revived import salted, warmed
from vnext.replay.futures.what_if import Objective, candidates, what_if
from vnext.replay.futures.what_if_run import Ran, as_recorded, rerun, retrace
from vnext.replay.reading.source import Log, open_log
from vnext.sched import engine, residency
from vnext.sim.findings import check_events
from vnext.state.block_hash import root_hash
from vnext.state.config import Speculation
from vnext.state.events import AdapterLoaded, AnyEvent, PrefixCacheReset, RequestArrived, StepCommitted, pack_tokens
from vnext.state.params import Constraint
from vnext.state.state import State, StepInFlight

ADAPTERS = Path(__file__).parents[2] / "golden" / "logs" / "digest-2-adapters"
DRAFTING = {"speculation": Speculation(num_speculative_tokens=4, row_cost=20)}


def opened(path: Path) -> tuple[Log, Recorded]:
    log = open_log(path)
    return log, recorded(log)


def digests(state: State) -> list[str]:
    return [slot.digest for slot in state.slots if slot is not None]


def root_of(arrival: RequestArrived, size: int) -> bytes:
    return root_hash(arrival.cache_salt, size, arrival.sampling.adapter)


def kinds(events: list[AnyEvent]) -> Counter[str]:
    return Counter(type(event).__name__ for event in events)


# ---- adapters ----------------------------------------------------------------------------------------------------


def test_a_log_with_adapters_comes_out_again():
    log, taken = opened(ADAPTERS)
    assert kinds(taken.events)["AdapterLoaded"] == 16 and kinds(taken.events)["AdapterEvicted"] == 14
    assert retrace(taken, log.header.started).events == taken.events
    config = log.header.started.config
    assert rerun(taken, log.header.started, config, as_recorded(taken), exact=True).events == taken.events


@pytest.mark.parametrize("fault", ["the adapter used last is evicted", "the last of the queue is served"])
def test_another_decision_about_adapters_is_noticed(monkeypatch, fault):
    log, taken = opened(ADAPTERS)
    if fault.startswith("the last"):
        right = residency._needed
        monkeypatch.setattr(residency, "_needed", lambda state: right(state)[::-1])
    else:
        monkeypatch.setattr(residency, "min", max, raising=False)
    assert 0 < len(retrace(taken, log.header.started).events) < len(taken.events)
    answer = what_if(ADAPTERS, [], Objective())
    assert 0 < answer.reproduced < answer.events


class Followed:
    """The states and events of a hypothetical run, each event folded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[AnyEvent] = []
        self.resident_most = 0
        fold = engine.fold

        def followed(state: State, event: AnyEvent):
            self.events.append(event)
            after, matched = fold(state, event)
            self.resident_most = max(self.resident_most, sum(slot is not None for slot in after.slots))
            return after, matched

        monkeypatch.setattr(engine, "fold", followed)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_other_slots_are_other_loads_under_every_law(monkeypatch, slots):
    """Each request gets its whole answer; with a slot for every adapter each is read once."""
    ground = ground_of(open_log(ADAPTERS))
    config, followed = replace(ground.started.config, max_loras=slots), Followed(monkeypatch)
    ran = rerun(ground.taken, ground.started, config, timed(ground.model, ground.taken, ground.pace))
    found, events = kinds(followed.events), tuple(followed.events)  # before the check folds them once more
    assert check_events([replace(ground.started, config=config), *events], toy=False) is None
    assert found["AdapterEvicted"] == found["AdapterLoaded"] - min(slots, 3) and followed.resident_most == min(slots, 3)
    assert (found["AdapterLoaded"] == 3) == (slots >= 3)
    assert [served.tokens for served in ran.served] == [len(ground.taken.answers[id_]) for id_ in range(22)]


def waited_us(ran: Ran) -> float:
    return sum(served.first_us - served.arrived_us for served in ran.served)


def test_more_slots_wait_less_and_slow_loads_wait_longer():
    ground = ground_of(open_log(ADAPTERS))

    def waited(slots: int, factor: float = 1.0) -> float:
        slow = {digest: [factor * each for each in took] for digest, took in ground.taken.loads.took_us.items()}
        taken = replace(ground.taken, loads=replace(ground.taken.loads, took_us=slow))
        config = replace(ground.started.config, max_loras=slots)
        return waited_us(rerun(taken, ground.started, config, timed(ground.model, taken, ground.pace)))

    assert waited(1) > waited(2) > waited(3)
    assert waited(2, 3.0) > waited(2) > waited(2, 0.1)


def test_the_configuration_of_the_log_is_near_what_was_recorded():
    """Loads take as long as the log's did, one by one."""
    answer = what_if(ADAPTERS, candidates([], ["max_loras=1,3"]), Objective(ttft_us=400_000))
    assert answer.reproduced == answer.events == 412
    assert answer.unchanged.ttft_ms == pytest.approx(answer.recorded.ttft_ms, rel=0.02)
    assert answer.runs[0].ttft_ms[0] > answer.unchanged.ttft_ms[0] > answer.runs[1].ttft_ms[0]


def test_loads_of_the_past_and_of_the_future():
    us = loads.Loads([], {"a": [5.0, 1.0, 9.0], "b": [100.0]}).us
    assert [us("a", 1), us("a", 3), us("b", 1), us("c", 0)] == [1.0, 5.0, 100.0, 7.0] and loads.Loads([], {}).us("a", 0) == 0.0


def test_a_load_is_timed_from_when_it_is_needed_unless_another_came_between(monkeypatch):
    """Of the first it is unknown whether it was read before the second or after it."""
    wishes = iter([None, "a", "b", "a", None, "c", "c", None])
    monkeypatch.setattr(loads, "next_load", lambda _: (found := next(wishes)) and SimpleNamespace(digest=found))
    state, seen = SimpleNamespace(slots=(None,)), loads.LoadsSeen()
    for now_us, loaded in enumerate(["", "", "", "", "a", "", "", "c"]):
        event = AdapterLoaded(name="", digest=loaded, slot=0) if loaded else PrefixCacheReset()
        seen.hear(event, state, 10.0 * now_us)
    assert seen.loads.took_us == {"c": [20.0]} and [event.digest for _, event in seen.loads.events] == ["a", "c"]


def test_a_ring_with_adapters_goes_on_with_those_in_its_slots(tmp_path):
    """From its snapshot on: the log again, other settings, and the whole list that `shrink` begins with."""
    ring = ring_of(ADAPTERS, tmp_path / "ring")
    log, taken = opened(ring)
    assert sum(slot is not None for slot in taken.first.slots) == 2 and len(taken.lives) > 4
    assert retrace(taken, log.header.started).events == taken.events
    config = log.header.started.config
    arrived = {event.id: salted(event, config) for event in recorded_events(open_log(ADAPTERS)) if isinstance(event, RequestArrived)}
    for life in taken.lives:
        assert root_of(life.arrival, config.block_size) == root_of(arrived[life.arrival.id], config.block_size)
    ground, held_most = ground_of(log), digests(taken.first)
    for slots, held in ((1, held_most[:1]), (2, held_most), (3, held_most)):
        config = replace(ground.started.config, max_loras=slots)
        assert digests(warmed(replace(ground.started, config=config), taken.first, taken.lives)[0]) == held
        ran = rerun(taken, ground.started, config, timed(ground.model, taken, ground.pace))
        assert ran.refused == 0 and all(served.finished for served in ran.served)
    events = events_of(log)
    assert check_events(events, toy=False) is None
    assert sum(map(len, answers_of(events).values())) == sum(map(len, taken.answers.values()))


# ---- drafts ------------------------------------------------------------------------------------------------------


class Drafter(Machine):
    """Drafts follow from the request and the place alone, as a drafter's do: some are right, some stop early."""

    def commit(self) -> None:
        self.ends.popleft()
        self.committed_us = self.now_us
        scheduled = self.state.in_flight[0]
        runs = []
        for id_, start, count, drafts in zip(*(each[scheduled.samples].tolist() for each in (
            scheduled.ids, scheduled.starts, scheduled.counts, scheduled.drafts
        ))):  # fmt: skip
            place = start + count - drafts
            made = min(drafts, self.made(id_, place))
            kept = next((at for at in range(made) if not self.is_right(id_, place + at)), made)
            runs.append(([1 + (7 * id_ + place + at) % 40 for at in range(kept + 1)], made))
        tokens = pack_tokens([token for run, _ in runs for token in run])
        counts, drafted = bytes(len(run) for run, _ in runs), bytes(made for _, made in runs)
        extra = {"counts": counts, "drafted": drafted} if any(drafted) else {}
        self.fold(StepCommitted(step=scheduled.step, tokens=tokens, **extra))

    @staticmethod
    def is_right(id_: int, place: int) -> bool:
        return (place + id_) % 7 != 3

    @staticmethod
    def made(id_: int, place: int) -> int:
        return 1 if (place * 3 + id_) % 5 == 0 else 9


@pytest.fixture
def drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("test_replay_what_if.Machine", Drafter)
    return machine_log(tmp_path / "log", real_config(**DRAFTING), arrivals=60)


def tokens_a_step(ran: Ran) -> float:
    return sum(served.tokens for served in ran.served) / ran.steps


@pytest.mark.parametrize("fault", [False, True])
def test_drafts_that_a_log_shows_are_made_again(drafted, monkeypatch, fault):
    log, taken = opened(drafted)
    assert retrace(taken, log.header.started).events == taken.events
    if fault:
        monkeypatch.setattr(recording.DraftsSeen, "run", lambda *_: (0, 0))
    answer = what_if(drafted, [], Objective())
    assert answer.reproduced == answer.events
    near = answer.unchanged.tokens_s == pytest.approx(answer.recorded.tokens_s, rel=0.02)
    assert near and answer.unchanged.itl_ms == pytest.approx(answer.recorded.itl_ms, rel=0.1) or fault
    assert not (fault and answer.unchanged.itl_ms == pytest.approx(answer.recorded.itl_ms, rel=0.1))


def test_other_settings_make_most_of_the_same_drafts(drafted):
    log, taken = opened(drafted)
    started = log.header.started
    own = tokens_a_step(rerun(taken, started, started.config, as_recorded(taken)))
    none = replace(taken, drafts=recording.DraftsSeen({}, {}))
    for changes in ({"max_num_seqs": 3}, {"max_num_batched_tokens": 24}, {"pipeline_depth": 1}):
        config = replace(started.config, **changes)
        found, without = (tokens_a_step(rerun(each, started, config, as_recorded(each))) for each in (taken, none))
        assert found > 1.2 * without
    assert own > 1.5


def test_what_a_commit_shows_of_its_drafts():
    """Request 4 keeps two of three, request 5 has made but one of three, and request 6 has no place for any."""
    entries = np.array([[4, 5, 6], [0, 0, 0], [10, 10, 10], [4, 4, 1]])
    scheduled = StepInFlight(0, entries, np.ones(3, bool), 9, np.array([3, 3, 0]))
    seen = recording.DraftsSeen({}, {})
    seen.hear(scheduled, StepCommitted(step=0, tokens=bytes(24), counts=bytes([3, 2, 1]), drafted=bytes([3, 1, 0])), {4: [9], 5: [9, 9]})
    assert seen.right == {4: {1: True, 2: True, 3: False}, 5: {2: True}, 6: {}} and seen.most == {5: {2: 1}}


def test_a_kept_draft_and_a_wrong_one_are_told_apart():
    seen = recording.DraftsSeen({4: {7: True, 8: True, 9: False, 20: True}}, {4: {8: 1}})
    assert [seen.run(4, 7, most) for most in (0, 1, 2, 3)] == [(0, 0), (1, 1), (2, 2), (3, 2)]
    assert seen.run(4, 8, 3) == (1, 1) and seen.run(4, 9, 3) == (3, 0) and seen.run(5, 7, 2) == (2, 0)


def test_futures_keep_some_of_their_drafts(drafted):
    state, log = start_of(drafted), open_log(drafted)
    options = forking.future_options(log, 200, 20, 5)
    future = forking.future_of(state, 3, options, lambda before, event, after: False)
    assert future.kind == "" and forking.future_of(state, 3, options).digest == future.digest
    events: list[AnyEvent] = []
    forking.future_of(state, 3, options, lambda before, event, after: events.append(event))
    counts = [count for event in events if isinstance(event, StepCommitted) for count in event.counts]
    assert {1, 2, 3, 4, 5} == set(counts)


def start_of(path: Path) -> State:
    return recorded(open_log(path)).first


# ---- structured output -------------------------------------------------------------------------------------------


def test_constraints_change_no_decision(tmp_path, monkeypatch):
    """A log in which every other request has a grammar is the log of the same requests without, also where it is run again."""
    plain = machine_log(tmp_path / "plain", arrivals=40)
    fold = Machine.fold

    def bound(self: Machine, event: AnyEvent) -> None:
        if isinstance(event, RequestArrived) and event.id % 2:
            event = replace(event, sampling=replace(event.sampling, constraint=Constraint(grammar="a grammar")))
        fold(self, event)

    monkeypatch.setattr(Machine, "fold", bound)
    answers = [what_if(path, candidates(["max_num_seqs=3"], []), Objective()) for path in (plain, machine_log(tmp_path / "bound", arrivals=40))]
    assert answers[0] == answers[1] and answers[1].reproduced == answers[1].events
