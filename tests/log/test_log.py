"""The log's bytes: every event comes back, damage shortens the log and never changes it, and it is small."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vnext.log import codec, log_bytes, log_plain
from vnext.log.codec import Frame, LogEnd, RankDigest, SegmentStart, describe, schema_digest
from vnext.log.reading import read
from vnext.log.timestamps import TimestampEncoder
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.params import Sampling

FORMS = [form for form in (log_plain, log_bytes._log) if form is not None]
CONFIG = SchedulerConfig(
    block_size=16, page_count=64, max_num_batched_tokens=256, max_num_seqs=16, max_model_len=512, vocab_size=128_256
)
STARTED = EngineStarted(
    config=CONFIG, model="toy", model_digest="00", world_size=2, environment={"isa": "any"}, started_ns=1
)
ARRIVAL = RequestArrived(
    id=0, name="first", prompt=pack_tokens([1, 2, 128_255]), sampling=Sampling(seed=2**64 - 1, max_tokens=3),
    priority=-1, arrival_ns=5, cache_salt="salt",
)  # fmt: skip
FRAMES: list[tuple] = [
    (ARRIVAL, StepPlanned(step=0, admitted=((0, 3),))),
    (StepCommitted(step=0, tokens=pack_tokens([77])), StepPlanned(step=1)),
    (RequestAborted(ids=(0,), reason="client"), PrefixCacheReset()),
]


RANKS = (RankDigest(0, 0, 9), RankDigest(1, 0, 2**64 - 1))


def segment(frames, header=None, first_event=1, ranks=RANKS) -> tuple[bytes, int]:
    """One segment with these frames, and its last chained digest."""
    header = header or codec.first_header(STARTED, "full", "1.0")
    data, chain = codec.open_segment(header)
    for events in frames:
        body = codec.encode_body(first_event, events, ranks, 0, header.token_width)
        chain = codec.chained(chain, 1234, body)
        data += codec.encode_frame(chain, body)
        first_event += len(events)
    return data, chain


def events_of(segments) -> list:
    return [event for item in read(segments) if isinstance(item, Frame) for event in item.events]


def end_of(segments) -> LogEnd:
    *rest, end = read(segments)
    assert isinstance(end, LogEnd) and not any(isinstance(item, LogEnd) for item in rest)
    return end


def test_a_log_comes_back_whole():
    data, chain = segment(FRAMES)
    start, *frames, end = read([data])
    assert isinstance(start, SegmentStart) and start.header.started == STARTED and start.header.token_width == 3
    assert [frame.events for frame in frames] == FRAMES
    assert [frame.first_event for frame in frames] == [1, 3, 5] and frames[-1].digest == chain
    assert frames[0].rank_digests == RANKS
    assert end == LogEnd(kind="complete", message="", segment=0, offset_bytes=len(data), ignored_bytes=0)


def test_the_chain_can_be_recomputed_from_what_is_read():
    start, *frames, _ = read([segment(FRAMES)[0]])
    chain = start.chain
    for frame in frames:
        chain = codec.chained(chain, 1234, frame.body)
        assert chain == frame.digest


def test_truncation_at_every_byte_gives_a_shorter_log():
    data, _ = segment(FRAMES)
    whole = events_of([data])
    for size in range(len(data)):
        found = events_of([data[:size]])
        assert found == whole[: len(found)] and len(found) < len(whole)
    assert end_of([data[:-1]]).kind == "torn" and end_of([data[:5]]).kind == "unusable"


def test_a_flip_of_every_byte_never_gives_a_wrong_event():
    data, _ = segment(FRAMES)
    whole, header_size, last = events_of([data]), len(segment([])[0]), len(segment(FRAMES[:-1])[0])
    for place in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= mask
            found, end = events_of([bytes(damaged)]), end_of([bytes(damaged)])
            assert found == whole[: len(found)] and len(found) < len(whole)
            assert end.message and (place >= header_size or end.kind == "unusable")
            assert place >= last or end.kind != "torn", "whole records follow"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_splice_never_raises_and_never_gives_a_wrong_event(data):
    written, _ = segment(FRAMES)
    at = data.draw(st.integers(0, len(written)))
    until = data.draw(st.integers(at, len(written)))
    found = events_of([written[:at] + data.draw(st.binary(max_size=40)) + written[until:]])
    assert found == events_of([written])[: len(found)]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_a_frame_with_a_right_checksum_and_any_content_never_raises(payload):
    assert end_of([segment(FRAMES[:1])[0] + codec.seal(payload)]).kind == "damaged" or not payload


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_frame_with_a_repaired_checksum_never_raises(data):
    """Not an accident any more; the chained digest tells, but the reader must survive it."""
    body = bytearray(codec.encode_body(1, FRAMES[0], (RankDigest(0, 0, 9),), 0, 3))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert isinstance(list(read([segment([])[0] + codec.encode_frame(5, bytes(body))]))[-1], LogEnd)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_header_with_a_repaired_checksum_never_raises(data):
    payload = bytearray(codec.frame_encoder.encode(codec.first_header(STARTED, "full", "1.0")))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    assert isinstance(list(read([codec.MAGIC + codec.seal(bytes(payload))]))[-1], LogEnd)


def test_zeros_behind_the_last_frame_are_a_torn_tail():
    data, _ = segment(FRAMES)
    end = end_of([data + bytes(100)])
    assert (end.kind, end.offset_bytes, end.ignored_bytes) == ("torn", len(data), 100)


def test_segments_follow_each_other_only_if_they_chain():
    header = codec.first_header(STARTED, "full", "1.0")
    first, chain = segment(FRAMES[:2], header)
    second, _ = segment(FRAMES[2:], codec.next_header(header, chain, 5), first_event=5)
    foreign, _ = segment(FRAMES[2:], codec.next_header(header, chain ^ 1, 5), first_event=5)
    assert events_of([first, second]) == [event for events in FRAMES for event in events]
    assert end_of([first, foreign]).kind == "unchained" and events_of([first, foreign]) == events_of([first])
    header_size = len(codec.open_segment(codec.next_header(header, chain, 5))[0])
    for size in range(len(second)):
        assert end_of([first, second[:size]]).kind == ("torn" if size != header_size else "complete")
    for place in range(header_size):
        flipped = second[:place] + bytes([second[place] ^ 0x40]) + second[place + 1 :]
        assert end_of([first, flipped]).kind == "damaged", place


def test_a_cut_segment_with_another_behind_it_is_damage():
    header = codec.first_header(STARTED, "full", "1.0")
    first, chain = segment(FRAMES[:2], header)
    second, _ = segment(FRAMES[2:], codec.next_header(header, chain, 5), first_event=5)
    end = end_of([first[:-1], second])
    assert end.kind == "damaged" and "another segment follows" in str(end)
    assert events_of([first[:-1], second]) == list(FRAMES[0])


def test_an_engine_stopped_before_its_first_record_leaves_nothing_to_read():
    header_size = len(segment([])[0])
    for size in range(header_size):
        end = end_of([segment([])[0][:size]])
        assert end.kind == "unusable" and "stopped before" in end.message


def test_a_newer_format_is_refused_with_a_remedy():
    header = msgspec.structs.replace(codec.first_header(STARTED, "full", "1.0"), format_version=99)
    end = end_of([codec.open_segment(header)[0]])
    assert end.kind == "unusable" and "99" in end.message and "newer vnext" in end.message


def test_a_gap_is_read_only_if_the_frame_admits_it():
    data, chain = segment(FRAMES[:1])
    for lost, kind in ((2, "complete"), (0, "damaged")):
        body = codec.encode_body(9, FRAMES[2], (), lost, 3)
        assert end_of([data + codec.encode_frame(codec.chained(chain, 1, body), body)]).kind == kind


@pytest.mark.parametrize("bound, width", [(0, 4), (1, 2), (65_536, 2), (65_537, 3), (2**24, 3), (2**24 + 1, 4)])
def test_the_width_follows_the_vocabulary(bound, width):
    assert codec.width_bytes(bound) == width


def test_every_field_of_tokens_is_narrowed_and_comes_back():
    resumed = RequestResumed(**msgspec.structs.asdict(ARRIVAL) | {"sampling": ARRIVAL.sampling, "generated": pack_tokens([4])})
    events = {type(event): event for event in (ARRIVAL, resumed, StepCommitted(step=0, tokens=b"", counts=b"\2", drafted=b"\1"))}
    assert events.keys() == {kind for kind in get_args(AnyEvent) if kind.traits.tokens}
    for kind, event in events.items():
        for field in kind.traits.tokens:
            changed = msgspec.structs.replace(event, **{field: pack_tokens([1, 128_255, 7])})
            (narrow,), width = codec.narrow_events([changed], 3)
            assert width == 3 and len(getattr(narrow, field)) == 9
            assert events_of([segment([(changed,)])[0]]) == [changed]


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.sampled_from([2, 3, 4]))
def test_packing_is_lossless_exactly_when_the_tokens_fit(tokens, width):
    data = pack_tokens(tokens)
    for form in FORMS:
        packed = form.narrow(data, width)
        assert (packed is not None) == (width == 4 or all(0 <= token < 256**width for token in tokens))
        assert packed is None or form.widen(packed, width) == data


def test_a_token_beyond_the_vocabulary_widens_its_frame():
    event = StepCommitted(step=0, tokens=pack_tokens([5, 2**31 - 1]))
    assert events_of([segment([(event,)])[0]]) == [event]


@pytest.mark.parametrize("batch, bytes_max", [(8, 10.0), (64, 4.0), (256, 4.0)])
@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_bytes_per_generated_token(batch, bytes_max, privacy):
    """A million steps on, a plan and a commit in each frame, four ranks' digests every 64 steps; and each step's stamp."""
    width = codec.first_header(STARTED, privacy, "1.0").token_width
    size = 0
    for step in range(1_000_000, 1_000_064):
        tokens = pack_tokens(np.random.default_rng(step).integers(0, CONFIG.vocab_size, batch))
        events = (StepCommitted(step=step - 1, tokens=tokens), StepPlanned(step=step))
        ranks = [RankDigest(rank, step, 2**63) for rank in range(4)] if step % CONFIG.digest_interval == 0 else []
        size += len(codec.encode_frame(2**63, codec.encode_body(2 * step, events, ranks, 0, width)))
    timestamp_encoder = TimestampEncoder(0)
    for step in range(1_000_000, 1_000_064):
        timestamp_encoder.took(step, 9_000)
        timestamp_encoder.add(2 * step, 10_000 * step)
    timestamp_encoder.end_block()
    assert (size + len(timestamp_encoder.data)) / (64 * batch) <= bytes_max


def test_the_schema_digest_names_every_field():
    assert "StepCommitted[4](step: int, tokens: bytes, counts: bytes = b'', drafted: bytes = b'')" in describe()
    assert "stop_token_ids: tuple[int, Ellipsis] = ()" in describe()
    assert 0 <= schema_digest() < 2**64


def test_only_a_commit_and_a_plan_as_expected_are_a_steady_frame():
    commit, plan = StepCommitted(step=1, tokens=b""), StepPlanned(step=2)
    assert codec.steady_pair([commit, plan])
    assert not any(map(codec.steady_pair, ([commit], [plan], [plan, commit], [commit, plan, plan], [commit, commit], [plan, plan])))
    for changed in ({"preempted": (0,)}, {"changed": ((0, 1),)}, {"admitted": ((0, 1),)}):
        assert not codec.steady_pair([commit, StepPlanned(step=2, **changed)])


def test_the_schema_spells_types_alike_in_every_python():
    assert "preempted: tuple[int, Ellipsis]" in describe() and "typing." not in describe()
