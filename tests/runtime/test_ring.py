"""The ring: messages arrive whole and in order, full and empty rings sleep, dead and departed ends are noticed."""

from __future__ import annotations

import hashlib
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vnext.runtime import futex, ring_memory
from vnext.runtime.ring import RingClosed, RingReader, RingWriter
from vnext.runtime.ring_memory import Cursor, Presence

ROOT = Path(__file__).parents[2]
WAIT_METHODS = [futex.choose_wait_method(), futex.SleepPoll()]

COUNT_AND_HASH = """
import hashlib, sys
from vnext.runtime.ring import RingClosed, RingReader
from vnext.runtime import futex
name, index, waits = sys.argv[1], int(sys.argv[2]), getattr(futex, sys.argv[3])()
reader = RingReader.attach(name, index, waits=waits, spin_us=20 * index)
digest, count = hashlib.sha256(), 0
while True:
    try:
        message = reader.read(timeout_s=30)
    except RingClosed:
        break
    digest.update(len(message).to_bytes(8, "little") + message)
    count += 1
print(count, digest.hexdigest())
"""

MEASURE_IDLE = """
import sys, time
from vnext.runtime.ring import RingReader
reader = RingReader.attach(sys.argv[1], 0)
reader.read()
begin_s = time.process_time()
message = reader.read(timeout_s=1.0)
print(message, time.process_time() - begin_s)
"""

ATTACH_AND_HANG = """
import sys, time
from vnext.runtime.ring import RingReader
reader = RingReader.attach(sys.argv[1], 0)
reader.read()
print("attached", flush=True)
time.sleep(60)
"""


