"""The ring: messages arrive whole and in order, full and empty rings sleep, dead and departed ends are noticed."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from vnext.runtime.processes import futex, thread_plan
from vnext.runtime.transport.ring import memory as ring_memory
from vnext.runtime.transport.ring.common import MESSAGE_BYTES_MAX, RingAbandoned, RingClosed
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

ROOT = Path(__file__).parents[3]
FORMS = {"chosen": None, "plain": futex.choose_wait_method(), "polling": futex.SleepPoll()}


@pytest.fixture(params=FORMS)
def waits(request: pytest.FixtureRequest) -> futex.WaitMethod | None:
    """How the ends of a ring sleep. None is what vnext uses: the compiled form where it was built."""
    return FORMS[request.param]


def both_ends(waits: futex.WaitMethod | None, **sizes: int) -> tuple[RingWriter, RingReader]:
    writer = RingWriter.create(reader_count=1, waits=waits, **sizes)
    return writer, RingReader.attach(writer.name, 0, waits=waits)


COUNT_AND_HASH = """
import hashlib, sys
from vnext.runtime.transport.ring.common import RingClosed
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.processes import futex
name, index, waits = sys.argv[1], int(sys.argv[2]), getattr(futex, sys.argv[3])() if sys.argv[3] else None
reader = RingReader.attach(name, index, waits=waits, spin_us=20 * index)
digest, count = hashlib.sha256(), 0
while True:
    try:
        message = reader.read(timeout_s=60)
    except RingClosed:
        break
    digest.update(len(message).to_bytes(8, "little") + message)
    count += 1
print(count, digest.hexdigest())
"""

MEASURE_IDLE = """
import sys, time
from vnext.runtime.transport.ring.reader import RingReader
reader = RingReader.attach(sys.argv[1], 0)
reader.read()
begin_s = time.process_time()
message = reader.read(timeout_s=1.0)
print(message, time.process_time() - begin_s)
"""

ATTACH_AND_HANG = """
import sys, time
from vnext.runtime.transport.ring.reader import RingReader
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
    rng = random.Random(seed)
    edges = [0, 1, 7, 8, 9, capacity_bytes // 2 - 8, capacity_bytes // 2, capacity_bytes // 2 + 1, capacity_bytes]
    sizes = [rng.choice([rng.randrange(200), rng.choice(edges)]) for _ in range(count - 3)]
    sizes += [capacity_bytes + 1, 3 * capacity_bytes + 5, 10 * capacity_bytes]
    rng.shuffle(sizes)
    return [rng.randbytes(size) for size in sizes]


class Huge(bytes):
    """Says that it is longer than any message may be."""

    def __len__(self) -> int:
        return MESSAGE_BYTES_MAX + 1


def digest_of(messages: list[bytes]) -> str:
    digest = hashlib.sha256()
    for message in messages:
        digest.update(len(message).to_bytes(8, "little") + message)
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("reader_count", "method"),
    [(1, ""), (3, ""), (2, "Futex"), (2, "SleepPoll")],
    ids=["one", "three", "two-plain", "two-polling"],
)
def test_every_reader_process_gets_every_message_in_order(reader_count: int, method: str) -> None:
    if method == "Futex" and not isinstance(futex.choose_wait_method(), futex.Futex):
        pytest.skip("this machine has no futex")
    waits = getattr(futex, method)() if method else None
    messages = random_messages(seed=reader_count, capacity_bytes=4096, count=600)
    with ExitStack() as stack:
        writer = stack.enter_context(RingWriter.create(capacity_bytes=4096, reader_count=reader_count, waits=waits))
        readers = [script(COUNT_AND_HASH, writer.name, index, method) for index in range(reader_count)]
        processes = [stack.enter_context(reader) for reader in readers]
        for message in messages:
            writer.write(message, timeout_s=60)
        writer.close()
        results = [process.communicate(timeout=60) for process in processes]
    expected = f"{len(messages)} {digest_of(messages)}\n"
    assert results == [(expected, "")] * reader_count  # nothing on stderr either: no tracker complains


ACTIONS = st.lists(st.one_of(st.none(), st.integers(0, 90)), max_size=60)


@given(st.sampled_from(["chosen", "plain"]), st.integers(64, 300), ACTIONS)
@settings(deadline=None, max_examples=150)
def test_ring_behaves_like_a_queue(form: str, capacity_bytes: int, actions: list[int | None]) -> None:
    """None reads, a number writes so many bytes; the ring may only refuse what does not fit beside what is unread."""
    fill, queue = itertools.cycle(range(1, 256)), []
    with RingWriter.create(capacity_bytes=capacity_bytes, reader_count=1, waits=FORMS[form]) as writer:
        with RingReader.attach(writer.name, 0, waits=FORMS[form]) as reader:
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


def test_full_ring_blocks_the_writer_and_counts_the_stall(waits: futex.WaitMethod | None) -> None:
    writer, reader = both_ends(waits, capacity_bytes=64)
    with writer, reader:
        writer.write(b"a" * 32)
        assert (writer.stall_count, writer.stall_seconds) == (0, 0.0)
        blocked = threading.Event()
        thread = threading.Thread(target=writer.write, args=(b"b" * 32, 30, blocked.set))
        thread.start()
        assert blocked.wait(60)  # the hook is called only while the ring is full
        assert writer.stall_count == 1
        assert reader.read(timeout_s=60) == b"a" * 32
        thread.join(60)
        assert reader.read(timeout_s=60) == b"b" * 32
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


def test_closed_ring_gives_its_rest_and_then_raises(waits: futex.WaitMethod | None) -> None:
    writer, reader = both_ends(waits)
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


