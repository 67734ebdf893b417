"""The compiled work on the log's bytes is the plain one, and skimming counts what reading would have decoded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings, strategies as st
from log_drive import drawn_config, record, small_config, started

from vnext.log import codec, log_bytes, log_plain, skimming
from vnext.log.codec import Frame, LogEnd, RankDigest, SegmentStart
from vnext.log.reading import Skim, read, read_frames
from vnext.state.events import RequestAborted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.params import Constraint, Sampling

FORMS = [form for form in (log_plain, log_bytes._log) if form is not None]
SKIMS = [skimming.skim, *(form.skim for form in FORMS[1:])]
ROOM = 64
compiled = pytest.mark.skipif(log_bytes._log is None, reason="the compiled forms are not built here: no C compiler")
bounds = st.sampled_from([0, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32])
numbers = st.one_of(st.integers(0, 2**64 - 1), bounds)


# ---- writing -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(numbers, numbers, numbers, st.lists(st.integers(-1, 2**18), max_size=400), st.sampled_from([2, 3, 4]))
def test_a_steady_frame_is_what_msgspec_makes_of_it(first_event, committed, planned, tokens, width):
    events = (StepCommitted(step=committed, tokens=pack_tokens(tokens)), StepPlanned(step=planned))
    due = codec.encode_body(first_event, events, (), 0, width)
    for form in FORMS:
        frame = bytearray(b"left from another frame")
        before = bytes(frame)
        if form.put_steady(frame, first_event, committed, events[0].tokens, planned, width):
            assert frame == bytes(codec.FRAME_HEAD) + due
        else:
            assert frame == before and due.endswith(b"\4"), "a token that does not fit widens the frame"


@given(st.binary(max_size=900), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_sealing_chains_and_checks(body, previous, state_digest):
    digest = codec.chained(previous, state_digest, body)
    for form in FORMS:
        frame = bytearray()
        codec.put_frame(frame, body)
        assert form.seal_frame(frame, previous, state_digest, xxhash.xxh3_64_intdigest) == digest
        assert frame == codec.encode_frame(digest, body)


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_is_refused(form):
    with pytest.raises(ValueError):
        form.seal_frame(bytearray(15), 0, 0, xxhash.xxh3_64_intdigest)
    for width in (1, 5):
        with pytest.raises(ValueError):
            form.put_steady(bytearray(), 0, 0, b"", 0, width)
        with pytest.raises(ValueError):
            form.narrow(b"", width)
    with pytest.raises(ValueError, match="not a whole number"):
        form.widen(b"12345", 3)


@compiled
def test_a_hash_that_fails_or_shrinks_its_frame_is_an_error():
    def shrink(frame: bytearray) -> int:
        del frame[8:]
        return 1

    for hashed, error in ((lambda frame: -1, OverflowError), (lambda frame: "no", TypeError), (shrink, ValueError)):
        with pytest.raises(error):
            log_bytes._log.seal_frame(bytearray(40), 0, 0, hashed)


# ---- reading -----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=40), st.integers(-2, 60))
def test_the_end_of_a_record_is_found_alike(payload, offset):
    data = codec.seal(b"first") + codec.seal(payload)
    assert len({form.record_end(data, offset) for form in FORMS}) == 1
    for form in FORMS:
        assert form.record_end(data, 13) == len(data) and form.record_end(data[:-1], 13) == 0
        assert form.record_end(data[:-1] + bytes([data[-1] ^ 1]), 13) == -1


def skimmed(skim, data: bytes, offset: int, next_event: int, room: int = ROOM) -> tuple:
    """Counts, and what was put into the buffers."""
    buffers = [np.full(room, -7, dtype=dtype) for dtype in (np.int32, np.int32, np.int64)]
    counts = skimming.Skimmed(*skim(data, offset, next_event, *buffers))
    sizes = (counts.commits, counts.arrivals, counts.arrivals)
    return counts, *(buffer[:size].tolist() for buffer, size in zip(buffers, sizes))


def both(data: bytes, offset: int, next_event: int, room: int = ROOM) -> tuple:
    found = [skimmed(skim, data, offset, next_event, room) for skim in SKIMS]
    assert all(each == found[0] for each in found)
    return found[0]


def totals(items: list) -> Counter:
    """What a reading held, however it came."""
    count: Counter = Counter()
    for item in items:
        if isinstance(item, Skim):
            found = item.counts
            count.update(frames=found.frames, plans=found.plans, preempted=found.preempted, aborts=found.aborts)
            count.update(aborted=found.aborted, ranks=found.rank_digests)
            count.update(commits=found.commits, arrivals=found.arrivals)
            count.update(samples=int(item.batches.sum()), prompts=int(item.prompts.sum()), times=int(item.times.sum()))
        elif isinstance(item, Frame):
            count.update(frames=1, ranks=len(item.rank_digests))
            for event in item.events:
                count.update(fields_of(event))
    return +count


def fields_of(event) -> dict[str, int]:
    match event:
        case StepPlanned():
            return {"plans": 1, "preempted": len(event.preempted)}
        case StepCommitted():
            return {"commits": 1, "samples": len(event.tokens) // 4}
        case RequestArrived():
            return {"arrivals": 1, "prompts": len(event.prompt) // 4, "times": event.arrival_ns}
        case RequestAborted():
            return {"aborts": 1, "aborted": len(event.ids)}
    return {}


def segments(log_dir: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(log_dir.iterdir())]


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_skimming_counts_what_reading_decodes(tmp_path, privacy):
    skims = 0
    for seed in range(12):
        data = segments(record(tmp_path / str(seed), privacy, drawn_config(random.Random(seed)), seed=seed, size=2000))
        whole, runs = list(read(data)), list(read(data, skim=True))
        assert totals(whole) == totals(runs) and whole[-1] == runs[-1] and whole[-1].kind == "complete"
        starts = [[item for item in items if isinstance(item, SegmentStart)] for items in (whole, runs)]
        assert starts[0] == starts[1] and len(starts[0]) > 1
        skims += sum(item.counts.frames for item in runs if isinstance(item, Skim))
        for room in (0, 1, 3, 10**4):
            start = len(codec.open_segment(whole[0].header)[0])
            both(data[0], start, 1, room)
    assert skims > 500


def test_damage_ends_a_skim_where_it_ends_a_reading(tmp_path):
    rng = random.Random(3)
    data = b"".join(segments(record(tmp_path / "log", arrivals=6)))
    start = next(iter(read([data]))).header
    offset = len(codec.open_segment(start)[0])
    for _ in range(1500):
        damaged = bytearray(data)
        damaged[rng.randrange(offset, len(data))] ^= 1 << rng.randrange(8)
        cut = bytes(damaged[: rng.randrange(offset, len(data) + 1)])
        both(cut, offset, 1)
        *whole, end = read([cut])
        *runs, runs_end = read([cut], skim=True)
        assert end == runs_end and isinstance(end, LogEnd) and totals(whole) == totals(runs)


SAMPLING = Sampling(
    seed=2**64 - 1, max_tokens=70_000, top_k=-1, logit_bias=((5, 1.5), (300, -2.0)), stop_token_ids=(1, -1),
    retention=((70_000, 300), (5, 86_400)),
)
EVENTS = (
    RequestArrived(
        id=300, name="a name", prompt=pack_tokens([1, 2, 3]), sampling=SAMPLING, priority=-200, arrival_ns=2**40,
        cache_salt="salt",
    ),
    RequestAborted(ids=(1, 500), reason="client"),
    StepCommitted(step=9, tokens=pack_tokens([5] * 20)),
    StepPlanned(step=10, preempted=(3, 2), changed=((1, 7),), admitted=((0, 1000),)),
)  # fmt: skip
HEADER = codec.first_header(started(small_config()), "full", "1")
RANKS = (RankDigest(0, 9, 2**64 - 1), RankDigest(1, 9, 3))


def test_a_frame_of_everything_plain_is_skimmed():
    body = codec.encode_body(7, EVENTS, RANKS, 0, 2)
    counts, batches, prompts, times = both(codec.encode_frame(77, body), 0, 7)
    assert (counts.frames, counts.next_event, counts.digest, counts.rank_digests) == (1, 11, 77, 2)
    assert (counts.plans, counts.preempted, counts.aborts, counts.aborted) == (1, 2, 1, 2)
    assert (batches, prompts, times) == ([20], [3], [2**40])
    assert both(codec.encode_frame(77, body), 0, 6)[0].frames == 0, "an event number that is not due"
    assert both(codec.encode_frame(77, codec.encode_body(7, EVENTS, RANKS, 1, 2)), 0, 7)[0].frames == 0, "frames are missing"


def test_a_frame_with_a_constraint_is_read_in_full():
    constrained = msgspec.structs.replace(SAMPLING, constraint=Constraint(grammar="g", reasoning_end=(5,)))
    events = (msgspec.structs.replace(EVENTS[0], sampling=constrained),)
    header, frame = codec.open_segment(HEADER)[0], codec.encode_frame(77, codec.encode_body(1, events, RANKS, 0, 2))
    assert both(frame, 0, 1)[0].frames == 0
    *_, item, end = read([header + frame], skim=True)
    assert item.events == events and end.kind == "complete"


def places(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Paths to everything in nested lists that is no list itself."""
    if not isinstance(value, list):
        yield path
        return
    for index, each in enumerate(value):
        yield from places(each, (*path, index))


