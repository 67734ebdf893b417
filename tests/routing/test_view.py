"""A view of an engine: exact at every event, exact hits, what it does about a stream that is cut, lost or changed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from core_drive import Engine, arrival_of, resumed_of, started_with
from msgspec.structs import replace

from tests.sim.scenario_draw import scenario
from tests.sim.simulator import Simulation
from vnext.log import codec
from vnext.log.reading import read
from vnext.log.stream import EventStreams
from vnext.routing.policies import Candidate
from vnext.routing.prompts import Prompt
from vnext.routing.view import View
from vnext.sim.checks.plain_state import PlainState, contents, differences
from vnext.state import reduce as reducer
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EnginePaused, EngineStarted, WeightsChanged, pack_tokens
from vnext.state.params import Guidance
from vnext.state.state import State

COUNTING = list(range(1, 17))  # four blocks


class Streaming:
    """An engine whose events go to a view, one frame for each."""

    def __init__(self, **changes: object) -> None:
        self.engine, self.view = Engine(**changes), View()
        self.streams = EventStreams(started_with(self.engine.state.config), "0")
        self.engine_fold, self.engine.fold = self.engine.fold, self.fold
        self.view.feed(self.streams.begin("view", self.engine.state))

    def fold(self, event: AnyEvent) -> State:
        state = self.engine_fold(event)
        for _, frame in self.streams.frames([event], state, digest(state)):
            assert not self.view.feed(frame)
        return state

    def run(self, *prompts: list[int], **changes: object) -> None:
        for prompt in prompts:
            self.engine.arrive(prompt, **changes)
        self.engine.run_out()


def prompt_of(tokens: list[int], **changes: object) -> Prompt:
    return Prompt(pack_tokens(tokens), **changes)


def known(view: View, tokens: list[int] = COUNTING) -> dict[str, int]:
    candidate = view.candidate(prompt_of(tokens))
    return {name: getattr(candidate, name) for name in ("hit_tokens", "waiting_tokens", "running", "waiting")}


# ---- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_view_has_the_engines_state_behind_every_frame(seed: int) -> None:
    """Frames of some events each, in pieces that know no frames; another snapshot now and then."""
    simulation, rng = Simulation(scenario(seed, 20)), random.Random(seed)
    simulation.run()
    events, started = simulation.events, simulation.events[0]
    assert isinstance(started, EngineStarted)
    state, streams, view = reducer.start(started), EventStreams(started, "0"), View()
    pieces = b"" + streams.begin("view", state)
    at, frames = 1, 0
    while at < len(events):
        count = rng.randrange(1, 5)
        for event in events[at : at + count]:
            state = reducer.reduce(state, event)
        pieces += b"".join(frame for _, frame in streams.frames(events[at : at + count], state, digest(state)))
        at, frames = at + count, frames + 1
        if rng.random() < 0.02:
            pieces += streams.begin("view", state)
        for piece in cut(rng, pieces):
            view.feed(piece)
        pieces = b""
        assert view.state is not None and view.state is not state
        assert digest(view.state) == digest(state)
        if frames % 20 == 0:
            assert not differences(contents(PlainState(state)), contents(PlainState(view.state)))
    assert view.mismatches == 0 and view.snapshots > (len(events) > 200) and view.state.token_digest == state.token_digest


def cut(rng: random.Random, data: bytes) -> Iterator[bytes]:
    while data:
        size = rng.choice((1, 3, 16, 1000, len(data)))
        yield data[:size]
        data = data[size:]


def test_hits_are_what_an_admission_finds() -> None:
    streaming = Streaming(page_count=40)
    rng = random.Random(5)
    for _ in range(60):
        tokens = COUNTING[: rng.randrange(1, 17)] + [rng.randrange(20, 24) for _ in range(rng.randrange(1, 9))]
        salt = rng.choice(("", "tenant"))
        expected = streaming.view.hit_tokens(prompt_of(tokens, cache_salt=salt))
        before = streaming.engine.state.counters.prefix_hit_tokens
        streaming.run(tokens, max_tokens=2, cache_salt=salt)
        assert streaming.engine.state.counters.prefix_hit_tokens - before == expected
    assert before > 100


def test_hits_of_a_resumed_request_end_where_its_other_half_begins() -> None:
    """Which is told by its prompt, without what it has of its answer."""
    streaming, rng = Streaming(page_count=80, windows=(0, 0), guidance=True, guided_hits=True), random.Random(6)
    found = set[int]()
    for _ in range(40):
        prompt, own = COUNTING[: rng.randrange(6, 17)], COUNTING[: rng.randrange(6)]
        guidance = Guidance(scale=2.0, beside=pack_tokens([9] * rng.randrange(1, len(prompt))))
        event = resumed_of(streaming.engine.state.next_id, prompt, own, 8, guidance=guidance)
        expected = streaming.view.hit_tokens(Prompt.of(event.prompt, event.sampling, "", event.generated))
        before = streaming.engine.state.counters.prefix_hit_tokens
        streaming.fold(event)
        streaming.engine.run_out()
        found.add(streaming.engine.state.counters.prefix_hit_tokens - before)
        assert streaming.engine.state.counters.prefix_hit_tokens - before == expected
    assert found == {0, 4, 8, 12}


def test_what_names_a_block_divides_hits() -> None:
    streaming = Streaming()
    streaming.run(COUNTING)
    view = streaming.view
    assert view.hit_tokens(prompt_of(COUNTING + [50])) == 16
    assert view.hit_tokens(prompt_of(COUNTING)) == 12, "one token is left to compute"
    assert view.hit_tokens(prompt_of(COUNTING + [50], cache_salt="other")) == 0
    assert view.hit_tokens(prompt_of(COUNTING + [50], adapter="a digest")) == 0
    assert view.hit_tokens(prompt_of(COUNTING + [50], hits_max=0)) == 0
    streaming.engine.fold(EnginePaused(mode="keep"))
    streaming.engine.fold(WeightsChanged(version=1, digest="other weights"))
    assert view.hit_tokens(prompt_of(COUNTING + [50])) == 0
    streaming.engine.fold(EnginePaused(mode=""))
    streaming.run(COUNTING)
    assert view.hit_tokens(prompt_of(COUNTING + [50])) == 16
    streaming.engine.reset()
    assert view.hit_tokens(prompt_of(COUNTING + [50])) == 0


# ---- what is on its way --------------------------------------------------------------------------------------------


def test_a_request_counts_once_under_the_name_that_an_api_server_makes_of_its_id() -> None:
    """It adds digits where the id came with the request, and the number of the choice."""
    for name in ("chatcmpl-me-0a1b2c3d-0", "chatcmpl-me-0"):
        streaming = Streaming()
        streaming.view.routed("chatcmpl-me" if name.count("-") > 2 else name, prompt_of(COUNTING))
        before = known(streaming.view)
        streaming.engine.arrive(COUNTING, name=name)
        assert before["waiting"] == known(streaming.view)["waiting"] == 1
        assert before["waiting_tokens"] == known(streaming.view)["waiting_tokens"] == len(COUNTING)


def test_a_routed_request_counts_once_from_its_decision_to_its_end() -> None:
    streaming = Streaming()
    view, engine = streaming.view, streaming.engine
    view.routed("r0", prompt_of(COUNTING))
    assert known(view) == dict(hit_tokens=12, waiting_tokens=16, running=0, waiting=1)
    engine.arrive(COUNTING, max_tokens=3)
    assert known(view) == dict(hit_tokens=12, waiting_tokens=16, running=0, waiting=1)
    engine.plan()
    assert known(view) == dict(hit_tokens=12, waiting_tokens=0, running=1, waiting=0)
    engine.commit(9)
    engine.run_out()
    view.done("r0")
    assert known(view) == dict(hit_tokens=12, waiting_tokens=0, running=0, waiting=0)
    assert view.candidate(prompt_of([70, 71])) == Candidate(
        hit_tokens=0, waiting_tokens=0, running=0, waiting=0, free_pages=16, page_count=16, is_ready=True
    )


def test_a_prompt_behind_one_like_it_hits_what_that_one_computes() -> None:
    streaming = Streaming(max_num_batched_tokens=8)
    view, engine = streaming.view, streaming.engine
    engine.arrive(COUNTING + [40], max_tokens=3)
    view.routed("second", prompt_of(COUNTING + [41]))
    assert known(view, COUNTING + [42]) == dict(hit_tokens=16, waiting_tokens=17 + 1, running=0, waiting=2)
    engine.step()  # the half of the first prompt; the other half is promised
    assert known(view, COUNTING + [42]) == dict(hit_tokens=16, waiting_tokens=8 + 1, running=1, waiting=1)
    engine.abort(0)
    view.done("second")
    assert known(view, COUNTING + [42]) == dict(hit_tokens=8, waiting_tokens=0, running=0, waiting=0)


def test_a_refused_request_counts_until_it_is_done() -> None:
    view = Streaming().view
    view.routed("gone", prompt_of(COUNTING))
    assert known(view)["waiting"] == 1
    view.done("gone")
    view.done("gone")
    assert known(view) == dict(hit_tokens=0, waiting_tokens=0, running=0, waiting=0)


def test_a_new_snapshot_has_the_arrivals_that_were_on_their_way() -> None:
    streaming = Streaming()
    view = streaming.view
    view.routed("r0", prompt_of(COUNTING))
    view.routed("later", prompt_of([5, 6]))
    streaming.engine.fold = streaming.engine_fold  # an arrival of which the view learns by a snapshot alone
    streaming.engine.arrive(COUNTING)
    view.feed(streaming.streams.begin("view", streaming.engine.state))
    assert known(view) == dict(hit_tokens=12, waiting_tokens=16 + 2, running=0, waiting=2)


# ---- streams that are lost -----------------------------------------------------------------------------------------


def test_a_changed_byte_is_noticed_and_a_snapshot_mends_it() -> None:
    streaming = Streaming()
    engine, view, state = streaming.engine, streaming.view, streaming.engine.state
    engine.fold = streaming.engine_fold
    engine.arrive(COUNTING)
    event_bytes = next(frame for _, frame in streaming.streams.frames([arrival(engine)], engine.state, digest(engine.state)))
    for at in range(0, len(event_bytes), 7):
        lost = View()
        lost.feed(EventStreams(started_with(state.config), "0").begin("view", state))
        changed = bytearray(event_bytes)
        changed[at] ^= 1
        assert lost.feed(bytes(changed) + bytes(64)) or at < 4, "a longer record may still come"
        if not lost.is_exact:
            assert lost.mismatches == 1 and lost.failure
            assert not lost.feed(event_bytes)
            assert not lost.is_exact, "what follows a lost frame is skipped"
            lost.feed(event_bytes[:9] + streaming.streams.begin("view", engine.state))
            assert lost.is_exact and lost.mismatches == 1
    view.feed(event_bytes)
    assert view.is_exact


def arrival(engine: Engine) -> AnyEvent:
    return arrival_of(0, COUNTING)


@pytest.mark.parametrize("fault", ["another state", "a missing frame", "an impossible event"])
def test_a_view_that_differs_says_so(fault: str) -> None:
    streaming = Streaming()
    engine, view, streams = streaming.engine, streaming.view, streaming.streams
    engine.fold = streaming.engine_fold
    engine.arrive(COUNTING)
    frames = dict(streams.frames([arrival(engine)], engine.state, digest(engine.state) + (fault == "another state")))
    if fault == "an impossible event":
        frames = dict(streams.frames([replace(arrival(engine), id=7)], engine.state, 0))
    if fault == "a missing frame":
        plan = engine.decide()
        engine.fold(plan)
        frames = dict(streams.frames([plan], engine.state, digest(engine.state)))
    assert view.feed(frames["view"])
    assert not view.is_exact and view.mismatches == 1
    sentences = {"another state": "is not the engine's", "a missing frame": "is due", "an impossible event": "is due|cannot be folded"}
    assert re.search(sentences[fault], view.failure), view.failure


def test_an_engine_whose_digests_cannot_be_compared_is_hopeless() -> None:
    engine = Engine()
    streams = EventStreams(started_with(engine.state.config), "9.9")
    streams._header = replace(streams._header, digest_version=99)
    view = View()
    assert not view.feed(streams.begin("view", engine.state))
    assert view.is_hopeless and not view.is_exact and "vnext 9.9" in view.failure
    assert view.candidate(prompt_of(COUNTING)).is_ready is False


def test_a_stream_that_ended_waits_for_the_next() -> None:
    streaming = Streaming()
    assert not streaming.view.feed(b"") and not streaming.view.is_exact and streaming.view.mismatches == 0
    streaming.view.feed(streaming.streams.begin("view", streaming.engine.state))
    assert streaming.view.is_exact


def test_a_stream_is_a_log() -> None:
    """A reader of logs reads it as a segment."""
    streaming = Streaming()
    data = streaming.streams.begin("file", streaming.engine.state)
    items = list(read([data]))
    assert isinstance(items[0], codec.SegmentStart) and items[0].header.privacy == "full" and str(items[-1]) == "complete"
