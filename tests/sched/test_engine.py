"""The pure engine: what it says is to be carried out, in which order, and whom it asks for events."""

from __future__ import annotations

import pytest

from tests.core_drive import arrival_of
from vnext.sched import engine as engines
from vnext.sched.engine import Engine, Ready, Source
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, EngineStarted, PrefixCacheReset, StepCommitted, StepPlanned, pack_tokens
from vnext.state.laws import check
from vnext.state.reduce import start
from vnext.state.state import State

PROMPT = [1, 2, 3, 4, 5]


def begun(*sources: Source, depth: int = 1, **more: object) -> Engine:
    config = SchedulerConfig(
        block_size=4, page_count=16, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=32, pipeline_depth=depth
    )
    started = EngineStarted(config=config, model="toy", model_digest="", world_size=1, environment={}, started_ns=0)
    return Engine(start(started), sources, **more)


def turned(engine: Engine) -> list[Ready]:
    return list(engine.turn())


class Resets(Source):
    """Has so many events, and writes down when it is asked for what."""

    precedes = asks_behind = True

    def __init__(self, count: int, goes_out: bool) -> None:
        self.left, self.goes_out = count, goes_out
        self.asked: list[str] = []

    def next_event(self, state: State) -> AnyEvent | None:
        self.asked.append("event")
        self.left -= 1
        return PrefixCacheReset() if self.left >= 0 else None

    def precede(self, state: State, event: AnyEvent) -> AnyEvent | None:
        return PrefixCacheReset()

    def ask(self, state: State) -> None:
        self.asked.append("work")

    def wait_ms(self, state: State) -> int | None:
        return 70


def test_a_value_says_what_is_to_be_carried_out():
    engine = begun()
    arrival = arrival_of(0, PROMPT, max_tokens=2)
    engine.arrive(arrival)
    assert engine.has_news
    (ready,) = turned(engine)
    assert ready.events == [arrival, StepPlanned(step=0, admitted=((0, 5),))] and ready.plan is ready.events[-1]
    assert [before.sequence for before in ready.befores] == [1, 2] and ready.state is engine.state
    assert not engine.has_news and turned(engine) == [] and engine.wait_ms(500) == 500
    engine.fold_last(StepCommitted(step=0, tokens=pack_tokens([21])), "mine")
    (ready,) = turned(engine)
    ((going, ended, note),) = ready.news
    assert going.ids.tolist() == [0] and going.tokens.tolist() == [21] and (ended, note) == ((), "mine")
    assert [type(event) for event in ready.events] == [StepCommitted, StepPlanned]


@pytest.mark.parametrize("checked", ["cheaply", "by all laws"])
def test_a_steady_commit_is_one_pass_with_its_plan(checked: str, monkeypatch: pytest.MonkeyPatch):
    folded: list[AnyEvent] = []
    real = engines.fold
    monkeypatch.setattr(engines, "fold", lambda state, event: (folded.append(event), real(state, event))[1])
    engine = begun() if checked == "cheaply" else begun(check=check)
    engine.arrive(arrival_of(0, PROMPT, max_tokens=4))
    turned(engine)
    folded.clear()
    engine.fold_last(StepCommitted(step=0, tokens=pack_tokens([21])))
    (ready,) = turned(engine)
    assert [type(event) for event in ready.events] == [StepCommitted, StepPlanned] and engine.state.planned == 2
    assert folded == ([] if checked == "cheaply" else ready.events)


@pytest.mark.parametrize("goes_out", [False, True])
def test_events_of_sources_come_before_the_decision(goes_out: bool):
    source = Resets(2, goes_out)
    engine = begun(source)
    engine.arrive(arrival_of(0, PROMPT, max_tokens=2))
    values = engine.turn()
    first = next(values)
    kinds = [type(event).__name__ for event in first.events]
    before = ["PrefixCacheReset", "RequestArrived", "PrefixCacheReset"]
    assert kinds == (before if goes_out else [*before, "PrefixCacheReset", "StepPlanned"])
    assert source.asked == (["event"] if goes_out else ["event"] * 3), "one that goes out is carried out first"
    rest = [type(event).__name__ for ready in values for event in ready.events]
    assert rest == (["PrefixCacheReset", "StepPlanned"] if goes_out else []) and source.asked == ["event"] * 3 + ["work"]


@pytest.mark.parametrize("goes_out", [False, True])
def test_a_plan_that_came_with_its_commit_ends_its_frame(goes_out: bool) -> None:
    """The engine core looks for a frame's plan at its end."""
    source = Resets(0, goes_out)
    engine = begun(source)
    engine.arrive(arrival_of(0, PROMPT, max_tokens=4))
    turned(engine)
    engine.fold_last(StepCommitted(step=0, tokens=pack_tokens([21])))
    source.left = 1
    first, second = ([type(event) for event in ready.events] for ready in turned(engine))
    assert first == [StepCommitted, StepPlanned] and second == [PrefixCacheReset]


def test_a_source_that_is_off_is_not_asked_and_one_that_waits_bounds_the_wait():
    source = Resets(2, False)
    engine = begun(source)
    assert engine.wait_ms(500) == 70
    source.is_on = False
    assert turned(engine) == [] and source.asked == [] and engine.wait_ms(500) is None


def test_an_event_that_breaks_the_engine_is_to_be_recorded():
    engine = begun()
    with pytest.raises(IllegalEvent):
        engine.fold(StepCommitted(step=7, tokens=b""))
    assert engine.take().events == [StepCommitted(step=7, tokens=b"")]