@pytest.mark.parametrize("wrong", [-1, -(2**40), 2**64 - 1, 1.5, "x", b"x", None, True, []], ids=repr)
def test_a_frame_with_one_wrong_field_is_skimmed_only_if_it_can_be_read(wrong):
    """Each field by itself: a check of several at once must ask for all of them."""
    header, plain = codec.open_segment(HEADER)[0], codec.encode_body(1, EVENTS, RANKS, 0, 2)
    skimmed_frames = 0
    for path in places(msgspec.msgpack.decode(plain)):
        body = msgspec.msgpack.decode(plain)
        inner = body
        for index in path[:-1]:
            inner = inner[index]
        inner[path[-1]] = wrong
        segment = header + codec.encode_frame(5, msgspec.msgpack.encode(body))
        counts, *_ = both(segment, len(header), 1)
        *whole, end = read([segment])
        *runs, runs_end = read([segment], skim=True)
        assert end == runs_end and totals(whole) == totals(runs) and (not counts.frames or end.kind == "complete"), path
        skimmed_frames += counts.frames
    assert skimmed_frames or not isinstance(wrong, int), "a number may stand in some field"


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_no_frame_is_skimmed_that_could_not_be_read(data):
    """Changed bytes with a repaired checksum: whatever is counted, msgspec accepts, and counts the same."""
    header = codec.open_segment(HEADER)[0]
    body = bytearray(codec.encode_body(1, EVENTS, RANKS, 0, 2))
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    segment = header + codec.encode_frame(5, bytes(body))
    counts, *_ = both(segment, len(header), 1)
    *whole, end = read([segment])
    *runs, runs_end = read([segment], skim=True)
    assert end == runs_end and totals(whole) == totals(runs) and (not counts.frames or end.kind == "complete")


