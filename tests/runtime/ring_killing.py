"""Kills one end of a ring at a chosen step; what the others saw, as JSON lines: `python ring_killing.py MODE FORM`.

A program of its own, because it forks: one fork a kill, in a process without threads. A step is an opcode of the ring's
Python code, a change of the shared memory while single machine instructions are stepped through, or a random moment.
Of the opcodes those are chosen before which others can see something new of the victim, the first of every call, and every
tenth: whoever dies between two of them leaves the same memory, files and locks as one who dies at the earlier.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from vnext.runtime.processes import futex, shared_file
from vnext.runtime.transport.ring import memory_plain, reader as ring_reader, writer as ring_writer
from vnext.runtime.transport.ring.common import RingClosed, look
from vnext.runtime.transport.ring.memory import Segment
from vnext.runtime.transport.ring.memory_plain import LINE_BYTES, Presence, padded
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

FORMS = {"chosen": None, "plain": futex.choose_wait_method(), "polling": futex.SleepPoll()}
CAPACITY_BYTES = 512
MESSAGES = [b"first", random.Random(1).randbytes(24), random.Random(2).randbytes(300), b""]  # the third in two parts
BOUNDARIES = [0, 16, 48, 360, 368]  # positions between messages
TRACED = {"chosen": "/vnext/runtime/", "plain": memory_plain.__file__}  # what the two forms do not share
HANG_S = 60.0
STRIDE = 10
LINES = 3  # of a ring with two readers
PTRACE_TRACEME, PTRACE_SINGLESTEP = 0, 9
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)

Account = dict[str, Any]
ring_reader.WRITER_POLL_S = ring_writer.ALIVE_POLL_S = 0.0005  # thousands of kills: the same code, asked more often
ring_reader.IDLE_POLLS = 1


# ---- victims -----------------------------------------------------------------------------------------------------


def die_at(step: int, traced: str) -> None:
    """From now on count the opcodes of the traced files; die by SIGKILL before the given one (from 1)."""

    def die(count: int, is_first: bool) -> None:
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    before_opcodes(traced, die)


def before_opcodes(traced: str, act: Callable[[int, bool], None]) -> None:
    """From now on `act(count, is_first)` before each opcode of the traced files (from 1), and whether it is its call's first."""
    count, is_first = 0, True

    def trace(frame: Any, event: str, argument: object) -> Callable | None:
        nonlocal count, is_first
        if traced not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            act(count, is_first)
        is_first = event == "call"
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 and later look for this when tracing begins
    sys.settrace(trace)


class Notes:
    """What a victim that is not killed notes for its parent: the steps at which others could see something new of it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("notes")

    def take(self, traced: str) -> None:
        """From now on, in the victim."""
        seen: list[Any] = []

        def note(count: int, is_first: bool) -> None:
            nonlocal seen
            last, seen = seen, seen_by_others()
            if seen != last or is_first or count % STRIDE == 0:
                os.write(self._file, b"%d " % count)

        before_opcodes(traced, note)

    def steps(self) -> list[int]:
        """In the parent, once the victim has ended."""
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "rb") as file:
            return [int(word) for word in file.read().split()]


def seen_by_others() -> list[Any]:
    """This process's files, and of those in shared memory the bytes and who has locked which line."""
    folder, found = "/proc/self/fd", []
    for name in os.listdir(folder):
        path = os.readlink(f"{folder}/{name}") if os.path.islink(f"{folder}/{name}") else ""
        found.append(path)
        if path.startswith(("/dev/shm/", "/memfd:vnext")):
            with open(f"{folder}/{name}", "r+b", buffering=0) as other:
                liveness = shared_file.Liveness(other.fileno())
                found += [other.read(), [liveness.has_owner(line) for line in range(LINES)]]
    return found


def die_or_note(step: int, form: str, notes: Notes | None) -> None:
    """A victim's life: killed at a step, or noting all of them."""
    if notes is None:
        die_at(step, TRACED[form])
    else:
        notes.take(TRACED[form])