def test_closing_wakes_a_sleeping_reader(waits: futex.WaitMethod | None) -> None:
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
        assert begun.wait(60)
        writer.close()
        assert ended.wait(60)
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
                writer.write(b"x" * 32, timeout_s=60, is_alive=check)
        with pytest.raises(ValueError, match="taken"):  # a reader's death takes neither the ring nor its place away
            RingReader.attach(writer.name, 0)


def test_dead_reader_is_noticed_without_a_hook(waits: futex.WaitMethod | None) -> None:
    with ExitStack() as stack:
        writer = stack.enter_context(RingWriter.create(capacity_bytes=64, reader_count=1, waits=waits))
        process = stack.enter_context(script(ATTACH_AND_HANG, writer.name))
        writer.write(b"go")
        assert process.stdout.readline() == "attached\n"
        writer.write(b"x" * 32)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(RingAbandoned, match="reader 0 has ended"):
            writer.write(b"x" * 32)  # no timeout: it must not hang


def test_departed_reader_raises() -> None:
    with RingWriter.create(capacity_bytes=64, reader_count=1) as writer:
        RingReader.attach(writer.name, 0).close()
        writer.write(b"x" * 32)
        with pytest.raises(RingClosed, match="reader 0 has left"):
            writer.write(b"x" * 32)


def test_failure_inside_a_long_message_breaks_the_ring_for_both(waits: futex.WaitMethod | None) -> None:
    writer, reader = both_ends(waits, capacity_bytes=64)
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
        message, used_cpu_s = process.communicate(timeout=60)[0].split()
    assert message == "None"
    assert float(used_cpu_s) < 0.5  # one that spins takes all of the second


def test_unlinked_ring_goes_on_and_takes_no_more_readers() -> None:
    writer = RingWriter.create(reader_count=2)
    reader = RingReader.attach(writer.name, 0)
    writer.unlink()
    writer.unlink()
    with pytest.raises(FileNotFoundError, match="no such ring"):
        RingReader.attach(writer.name, 1)
    writer.write(b"still here")
    assert reader.read() == b"still here"
    writer.close()
    reader.close()


def test_no_file_stands_in_a_folder_and_no_descriptor_stays() -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("without /proc a ring is a file with a name until it is closed")
    before = len(list(descriptors.iterdir()))
    writer, reader = both_ends(None)
    assert Path(writer.name).stat().st_nlink == 0  # in no folder: who is killed now leaves nothing
    writer.close()
    reader.close()
    assert len(list(descriptors.iterdir())) == before


def test_without_nameless_files_the_name_goes_with_the_writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(ring_memory.os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(ring_memory.shared_file, "folder", lambda: str(tmp_path))
    writer, reader = both_ends(None)
    assert list(tmp_path.iterdir()) == [Path(writer.name)]
    writer.write(b"as well")
    assert reader.read() == b"as well"
    writer.close()
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="not 64 and 0"):
        RingWriter.create(capacity_bytes=64, reader_count=0)
    with RingWriter.create(reader_count=1) as writer:
        with pytest.raises(ValueError, match="place 1 of 1"):
            RingReader.attach(writer.name, 1)
        with RingReader.attach(writer.name, 0), pytest.raises(ValueError, match="place 0 of 1"):
            RingReader.attach(writer.name, 0)
        with pytest.raises(ValueError, match="place 0 of 1"):  # its messages up to now went to somebody else
            RingReader.attach(writer.name, 0)
        with pytest.raises(ValueError, match="over the ring's bound"):
            writer.write(Huge())


@pytest.mark.parametrize("is_nameless", [True, False])
def test_a_ring_that_does_not_fit_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_nameless: bool
) -> None:
    def full(handle: int, start: int, size_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    if not is_nameless:
        monkeypatch.delattr(ring_memory.os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(ring_memory.shared_file, "folder", lambda: str(tmp_path))
    monkeypatch.setattr(ring_memory.os, "posix_fallocate", full, raising=False)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="no room for a ring of 4194304 bytes: No space.*enlarge .*shm-size"):
        RingWriter.create(reader_count=1)
    assert (list(tmp_path.iterdir()), len(os.listdir("/dev/fd"))) == ([], before)


def test_a_reader_spins_only_where_cores_are_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    for core_count, reader_count, spins in ((2, 1, False), (3, 1, True), (4, 3, False), (16, 8, True)):
        monkeypatch.setattr(thread_plan, "usable_cores", lambda count=core_count: count)
        assert (thread_plan.ring_spin_us(reader_count) > 0) is spins


def test_a_spinning_reader_sleeps_in_the_end_and_gets_what_comes_meanwhile(waits: futex.WaitMethod | None) -> None:
    with RingWriter.create(reader_count=1, waits=waits) as writer:
        with RingReader.attach(writer.name, 0, spin_us=2000, waits=waits) as reader:
            assert reader.read(timeout_s=0.001) is None  # shorter than the spin
            assert reader.read(timeout_s=0.01) is None
            later = threading.Timer(0.05, writer.write, (b"at last",))
            later.start()
            assert reader.read(timeout_s=60) == b"at last"
            later.join()


def test_a_sleeping_reader_lets_other_threads_run(waits: futex.WaitMethod | None) -> None:
    """The compiled form sleeps without Python's lock, else the writer below could never write."""
    writer, reader = both_ends(waits)
    with writer, reader:
        timer = threading.Timer(0.02, writer.write, (b"from a thread",))
        timer.start()
        assert reader.read(timeout_s=60) == b"from a thread"
        timer.join()  # the message is there before the call that wrote it has returned
