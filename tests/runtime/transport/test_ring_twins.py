"""The compiled operations on a ring's memory are the plain ones: equal results, equal memory, whatever stands there.

Also that they stay inside: fenced between pages that may not be touched, with broken memory and absurd arguments.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vnext.runtime.processes import futex
from vnext.runtime.transport.ring import memory as ring_memory
from vnext.runtime.transport.ring.memory_plain import LINE_BYTES, PlainMemory, Presence, head_of

ROOT = Path(__file__).parents[3]
compiled = ring_memory._ring
LINE_COUNT = 3
CALLS = 2500

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled ring is not built: no compiler, or not Linux")


def plain(buffer: object, capacity_bytes: int, line_count: int = LINE_COUNT) -> PlainMemory:
    return PlainMemory(buffer, line_count, capacity_bytes, futex.SleepPoll(), lambda: None)


def outcome(memory: PlainMemory, name: str, arguments: tuple) -> object:
    """What a call gives, or the kind of its error."""
    try:
        return getattr(memory, name)(*arguments)
    except ValueError:
        return ValueError


def calls(rng: random.Random, capacity_bytes: int) -> list[tuple[str, tuple]]:
    """A walk of a writer and a reader, mostly in step; sizes and positions at the edges, also beyond them."""
    walk, written, read, number_written, number_read = [], 0, 0, 0, 0
    for _ in range(CALLS):
        size = rng.choice([0, 1, 7, 8, 9, capacity_bytes // 2, rng.randrange(capacity_bytes), capacity_bytes + 1])
        match rng.randrange(8):
            case 0 | 1:
                walk.append(("send", (written, number_written, rng.randbytes(size))))
                if size <= capacity_bytes // 2:
                    written, number_written = written + 8 + -(-size // 8) * 8, number_written + 1
            case 2 | 3:
                walk.append(("receive", (1 + rng.randrange(LINE_COUNT), read, number_read, 0, 0)))
                if rng.randrange(3) == 0:
                    read, number_read = written, number_written
            case 4:
                position, presence = rng.choice([written, read, 8, 3]), rng.randrange(4)
                walk.append(("publish", (rng.randrange(LINE_COUNT + 1), position, presence)))
            case 5:
                walk.append(("look", (rng.randrange(LINE_COUNT + 1),)))
            case 6:
                walk.append(("put", (rng.choice([written, read + 1, 8 * size]), rng.randbytes(size))))
            case 7:
                walk.append(("take", (rng.choice([written, read + 4, 8 * size]), size)))
    return walk


@pytest.mark.parametrize("seed", range(8))
def test_the_two_forms_agree_on_every_call(seed: int) -> None:
    rng = random.Random(seed)
    capacity_bytes = rng.choice([64, 80, 256, 4096])
    size_bytes = LINE_BYTES * (1 + LINE_COUNT) + capacity_bytes
    buffers = bytearray(size_bytes), bytearray(size_bytes)
    forms = plain(buffers[0], capacity_bytes), compiled.Memory(buffers[1], LINE_COUNT, capacity_bytes)
    seen = set()
    for name, arguments in calls(rng, capacity_bytes):
        if rng.randrange(50) == 0:  # somebody else writes there
            start = rng.randrange(size_bytes - 8)
            for buffer in buffers:
                buffer[start : start + 4] = b"\xff\x00\x01\xfe"
        results = [outcome(memory, name, arguments) for memory in forms]
        assert results[0] == results[1], (name, arguments)
        assert buffers[0] == buffers[1], (name, arguments)
        seen.add((name, type(results[0])))
    assert {("receive", bytes), ("receive", type(None)), ("send", int), ("take", bytes), ("take", type)} <= seen


def test_a_message_head_is_the_same_in_both() -> None:
    buffer = bytearray(LINE_BYTES * 2 + 64)
    memory = compiled.Memory(buffer, 1, 64)
    for number in (0, 1, 2**32 - 1):
        memory.send(0, number, b"seven b")
        assert memory.take(0, 8) == head_of(number, 7)


@pytest.mark.parametrize("sizes", [(0, 64), (1, 0), (1, 72), (2, 64), (2**32 - 1, 64), (1, 2**63)], ids=str)
def test_both_refuse_a_buffer_of_another_size(sizes: tuple[int, int]) -> None:
    buffer = bytearray(LINE_BYTES * 2 + 64)
    for make in (lambda: plain(buffer, sizes[1], sizes[0]), lambda: compiled.Memory(buffer, *sizes)):
        with pytest.raises(ValueError, match="another size"):
            make()


def test_released_memory_is_not_touched() -> None:
    buffer = bytearray(LINE_BYTES * (1 + LINE_COUNT) + 64)
    for memory in (plain(buffer, 64), compiled.Memory(buffer, LINE_COUNT, 64)):
        memory.release()
        memory.release()
        for name, arguments in [
            ("look", (0,)), ("publish", (0, 8, 1)), ("await_change", (0, 0, 0, 0)), ("take", (0, 8)),
            ("put", (0, b"x")), ("send", (0, 0, b"x")), ("receive", (1, 0, 0, 0, 0)),
        ]:  # fmt: skip
            assert outcome(memory, name, arguments) is ValueError
    buffer.clear()  # nobody holds it any more


class NeverSleeps(futex.SleepPoll):
    """Fails where a wait would sleep."""

    def wait(self, *_: object) -> None:
        raise AssertionError("nothing is to be waited for")


@pytest.mark.parametrize(
    ("published", "presence", "known"), [(8, Presence.ATTACHED, 0), (0, Presence.GONE, 0), (8, Presence.GONE, 0)]
)
def test_a_change_of_either_kind_ends_a_wait_at_once(published: int, presence: Presence, known: int) -> None:
    """A new position, an owner that has left, or both."""
    memory = PlainMemory(bytearray(LINE_BYTES * 2 + 64), 1, 64, NeverSleeps(), lambda: None)
    memory.publish(0, published, presence)
    memory.await_change(0, known, 0, 10**12)
    with pytest.raises(AssertionError, match="nothing is to be waited for"):
        memory.publish(0, 8, Presence.ATTACHED)
        memory.await_change(0, 8, 0, 10**12)


def refuses_release_while_waited_on() -> bool:
    """False when the waiting thread came too late to be met."""
    memory = compiled.Memory(bytearray(LINE_BYTES * 2 + 64), 1, 64)
    waiter = threading.Thread(target=outcome, args=(memory, "await_change", (0, 0, 0, 30 * 10**9)))
    waiter.start()
    time.sleep(0.01)
    try:
        memory.release()
        return False
    except RuntimeError:
        memory.publish(0, 8, Presence.ATTACHED)
        return True
    finally:
        waiter.join(60)
        memory.release()


def test_memory_is_not_released_under_a_waiting_thread() -> None:
    assert any(refuses_release_while_waited_on() for _ in range(100))


FENCED = """
import ctypes, mmap, random, sys
from vnext.runtime.transport.ring import _ring
from vnext.runtime.transport.ring.memory_plain import head_of
PAGE, NONE = mmap.PAGESIZE, 0
system = ctypes.CDLL(None, use_errno=True)
system.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
area = mmap.mmap(-1, 3 * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
for page in (0, 2):
    assert system.mprotect(start + page * PAGE, PAGE, NONE) == 0
LINES, done = 3, 0
for seed in range(int(sys.argv[1])):
    chance = random.Random(seed)
    capacity = chance.choice([64, 96, 512])
    size = 128 * (1 + LINES) + capacity
    at = start + PAGE if seed % 2 else start + 2 * PAGE - size
    buffer = (ctypes.c_char * size).from_address(at)
    buffer[:] = chance.randbytes(size) if seed % 3 else bytes(size)
    memory = _ring.Memory(buffer, LINES, capacity)
    edges = [0, 1, 8, 16, capacity // 2, capacity, capacity + 8, 2**31, 2**32 - 8, 2**63 - 8, 2**64 - 8]
    for _ in range(60):
        edge = lambda: chance.choice(edges + [chance.randrange(capacity) & ~7] * 5)
        number, line = chance.choice([0, 1, 2**32 - 1]), chance.choice([0, 1, 2, 3, 4, 2**32 - 1])
        if chance.random() < 0.5:  # a head with the right check, whatever its size
            place, said = edge() % capacity & ~7, chance.choice([0, capacity // 2, capacity, 2**31, 2**32 - 1])
            buffer[size - capacity + place : size - capacity + place + 8] = head_of(number, said)
            memory.publish(0, place + chance.choice([8, 16, capacity]), 1)
        name, arguments = chance.choice([
            ("look", (line,)), ("publish", (line, edge(), number & 1)), ("receive", (line, edge(), number, 0, 0)),
            ("take", (edge(), chance.choice([-1, -2**63, 0, 1, 64, 600, 2**62]))),
            ("put", (edge(), bytes(chance.choice([0, 1, 64, 600])))), ("send", (edge(), number, bytes(edge() % 700))),
            ("await_change", (line, edge(), 0, chance.choice([0, -1, -2**63]))),
        ])
        try:
            getattr(memory, name)(*arguments)
            done += 1
        except ValueError:
            pass
    memory.release()
print(done)
"""


def test_broken_memory_and_absurd_arguments_lead_nowhere_outside() -> None:
    command = [sys.executable, "-c", FENCED, "1500"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")  # -11 where it touched a fence
    assert int(ran.stdout) > 10_000