def fork(work: Callable[[], None]) -> int:
    """A child that does `work`; exit status 0 when it came to the end. It does not outlive its parent."""
    if pid := os.fork():
        return pid
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def write_all(step: int, form: str, notes: Notes | None, name_out: int, go_in: int) -> None:
    die_or_note(step, form, notes)
    writer = RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=2, waits=FORMS[form])
    os.write(name_out, writer.name.encode())
    os.read(go_in, 1)
    for message in MESSAGES:
        writer.write(message, timeout_s=HANG_S)
    writer.close()


def read_all(step: int, form: str, notes: Notes | None, name: str) -> None:
    die_or_note(step, form, notes)
    reader = RingReader.attach(name, 0, spin_us=0, waits=FORMS[form])
    for message in MESSAGES:
        if reader.read(timeout_s=HANG_S) != message:
            os._exit(2)
    reader.close()


# ---- survivors ---------------------------------------------------------------------------------------------------


def read_to_the_end(reader: RingReader, messages: list[bytes]) -> tuple[int, str]:
    """(messages that came, the error at the end). Anything but the next message is said as the end."""
    count = 0
    try:
        while (message := reader.read(timeout_s=HANG_S)) is not None:
            if message != messages[count]:
                return count, "torn"
            count += 1
    except RingClosed as error:
        return count, type(error).__name__
    return count, "hang"


def finished(pid: int) -> bool:
    """Waits for a child; whether it came to its end rather than to ours."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the victim ended by itself with {status}")
    return status == 0


def kill_writer(step: int, form: str, notes: Notes | None = None) -> Account:
    (name_in, name_out), (go_in, go_out) = os.pipe(), os.pipe()
    pid = fork(partial(write_all, step, form, notes, name_out, go_in))
    os.close(name_out)
    name = os.read(name_in, 200).decode()
    readers = [RingReader.attach(name, index, spin_us=0, waits=FORMS[form]) for index in (0, 1)] if name else []
    os.write(go_out, b"g")
    is_finished = finished(pid)
    for pipe in (name_in, go_in, go_out):
        os.close(pipe)
    ends = [read_to_the_end(reader, MESSAGES) for reader in readers]
    for reader in readers:
        reader.close()
    left = [path.name for path in Path("/dev/shm").glob(f"vnext-ring-{pid}-*")]
    return {"step": step, "finished": is_finished, "ends": ends, "left": left}


def kill_reader(step: int, form: str, notes: Notes | None = None) -> Account:
    """The reader's end, then how the other reader and the writer go on; a place never taken is taken by another."""
    with RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=2, waits=FORMS[form]) as writer:
        with RingReader.attach(writer.name, 1, spin_us=0, waits=FORMS[form]) as other:
            for message in MESSAGES:
                writer.write(message)
            is_finished = finished(fork(partial(read_all, step, form, notes, writer.name)))
            presence, position = look(writer._memory, 1)
            account = {
                "step": step,
                "finished": is_finished,
                "presence": presence.name,
                "is_boundary": position in BOUNDARIES,
                "read": BOUNDARIES.index(position) if position in BOUNDARIES else -1,
                "other": [other.read(timeout_s=HANG_S) for _ in MESSAGES] == MESSAGES,
            }
            if presence.name == "FRESH":
                with RingReader.attach(writer.name, 0, spin_us=0, waits=FORMS[form]) as late:
                    account["end"] = [late.read(timeout_s=HANG_S) for _ in MESSAGES] == MESSAGES
            else:
                account["end"] = write_to_the_end(writer, other)
            return account