@compiled
def test_the_installed_form_is_the_compiled_one():
    assert log_bytes.impl is log_bytes._log and log_bytes.skim is log_bytes._log.skim


@pytest.mark.parametrize("event", [5, True, "text", b"\4\1", {0: 4, 1: 9, 2: b""}, [], [None]], ids=repr)
def test_what_is_no_event_is_not_skimmed(event):
    body = msgspec.msgpack.decode(codec.encode_body(7, EVENTS, RANKS, 0, 2))
    body[1][0] = event
    assert both(codec.encode_frame(77, msgspec.msgpack.encode(body)), 0, 7)[0].frames == 0


def test_a_frame_of_an_earlier_version_is_skimmed():
    """It has a time behind the five fields of today and then no details."""
    body = [*msgspec.msgpack.decode(codec.encode_body(7, EVENTS, RANKS, 0, 2)), 123_456, []]
    assert both(codec.encode_frame(77, msgspec.msgpack.encode(body)), 0, 7)[0].frames == 1
    for further in ([], ["details"]), (-1, []), (5, [], 0):
        wrong = msgspec.msgpack.encode([*body[:5], *further])
        assert both(codec.encode_frame(77, wrong), 0, 7)[0].frames == 0


def steady_runs(data: bytes, next_event: int, room: tuple[int, int]) -> tuple:
    """What the two forms read as steady frames, in buffers for so many tokens and frames."""
    found = []
    for skim in [skimming.skim_steady, *(form.skim_steady for form in FORMS[1:])]:
        tokens, counts, ends = np.zeros(room[0], np.int32), np.zeros(room[1], np.int32), np.zeros(room[1], np.int64)
        result = skim(data, 0, next_event, tokens, counts, ends)
        found.append((*result, tokens[: result[3]].tolist(), counts[: result[2]].tolist(), ends[: result[2]].tolist()))
    assert all(each == found[0] for each in found)
    return found[0]