@contextmanager
def script(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", source, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def random_messages(seed: int, capacity_bytes: int, count: int) -> list[bytes]:
    """Mostly small; some empty, some near half and the whole capacity, some several times larger."""
    chance = random.Random(seed)
    edges = [0, 1, 7, 8, 9, capacity_bytes // 2 - 8, capacity_bytes // 2, capacity_bytes // 2 + 1, capacity_bytes]
    sizes = [chance.choice([chance.randrange(200), chance.choice(edges)]) for _ in range(count - 3)]
    sizes += [capacity_bytes + 1, 3 * capacity_bytes + 5, 10 * capacity_bytes]
    chance.shuffle(sizes)
    return [chance.randbytes(size) for size in sizes]


def digest_of(messages: list[bytes]) -> str:
    digest = hashlib.sha256()
    for message in messages:
        digest.update(len(message).to_bytes(8, "little") + message)
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("reader_count", "method"), [(1, "Futex"), (3, "Futex"), (2, "SleepPoll")], ids=["one", "three", "two-polling"]
)
def test_every_reader_process_gets_every_message_in_order(reader_count: int, method: str) -> None:
    if method == "Futex" and not isinstance(futex.choose_wait_method(), futex.Futex):
        pytest.skip("this machine has no futex")
    waits = getattr(futex, method)()
    messages = random_messages(seed=reader_count, capacity_bytes=4096, count=600)
    with ExitStack() as stack:
        writer = stack.enter_context(RingWriter.create(capacity_bytes=4096, reader_count=reader_count, waits=waits))
        readers = [script(COUNT_AND_HASH, writer.name, index, method) for index in range(reader_count)]
        processes = [stack.enter_context(reader) for reader in readers]
        for message in messages:
            writer.write(message, timeout_s=30)
        writer.close()
        results = [process.communicate(timeout=30) for process in processes]
    expected = f"{len(messages)} {digest_of(messages)}\n"
    assert results == [(expected, "")] * reader_count  # nothing on stderr either: no tracker complains


@given(st.integers(64, 300), st.lists(st.one_of(st.none(), st.integers(0, 90)), max_size=60))
@settings(deadline=None, max_examples=150)
def test_ring_behaves_like_a_queue(capacity_bytes: int, actions: list[int | None]) -> None:
    """None reads, a number writes so many bytes; the ring may only refuse what does not fit beside what is unread."""
    fill, queue = itertools.cycle(range(1, 256)), []
    with RingWriter.create(capacity_bytes=capacity_bytes, reader_count=1) as writer:
        with RingReader.attach(writer.name, 0) as reader:
            for action in actions:
                if action is None:
                    assert reader.read(timeout_s=0) == (queue.pop(0) if queue else None)
                    continue
                message = bytes([next(fill)]) * min(action, writer.capacity_bytes // 2)
                fits = writer.used_bytes + 8 + -(-len(message) // 8) * 8 <= writer.capacity_bytes
                if fits:
                    writer.write(message, timeout_s=0)
                    queue.append(message)
                else:
                    with pytest.raises(TimeoutError, match="reader 0"):
                        writer.write(message, timeout_s=0)
            assert [reader.read(timeout_s=0) for _ in queue] == queue
            assert writer.used_bytes == 0


def test_full_ring_blocks_the_writer_and_counts_the_stall() -> None:
    with RingWriter.create(capacity_bytes=64, reader_count=1) as writer, RingReader.attach(writer.name, 0) as reader:
        writer.write(b"a" * 32)
        assert (writer.stall_count, writer.stall_seconds) == (0, 0.0)
        blocked = threading.Event()
        thread = threading.Thread(target=writer.write, args=(b"b" * 32, 30, blocked.set))
        thread.start()
        assert blocked.wait(30)  # the hook is called only while the ring is full
        assert writer.stall_count == 1
        assert reader.read(timeout_s=30) == b"a" * 32
        thread.join(30)
        assert reader.read(timeout_s=30) == b"b" * 32
        assert writer.stall_count == 1
        assert writer.stall_seconds > 0


def test_slowest_of_the_readers_counts() -> None:
    with RingWriter.create(capacity_bytes=64, reader_count=2) as writer, RingReader.attach(writer.name, 0) as quick:
        writer.write(b"a" * 32)
        assert quick.read() == b"a" * 32
        assert (writer.used_bytes, writer.attached_count) == (40, 1)
        with pytest.raises(TimeoutError, match="reader 1"):
            writer.write(b"b" * 32, timeout_s=0)
        with RingReader.attach(writer.name, 1) as late:
            assert late.read() == b"a" * 32  # written before it attached
            writer.write(b"b" * 32, timeout_s=0)
            assert (quick.read(), late.read()) == (b"b" * 32, b"b" * 32)


def test_closed_ring_gives_its_rest_and_then_raises() -> None:
    writer = RingWriter.create(reader_count=1)
    reader = RingReader.attach(writer.name, 0)
    writer.write(b"last words")
    writer.close()
    writer.close()
    assert reader.read() == b"last words"
    with pytest.raises(RingClosed):
        reader.read()
    with pytest.raises(RingClosed):
        writer.write(b"more")
    reader.close()
    with pytest.raises(RingClosed):
        reader.read()


@pytest.mark.parametrize("waits", WAIT_METHODS, ids=lambda waits: type(waits).__name__)
def test_closing_wakes_a_sleeping_reader(waits: futex.WaitMethod) -> None:
    begun, ended = threading.Event(), threading.Event()

    def read_until_closed(reader: RingReader) -> None:
        begun.set()
        with pytest.raises(RingClosed):
            reader.read(timeout_s=60)
        ended.set()

    with ExitStack() as stack:
        writer = stack.enter_context(RingWriter.create(reader_count=1, waits=waits))
        reader = stack.enter_context(RingReader.attach(writer.name, 0, waits=waits))
        thread = threading.Thread(target=read_until_closed, args=(reader,))
        thread.start()
        assert begun.wait(30)
        writer.close()
        assert ended.wait(30)
        thread.join()


def test_dead_reader_raises_through_the_hook() -> None:
    with ExitStack() as stack:
        writer = stack.enter_context(RingWriter.create(capacity_bytes=64, reader_count=1))
        process = stack.enter_context(script(ATTACH_AND_HANG, writer.name))
        writer.write(b"go")
        assert process.stdout.readline() == "attached\n"
        process.send_signal(signal.SIGKILL)

        def check() -> None:
            if process.poll() is not None:
                raise ChildProcessError("reader died")

        with pytest.raises(ChildProcessError, match="reader died"):
            for _ in range(5):
                writer.write(b"x" * 32, timeout_s=30, is_alive=check)
        with pytest.raises(ValueError, match="taken"):  # a reader's death takes neither the ring nor its place away
            RingReader.attach(writer.name, 0)


def test_departed_reader_raises() -> None:
    with RingWriter.create(capacity_bytes=64, reader_count=1) as writer:
        RingReader.attach(writer.name, 0).close()
        writer.write(b"x" * 32)
        with pytest.raises(RingClosed, match="reader 0 has left"):
            writer.write(b"x" * 32)


def test_failure_inside_a_long_message_breaks_the_ring_for_both() -> None:
    writer = RingWriter.create(capacity_bytes=64, reader_count=1)
    reader = RingReader.attach(writer.name, 0)
    with pytest.raises(TimeoutError):
        writer.write(b"x" * 200, timeout_s=0)
    with pytest.raises(RingClosed, match="half a message"):
        writer.write(b"y")
    assert reader.read(timeout_s=0) is None
    writer.close()
    with pytest.raises(RingClosed):
        reader.read()
    reader.close()


def test_idle_reader_uses_no_cpu() -> None:
    with RingWriter.create(reader_count=1) as writer, script(MEASURE_IDLE, writer.name) as process:
        writer.write(b"begin")
        message, used_cpu_s = process.communicate(timeout=30)[0].split()
    assert message == "None"
    assert float(used_cpu_s) < 0.05


def test_unlinked_ring_goes_on_and_leaves_nothing() -> None:
    writer = RingWriter.create(reader_count=1)
    reader = RingReader.attach(writer.name, 0)
    writer.unlink()
    with pytest.raises(FileNotFoundError, match="no such ring"):
        RingReader.attach(writer.name, 0)
    writer.write(b"still here")
    assert reader.read() == b"still here"
    writer.close()
    reader.close()


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="plain file name"):
        RingWriter.create("../x", reader_count=1)
    with pytest.raises(ValueError, match="not 64 and 0"):
        RingWriter.create(capacity_bytes=64, reader_count=0)
    with RingWriter.create(reader_count=1) as writer:
        with pytest.raises(FileExistsError):
            RingWriter.create(writer.name, reader_count=1)
        with pytest.raises(ValueError, match="place 1 of 1"):
            RingReader.attach(writer.name, 1)
        RingReader.attach(writer.name, 0).close()
        with pytest.raises(ValueError, match="place 0 of 1"):
            RingReader.attach(writer.name, 0)


def test_a_file_that_is_no_ring_is_refused() -> None:
    with RingWriter.create(reader_count=1) as writer:
        ring_memory._path(writer.name).write_bytes(bytes(4096))
        with pytest.raises(ValueError, match="not a ring"):
            RingReader.attach(writer.name, 0)


def test_publish_keeps_presence_and_always_changes_the_signal() -> None:
    memory = bytearray(64)
    cursor = Cursor(memory, 0, futex.SleepPoll(), lambda: None)
    signals = []
    for presence in (Presence.ATTACHED, Presence.ATTACHED, Presence.GONE):
        cursor.publish(8, presence)
        signals.append(cursor.look()[0])
    assert len(set(signals)) == 3
    memory[8:12] = (0xFFFFFFFD).to_bytes(4, "little")  # the count is about to wrap
    cursor.publish(8, Presence.ATTACHED)
    assert cursor.look() == (1, 8)
