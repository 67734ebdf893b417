"""Framing: any sizes through any ring, broken memory is one clear error: no hang, nothing torn, no huge allocation."""

from __future__ import annotations

import os
import random
import threading
import time
import tracemalloc
from contextlib import ExitStack

import pytest
from hypothesis import given, settings, strategies as st

from vnext.runtime.processes import futex
from vnext.runtime.transport.ring import memory_plain
from vnext.runtime.transport.ring.common import RingClosed, RingCorrupt
from vnext.runtime.transport.ring.memory import Segment
from vnext.runtime.transport.ring.memory_plain import LINE_BYTES
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

FORMS = {"chosen": None, "plain": futex.choose_wait_method()}
CAPACITY_BYTES = 1024
HANG_S = 60.0


@pytest.fixture(params=FORMS)
def waits(request: pytest.FixtureRequest) -> futex.WaitMethod | None:
    return FORMS[request.param]


def sizes_around(capacity_bytes: int) -> st.SearchStrategy[int]:
    """Message sizes in bytes: at each edge of the head, of a part, of the ring, of several parts; and anything."""
    half = capacity_bytes // 2
    edges = [0, 1, 7, 8, 9, half - 8, half - 1, half, half + 1, 2 * half, 2 * half + 1, 5 * half, 5 * half + 3]
    return st.one_of(st.sampled_from(edges), st.integers(0, 3 * capacity_bytes))


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """(capacity, readers, sizes of messages)"""
    capacity_bytes = draw(st.one_of(st.integers(64, 200), st.sampled_from([256, 1000, 4096])))
    return capacity_bytes, draw(st.integers(1, 3)), draw(st.lists(sizes_around(capacity_bytes), max_size=12))


@given(st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(FORMS)), rings(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=120)
def test_any_sizes_pass_any_ring(writing: str, reading: str, ring: tuple[int, int, list[int]], number: int) -> None:
    """Also a compiled writer with plain readers and the reverse, and across the wrap of the messages' numbers."""
    capacity_bytes, reader_count, sizes = ring
    rng = random.Random(len(sizes))
    messages = [rng.randbytes(size) for size in sizes]
    with ExitStack() as stack:
        made = RingWriter.create(capacity_bytes=capacity_bytes, reader_count=reader_count, waits=FORMS[writing])
        writer = stack.enter_context(made)
        attached = [RingReader.attach(writer.name, index, waits=FORMS[reading]) for index in range(reader_count)]
        readers = [stack.enter_context(reader) for reader in attached]
        for end in (writer, *readers):
            end._number = number
        thread = threading.Thread(target=lambda: [writer.write(message, timeout_s=HANG_S) for message in messages])
        thread.start()
        received: list[list[bytes]] = [[] for _ in readers]
        end_s = time.monotonic() + HANG_S
        while any(len(got) < len(messages) for got in received) and time.monotonic() < end_s:
            for reader, got in zip(readers, received):
                if (message := reader.read(timeout_s=0.0002)) is not None:
                    got.append(message)
        thread.join(HANG_S)
        assert received == [messages] * reader_count
        assert writer.used_bytes == 0


# ---- broken memory -----------------------------------------------------------------------------------------------


class Broken:
    """A ring with a writer, a reader and a hand that writes anywhere."""

    def __init__(self, waits: futex.WaitMethod | None) -> None:
        self.writer = RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=1, waits=waits)
        self.reader = RingReader.attach(self.writer.name, 0, spin_us=0, waits=waits)
        self.hand = Segment.open(self.writer.name, None)

    def poke(self, offset_bytes: int, value: bytes) -> None:
        self.hand._mapping[offset_bytes : offset_bytes + len(value)] = value

    def close(self) -> None:
        for end in (self.hand, self.reader, self.writer):
            end.close()


@pytest.fixture
def broken(waits: futex.WaitMethod | None):
    made = Broken(waits)
    yield made
    made.close()


WRITER_LINE, READER_LINE, DATA = LINE_BYTES, 2 * LINE_BYTES, 3 * LINE_BYTES


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize("position", [8, 4, 2**63, 2**64 - 8, 40 + CAPACITY_BYTES, 32 + 1], ids=hex)
def test_a_broken_position_of_the_writer_is_an_error_to_the_reader(broken: Broken, position: int) -> None:
    """Behind the reader, not aligned, further than the ring is long."""
    broken.writer.write(bytes(24))
    assert broken.reader.read() == bytes(24)
    broken.poke(WRITER_LINE, u64(position))
    for _ in range(2):  # it does not heal by asking again
        with pytest.raises(RingCorrupt, match="writer stands at"):
            broken.reader.read(timeout_s=HANG_S)


@pytest.mark.parametrize("position", [8 + 2**20, 2**63, 2**64 - 8, 4, 516], ids=hex)
def test_a_broken_position_of_a_reader_is_an_error_to_the_writer(broken: Broken, position: int) -> None:
    broken.writer.write(bytes(500))
    broken.poke(READER_LINE, u64(position))
    with pytest.raises(RingCorrupt, match="reader 0 of the ring stands at"):
        for _ in range(3):
            broken.writer.write(bytes(500), timeout_s=HANG_S)


