"""exec and bisect across recoveries: real tokens, sampled by an engine that nothing disturbed, come out of batches that began anew."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from model_logs import record

from vnext.log.codec import Frame
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.reading.source import open_log
from vnext.replay.rerun.batched import Batched
from vnext.replay.rerun.machine import tensors_of
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.events import (
    EngineRecovered,
    EngineStarted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    pack_tokens,
)
from vnext.state.reduce import reduce, start

BROUGHT_MAX = 6


class Disturbed:
    """An engine that gives each request the tokens that it got undisturbed, while ranks are lost again and again."""

    def __init__(self, started: EngineStarted, told: dict, log_dir: Path) -> None:
        self.state, self.recoveries, self._told = start(started), 0, told
        self._recorder = Recorder.open(log_dir, started, "full", Bounds())
        self._events: list = []
        self._befores: list = []

    def fold(self, event) -> None:
        self._events.append(event)
        self._befores.append(self.state)
        self.state = reduce(self.state, event)

    def end_frame(self) -> None:
        self._recorder.append(self._events, self._befores, digest(self.state), ())
        self._events, self._befores = [], []

    def commit(self) -> None:
        scheduled = self.state.in_flight[0]
        ids, ends = scheduled.ids[scheduled.samples].tolist(), (scheduled.starts + scheduled.counts)[scheduled.samples].tolist()
        tokens = [self._told[id_].tokens[end] for id_, end in zip(ids, ends)]
        self.fold(StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens)))

    def close(self) -> None:
        self._recorder.close()


@pytest.fixture(scope="module")
def disturbed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The requests of a real log in an engine that continues another one, whose ranks die in every eighth iteration."""
    folder, rng = tmp_path_factory.mktemp("recovered"), random.Random(5)
    calm = record(checkpoint, folder / "calm", requests=16)
    walk = Walk(calm, Selection(), telling=True)
    walk.begin(10**6, str)
    list(walk.steps())
    log = open_log(calm)
    arrivals = [event for item in log.items() if isinstance(item, Frame) for event in item.events if isinstance(event, RequestArrived)]
    started = msgspec.structs.replace(log.header.started, config=msgspec.structs.replace(log.header.started.config, pipeline_depth=1))
    told = {event.id: walk.reported[event.id] for event in arrivals}
    cut = {id_: msgspec.structs.replace(told[id_].request.sampling, max_tokens=_length(told[id_])) for id_ in told}
    arrivals = [msgspec.structs.replace(event, sampling=cut[event.id]) for event in arrivals if _length(told[event.id])]
    told = {place: told[event.id] for place, event in enumerate(arrivals)}
    engine = Disturbed(started, told, folder / "log")
    engine.fold(EngineRecovered(cause="the engine core was killed", log="calm", frames=3))
    for place, event in enumerate(arrivals):
        brought = rng.randint(0, min(BROUGHT_MAX, event.sampling.max_tokens - 1)) if place < 8 else 0
        prompt = len(event.prompt) // 4
        fields = {name: getattr(event, name) for name in event.__struct_fields__} | {"id": place}
        tokens = pack_tokens(told[place].tokens[prompt : prompt + brought])
        engine.fold(RequestResumed(**fields | {"generated": tokens}) if place < 8 else RequestArrived(**fields))
    while engine.state.requests:
        if (plan := schedule(engine.state)) is not None:
            engine.fold(plan)
        engine.end_frame()
        if engine.recoveries < 12 and rng.random() < 0.125:
            engine.recoveries += 1
            engine.fold(EngineRecovered(cause="rank 0 was killed"))
        else:
            engine.commit()
    engine.end_frame()
    engine.close()
    assert engine.recoveries > 5
    return folder / "log"


def _length(reported) -> int:
    return len(reported.tokens) - reported.request.prompt_length


@pytest.mark.parametrize("extra", [(), ("--solo",), ("--tp", "2"), ("--steps", "30:")], ids=" ".join)
def test_every_token_behind_a_recovery_comes_out_again(disturbed, answer, extra):
    code, found = answer("exec", disturbed, *extra)
    assert (code, found["same"], found["differ"], found["end"]) == (0, True, 0, "complete")
    assert found["tokens"] > 50 and (found["uncommitted"] > 5 or extra == ("--steps", "30:"))


def test_its_operations_differ_nowhere(disturbed, answer):
    code, found = answer("bisect", disturbed, "--steps", ":25")
    assert code == 0 and found["same"] and found["steps"] > 15


@pytest.mark.parametrize("extra", [("--solo",), ("--tp", "2")], ids=" ".join)
def test_operations_read_nothing_from_before_a_recovery(disturbed, answer, monkeypatch, extra):
    """What the ranks had written that were lost is made no number here."""
    plain, lost = Batched.forget, []

    def forget(self: Batched) -> None:
        lost.append(self.caches)
        for tensor in tensors_of(self.caches.of_rank[0]):
            tensor.fill_(float("nan"))
        plain(self)

    monkeypatch.setattr(Batched, "forget", forget)
    code, found = answer("bisect", disturbed, "--steps", ":25", *extra)
    assert code == 0 and found["same"] and len(lost) > 1