def write_to_the_end(writer: RingWriter, other: RingReader) -> str:
    """The writer's error once it would have to wait for the reader that is gone; the other must get all of it."""
    for count in range(2 * CAPACITY_BYTES // 8):
        try:
            writer.write(count.to_bytes(2, "little"), timeout_s=HANG_S)
        except RingClosed as error:
            return type(error).__name__
        if other.read(timeout_s=HANG_S) != count.to_bytes(2, "little"):
            return "torn"
    return "hang"


# ---- single machine instructions ---------------------------------------------------------------------------------


class FromHere:
    """A compiled memory, which stops its process where the first of its functions is called: only they write."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._has_stopped = memory, False

    def __getattr__(self, name: str) -> Any:
        if not self._has_stopped:
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return getattr(self._memory, name)


class Stepper:
    """A child that is led through `work`, instruction by instruction, up to a number of changes of the memory."""

    def __init__(self) -> None:
        self._ptrace = LIBC.ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long

    def kill_at(self, change: int, end: Any, work: Callable[[], None], mapping: Any) -> Account:
        """Whether the work of this end (its `_memory`) was done before that change, and where the last change was."""
        pid = fork(partial(self._run_stopped, end, work))
        before, changes, changed = mapping[:], 0, ""
        _, status = os.waitpid(pid, 0)
        while os.WIFSTOPPED(status):
            if self._ptrace(PTRACE_SINGLESTEP, pid, None, None) < 0:
                raise OSError(ctypes.get_errno(), "no single steps")
            _, status = os.waitpid(pid, 0)
            if (now := mapping[:]) != before:
                changed = place_name(next(at for at, pair in enumerate(zip(before, now)) if pair[0] != pair[1]), len(now))
                before, changes = now, changes + 1
            is_done = os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
            if changes == change or is_done:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"step": change, "finished": is_done, "changed": changed}
        raise RuntimeError(f"the victim ended by itself with {status}")

    def _run_stopped(self, end: Any, work: Callable[[], None]) -> None:
        if self._ptrace(PTRACE_TRACEME, 0, None, None) < 0:
            os._exit(3)
        end._memory = FromHere(end._memory)
        work()
        os.kill(os.getpid(), signal.SIGSTOP)


def place_name(offset_bytes: int, size_bytes: int) -> str:
    """What stands there in a ring's memory."""
    if offset_bytes >= size_bytes - CAPACITY_BYTES:
        return "data"
    return "position" if offset_bytes % LINE_BYTES < 8 else "signal"


def step_through_writing(change: int, waits: futex.WaitMethod | None, message: bytes) -> Account:
    """The writer of a fork is the victim; its parent drops its copy of the writer's lock without closing the ring."""
    writer = RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=1, waits=waits)
    reader = RingReader.attach(writer.name, 0, spin_us=0, waits=waits)
    victim = partial(writer.write, message, HANG_S)
    account = Stepper().kill_at(change, writer, victim, reader._segment._mapping)
    writer._segment.unlink()
    writer._segment.close()
    end = read_to_the_end(reader, [message])
    reader.close()
    return account | {"end": end, "size": len(message)}


def step_through_reading(change: int, waits: futex.WaitMethod | None, message: bytes) -> Account:
    with RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=2, waits=waits) as writer:
        with RingReader.attach(writer.name, 1, spin_us=0, waits=waits) as other:
            victim = RingReader.attach(writer.name, 0, spin_us=0, waits=waits)
            writer.write(message)
            account = Stepper().kill_at(change, victim, partial(victim.read, HANG_S), other._segment._mapping)
            position = look(writer._memory, 1)[1]
            victim._segment.close()
            seen = other.read(timeout_s=HANG_S) == message
            end = write_to_the_end(writer, other)
    return account | {"other": seen, "end": end, "is_read": {0: False, 8 + padded(len(message)): True}[position]}


# ---- random moments ----------------------------------------------------------------------------------------------


