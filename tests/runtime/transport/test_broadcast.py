"""What the ranks are told: the same events without what only the engine core uses, and how many bytes that takes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from core_drive import Engine, config_of, started_with
from hypothesis import given, strategies as st

from vnext.runtime.transport.ring.broadcast import decode_events, encode_events
from vnext.runtime.transport.ring.writer import RingWriter
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AnyEvent,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

STEADY_BYTES_MAX = 64
ADMISSION_BYTES_MAX = 16
LATE = 2**31  # a step of an engine that has run for years


def arrival(id_: int, token_count: int = 3, name: str = "client", **changes: object) -> RequestArrived:
    sampling = Sampling(seed=2**64 - 1, max_tokens=2**20)
    prompt = pack_tokens([2**31 - 1] * token_count)
    return RequestArrived(
        id=id_, name=name, prompt=prompt, sampling=sampling, priority=0, arrival_ns=2**62, **changes
    )


def parameter_bytes(event: RequestArrived) -> int:
    """What the request itself says, as msgpack: sampling, priority, salt, weight."""
    return sum(len(msgspec.msgpack.encode(part)) for part in (event.sampling, event.priority, event.cache_salt, event.weight))


def ring_bytes(*messages: bytes) -> int:
    """What messages take of a real ring, framing and padding included."""
    with RingWriter.create(reader_count=1) as writer:
        for message in messages:
            writer.write(message)
        return writer.used_bytes


def test_events_come_back_without_what_ranks_need_not_know() -> None:
    events = [
        arrival(5, cache_salt="s", client=9, weight=3), RequestAborted(ids=(1, 2), reason="stop"), arrival(6), PrefixCacheReset(),
        StepCommitted(step=7, tokens=b"1234"),
        StepPlanned(step=8, preempted=(1,), changed=((0, 2),), admitted=((0, 9),)),
    ]  # fmt: skip
    reported = decode_events(encode_events(events), next_id=5)
    events[0], events[2] = (msgspec.structs.replace(events[at], name="", arrival_ns=0) for at in (0, 2))
    events[4] = StepCommitted(step=7, tokens=b"")
    assert list(reported) == events


@given(st.integers(0, 2**40), st.integers(-60, 60))
def test_an_arrival_out_of_turn_keeps_its_own_id(due: int, ahead: int) -> None:
    """A rank that missed an arrival, or got one twice, does not take the next one for the one that is due."""
    if (id_ := due + ahead) >= 0:
        assert decode_events(encode_events([arrival(id_), arrival(id_ + 1)]), due)[0].id == id_


def test_the_reducer_refuses_an_arrival_out_of_turn() -> None:
    engine = Engine()
    for due in range(3):
        engine.arrive([1, 2])
        with pytest.raises(IllegalEvent, match="arrived where"):
            reduce(engine.state, decode_events(encode_events([arrival(due)]), engine.state.next_id)[0])


class Frame(NamedTuple):
    """What the engine core sends at once, how many requests it admits, and the state behind it."""

    events: list[AnyEvent]
    admitted: int
    state: State


def config_for(request_count: int) -> dict[str, int]:
    return dict(
        page_count=40 * request_count, max_num_seqs=request_count, max_num_batched_tokens=2048, max_model_len=128,
        pipeline_depth=2,
    )  # fmt: skip


def frames_of_a_run(request_count: int, prompt_length: int = 8) -> list[Frame]:
    """All requests arrive at once and are decoded for 40 steps, with two steps in flight."""
    engine, frames, unsent = Engine(**config_for(request_count)), [], []

    def fold(event: AnyEvent) -> None:
        unsent.append(event)
        engine.fold(event)

    sampling = Sampling(seed=2**63, max_tokens=60, ignore_eos=True)
    for id_ in range(request_count):
        prompt = pack_tokens([1 + id_ % 90] * prompt_length)
        fold(RequestArrived(id=id_, name="a client", prompt=prompt, sampling=sampling, priority=0, arrival_ns=2**62))
    for _ in range(40):
        while (plan := schedule(engine.state)) is not None:
            fold(plan)
            frames.append(Frame(unsent[:], len(plan.admitted), engine.state))
            unsent.clear()
        scheduled = engine.state.in_flight[0]
        fold(StepCommitted(step=scheduled.step, tokens=pack_tokens([1] * int(scheduled.samples.sum()))))
    return frames


@pytest.mark.parametrize("request_count", [1, 8, 64, 256])
def test_a_steady_step_takes_no_more_of_the_ring_whatever_the_batch(request_count: int) -> None:
    frames = frames_of_a_run(request_count)
    steady = [frame.events for frame in frames[10:] if not frame.admitted]
    assert len(steady) > 20 and all(isinstance(events[0], StepCommitted) for events in steady)
    assert all(len(events[0].tokens) == 4 * request_count for events in steady)
    assert max(ring_bytes(encode_events(events)) for events in steady) <= STEADY_BYTES_MAX


def test_a_steady_step_after_years_takes_no_more() -> None:
    events = [StepCommitted(step=2**63 - 2, tokens=bytes(4 * 1024)), StepPlanned(step=2**63)]
    assert ring_bytes(encode_events(events)) <= STEADY_BYTES_MAX


@pytest.mark.parametrize("request_count", [1, 8, 64, 256])
def test_admissions_of_a_run_cost_little_beside_what_was_asked(request_count: int) -> None:
    frames = frames_of_a_run(request_count)
    said = [event for frame in frames for event in frame.events if isinstance(event, RequestArrived)]
    assert len(said) == sum(frame.admitted for frame in frames) == request_count
    asked = sum(len(event.prompt) + parameter_bytes(event) for event in said)
    messages = [encode_events(frame.events) for frame in frames]
    assert ring_bytes(*messages) <= asked + ADMISSION_BYTES_MAX * request_count + STEADY_BYTES_MAX * len(frames)


@pytest.mark.parametrize("token_count", [1, 60, 16_000, 200_000])
@pytest.mark.parametrize("place", [0, 200, 60_000])
def test_an_admission_costs_little_at_the_far_ends_of_its_fields(token_count: int, place: int) -> None:
    """A long prompt, a late place in the queue, a late id; without the padding, which the frame pays once."""
    event = arrival(LATE, token_count, name="chatcmpl-0123456789abcdef0123456789abcdef", cache_salt="salt")
    steady = encode_events([StepCommitted(step=LATE, tokens=b""), StepPlanned(step=LATE + 2)])
    admitting = encode_events(
        [StepCommitted(step=LATE, tokens=b""), event, StepPlanned(step=LATE + 2, admitted=((place, 65_535),))]
    )
    overhead = len(admitting) - len(steady) - len(event.prompt) - parameter_bytes(event)
    assert 0 < overhead <= ADMISSION_BYTES_MAX


def test_a_replica_fed_by_broadcast_has_the_same_digest() -> None:
    replica = start(started_with(config_of(**config_for(8))))
    for events, _, state in frames_of_a_run(8):
        for event, reported in zip(events, decode_events(encode_events(events), replica.next_id), strict=True):
            own = isinstance(event, StepCommitted)  # a rank has its tokens from its own sampling
            replica = reduce(replica, msgspec.structs.replace(reported, tokens=event.tokens) if own else reported)
        assert (digest(replica), replica.token_digest) == (digest(state), state.token_digest)