def test_steady_frames_are_read_one_behind_the_other():
    def frame(number: int, step: int, samples: list[int]) -> bytes:
        return codec.encode_frame(60 + number, codec.encode_body(
            number, (StepCommitted(step=step, tokens=pack_tokens(samples)), StepPlanned(step=step + 1)), (), 0, 2
        ))  # fmt: skip

    frames = [frame(7, 3, [1, 2]), frame(9, 4, [3]), frame(11, 5, [4, 5, 6])]
    ends = np.cumsum([len(each) for each in frames]).tolist()
    data = b"".join(frames)
    assert steady_runs(data, 7, (9, 9)) == (ends[2], 71, 3, 6, 3, 4, [1, 2, 3, 4, 5, 6], [2, 1, 3], ends)
    assert steady_runs(data, 7, (9, 2))[1:4] == steady_runs(data, 7, (5, 9))[1:4] == (69, 2, 3), "no room for the third"
    assert steady_runs(data, 8, (9, 9))[2] == 0, "an event that is not due"
    assert steady_runs(frames[0] + frame(9, 5, [3]), 7, (9, 9))[2] == 1, "a step is missing"
    assert steady_runs(frames[0] + frame(10, 4, [3]), 7, (9, 9))[2] == 1, "an event is missing"


@pytest.mark.parametrize("kind", ["damaged", "torn"])
def test_a_part_ends_where_its_damage_begins(kind):
    good = codec.encode_frame(1, codec.encode_body(7, EVENTS, (), 0, 2))
    bad = bytearray(codec.encode_frame(2, codec.encode_body(11, EVENTS, (), 0, 2)))
    bad = bad[:-3] if kind == "torn" else bad[:-1] + bytes([bad[-1] ^ 1])
    (offset, frame), (at, end) = read_frames(good + bytes(bad), 7, segment=4)
    assert (offset, frame.first_event, at) == (0, 7, len(good))
    assert (end.kind, end.segment, end.offset_bytes, end.ignored_bytes) == (kind, 4, len(good), len(bad)) and end.message


def test_a_view_of_a_segment_reads_as_its_bytes():
    segment = codec.open_segment(HEADER)[0] + codec.encode_frame(5, codec.encode_body(1, EVENTS, RANKS, 0, 2))
    assert list(read([memoryview(segment)])) == list(read([segment])) and len(list(read([segment]))) == 3