def test_an_unknown_presence_is_an_error_to_both(broken: Broken) -> None:
    broken.writer.write(bytes(500))
    assert broken.reader.read() == bytes(500)
    broken.poke(WRITER_LINE + 8, b"\x03\x00\x00\x00")
    broken.poke(READER_LINE + 8, b"\xff\xff\xff\xff")
    with pytest.raises(RingCorrupt, match="unknown state 3"):
        broken.reader.read(timeout_s=HANG_S)
    with pytest.raises(RingCorrupt, match="unknown state 3"):
        for _ in range(3):
            broken.writer.write(bytes(500), timeout_s=HANG_S)


@pytest.mark.parametrize("word", [0, 1], ids=["size", "check"])
@pytest.mark.parametrize("bit", range(0, 32, 3))
def test_one_changed_bit_of_a_head_is_an_error(broken: Broken, word: int, bit: int) -> None:
    broken.writer.write(bytes(100))
    offset = DATA + 4 * word + bit // 8
    broken.poke(offset, bytes([broken.hand._mapping[offset] ^ 1 << bit % 8]))
    for _ in range(2):
        with pytest.raises(RingCorrupt, match="no head of message 0"):
            broken.reader.read(timeout_s=HANG_S)


@pytest.mark.parametrize("size_bytes", [101, 105, 512, 513, 1025, 2**20, 2**30, 2**30 + 1, 2**32 - 1])
def test_a_size_with_a_right_check_is_not_believed_either(broken: Broken, size_bytes: int) -> None:
    """Whoever wrote it knew the rule; still nothing is read beyond what is there, and nothing is allocated for it."""
    broken.writer.write(bytes(96))
    broken.poke(DATA, memory_plain.head_of(0, size_bytes))
    tracemalloc.start()
    try:
        with pytest.raises(RingCorrupt):
            broken.reader.read(timeout_s=HANG_S)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**10
    finally:
        tracemalloc.stop()


def test_a_message_that_was_lost_is_noticed(broken: Broken) -> None:
    broken.writer.write(b"a" * 8)
    broken.writer.write(b"b" * 8)
    broken.reader._position = 16  # as a reader stands that has skipped one
    with pytest.raises(RingCorrupt, match="no head of message 0"):
        broken.reader.read(timeout_s=HANG_S)


def test_a_part_shorter_than_it_must_be_is_an_error(broken: Broken) -> None:
    broken.poke(DATA, memory_plain.head_of(0, 2000))
    broken.poke(WRITER_LINE, u64(8 + 256))
    with pytest.raises(RingCorrupt, match="where a part of a message of 2000 is due"):
        broken.reader.read(timeout_s=HANG_S)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"x"), (8, b"\x01"), (8, b"\x03"), (12, b"\x00"), (12, b"\x02"), (12, b"\xff\xff\xff\xff"), (16, b"\x08"),
        (16, u64(0)), (16, u64(2**63)), (16, u64(2**64 - 1)), (16, u64(CAPACITY_BYTES + 16)),
        (16, u64(CAPACITY_BYTES - 128)),
    ],
)  # fmt: skip
def test_a_broken_header_is_refused_at_attach(waits: futex.WaitMethod | None, offset: int, value: bytes) -> None:
    with RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=1, waits=waits) as writer:
        hand = Segment.open(writer.name, None)
        hand._mapping[offset : offset + len(value)] = value
        hand.close()
        before = len(os.listdir("/dev/fd"))
        with pytest.raises(ValueError, match="not a ring|a broken ring"):
            RingReader.attach(writer.name, 0, waits=waits)
        assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("content", [b"", b"vnext", bytes(4096)], ids=["empty", "short", "zeros"])
def test_a_file_that_is_no_ring_is_refused(content: bytes, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a ring"):
        RingReader.attach(str(path), 0)


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(ValueError, match="not a ring"):
        RingReader.attach(os.devnull, 0)


def pass_messages_over_damage(ring: Broken, rng: random.Random) -> str:
    """The end of a run in which the memory is damaged once; whatever comes until then is the next message."""
    sent: list[bytes] = []
    received = 0
    try:
        for turn in range(12):
            sent.append(rng.randbytes(rng.choice([0, 3, 8, 200, 512])))
            ring.writer.write(sent[-1], timeout_s=0)
            if turn == 5:
                line = rng.choice([WRITER_LINE, WRITER_LINE + 8, READER_LINE, READER_LINE + 8])
                ring.poke(line + rng.randrange(8), rng.randbytes(rng.choice([1, 2, 8])))
            if (message := ring.reader.read(timeout_s=0)) is not None:
                assert message == sent[received]
                received += 1
    except (RingCorrupt, RingClosed, TimeoutError) as error:
        return type(error).__name__
    return "passed"


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_ends_in_the_right_messages_or_in_an_error(waits: futex.WaitMethod | None, seed: int) -> None:
    rng, ends = random.Random(seed), set()
    for _ in range(40):
        ring = Broken(waits)
        ends.add(pass_messages_over_damage(ring, rng))
        ring.close()
    assert "RingCorrupt" in ends