def text(number: int) -> bytes:
    """Message `number` of an endless load: mostly small, some in several parts."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice([0, 3, 24, 24, 100, 100, 256, 257, 1500]))


def write_for_ever(waits: futex.WaitMethod | None, name_out: int, go_in: int) -> None:
    writer = RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=2, waits=waits)
    os.write(name_out, writer.name.encode())
    os.read(go_in, 1)
    for number in range(10**9):
        writer.write(text(number))


def read_for_ever(name: str, index: int, waits: futex.WaitMethod | None, report: int | None = None) -> None:
    """Until the ring ends; a survivor reports a line: how many messages came and what the end was."""
    reader, count, end = RingReader.attach(name, index, spin_us=20 * index, waits=waits), 0, ""
    while not end:
        try:
            message = reader.read(timeout_s=HANG_S)
            end = "hang" if message is None else "" if message == text(count) else "torn"
            count += not end
        except RingClosed as error:
            end = type(error).__name__
    if report is not None:
        os.write(report, f"{count} {end}\n".encode())


def kill_later(pid: int, rng: random.Random) -> None:
    """Kill at a random moment of the next 8 ms, from a signal handler.

    The alarm rings on until it is heard: one that comes just before a system call is entered does not interrupt it, and
    Python's handler would wait for that call's end.
    """
    killed: list[int] = []

    def kill(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.008), 0.02)


def reports(pipe_in: int, pipe_out: int) -> list[tuple[int, str]]:
    """What survivors that have ended wrote: (messages, end) of each."""
    os.close(pipe_out)
    with os.fdopen(pipe_in) as lines:
        return [(int(line.split()[0]), line.split()[1]) for line in lines]


def kill_busy_writer(rng: random.Random, waits: futex.WaitMethod | None) -> Account:
    """Two survivors, each a process: they sleep, spin or read when the writer is killed."""
    (name_in, name_out), (go_in, go_out), report = os.pipe(), os.pipe(), os.pipe()
    victim = fork(partial(write_for_ever, waits, name_out, go_in))
    name = os.read(name_in, 200).decode()
    survivors = [fork(partial(read_for_ever, name, index, waits, report[1])) for index in (0, 1)]
    with closing(Segment.open(name, None)) as hand:
        while any(look(hand.memory, line)[0] == Presence.FRESH for line in (1, 2)):
            time.sleep(0.0002)
    kill_later(victim, rng)
    os.write(go_out, b"g")
    is_finished = finished(victim)
    are_orderly = [finished(survivor) for survivor in survivors]
    for pipe in (name_in, name_out, go_in, go_out):
        os.close(pipe)
    return {"finished": is_finished, "orderly": are_orderly, "ends": reports(*report)}


def kill_busy_reader(rng: random.Random, waits: futex.WaitMethod | None) -> Account:
    report = os.pipe()
    writer = RingWriter.create(capacity_bytes=CAPACITY_BYTES, reader_count=2, waits=waits)
    victim = fork(partial(read_for_ever, writer.name, 0, waits))
    other = fork(partial(read_for_ever, writer.name, 1, waits, report[1]))
    while writer.attached_count < 2:
        time.sleep(0.0002)
    kill_later(victim, rng)
    end, number = "", 0
    while not end:
        try:
            writer.write(text(number), timeout_s=HANG_S)
            number += 1
        except (RingClosed, TimeoutError) as error:
            end = type(error).__name__
    is_finished = finished(victim)
    writer.close()
    is_orderly = finished(other)
    account = {"finished": is_finished, "orderly": [is_orderly], "end": end, "written": number}
    return account | {"ends": reports(*report)}


# ---- the program -------------------------------------------------------------------------------------------------


def every_opcode(kill: Callable[..., Account]) -> Iterator[Account]:
    """Kill at every step that is worth it, in order; last comes the victim that was let go and noted them."""
    notes = Notes()
    end = kill(0, notes=notes)
    for step in notes.steps():
        yield kill(step)
    yield end


def every_change(kill: Callable[[int], Account]) -> Iterator[Account]:
    """Kill at step 1, 2, ... until the victim comes to its end first."""
    for step in range(1, 10**6):
        yield (account := kill(step))
        if account["finished"]:
            return


def main(mode: str, form: str, count: str = "20") -> None:
    waits = FORMS[form]
    if mode in ("busy-writer", "busy-reader"):
        kill = kill_busy_writer if mode == "busy-writer" else kill_busy_reader
        rng = random.Random(form + mode)
        for _ in range(int(count)):
            print(json.dumps(kill(rng, waits)))
        return
    kills: dict[str, list[Callable[[int], Account]]] = {
        "writer": [partial(kill_writer, form=form)],
        "reader": [partial(kill_reader, form=form)],
        "writing": [partial(step_through_writing, waits=waits, message=message) for message in (MESSAGES[1], b"")],
        "reading": [partial(step_through_reading, waits=waits, message=MESSAGES[1])],
    }
    for kill in kills[mode]:
        for account in (every_opcode if mode in ("writer", "reader") else every_change)(kill):
            print(json.dumps(account))


if __name__ == "__main__":
    main(*sys.argv[1:])
