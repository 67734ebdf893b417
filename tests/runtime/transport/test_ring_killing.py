"""Whoever is killed, at whatever instruction: the others see whole messages or none, and then the documented end.

ring_killing.py kills, this file says what must have come of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vnext.runtime.processes import futex, shared_file
from vnext.runtime.transport.ring import memory as ring_memory
from vnext.runtime.transport.ring.common import RingAbandoned
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

ROOT = Path(__file__).parents[3]
MESSAGE_COUNT = 4
BUSY_KILLS = 20

pytestmark = pytest.mark.skipif(
    not isinstance(futex.choose_wait_method(), futex.Futex), reason="deaths are noticed by locks that only Linux has"
)


def run_killing(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parents[1] / "ring_killing.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def accounts(*arguments: object) -> list[dict[str, Any]]:
    """One for each kill; the last victim of a series came to its end."""
    ran = run_killing(*arguments)
    assert (ran.returncode, ran.stderr) == (0, "")
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("form", ["chosen", "plain"])
def test_a_writer_killed_before_any_opcode(form: str) -> None:
    reported = accounts("writer", form)
    assert len(reported) > 150
    assert all(account["left"] == [] for account in reported)
    assert reported[-1]["finished"] and reported[-1]["ends"] == [[MESSAGE_COUNT, "RingClosed"]] * 2
    ends = [account["ends"] for account in reported if account["ends"]]
    assert all(first == second for first, second in ends)  # both readers were told the same
    counts, words = zip(*(first for first, _ in ends))
    assert list(counts) == sorted(counts) and set(counts) == set(range(MESSAGE_COUNT + 1))
    assert set(words) == {"RingAbandoned", "RingClosed"}
    assert "RingAbandoned" not in words[words.index("RingClosed") :]  # once it has said good-bye that is what counts


@pytest.mark.parametrize("form", ["chosen", "plain"])
def test_a_reader_killed_before_any_opcode(form: str) -> None:
    reported = accounts("reader", form)
    assert len(reported) > 150
    expected_end = {"FRESH": True, "ATTACHED": "RingAbandoned", "GONE": "RingClosed"}
    assert [account for account in reported if account["end"] != expected_end[account["presence"]]] == []
    assert [account for account in reported if not (account["is_boundary"] and account["other"])] == []
    reads = [account["read"] for account in reported]
    assert reads == sorted(reads) and set(reads) == set(range(MESSAGE_COUNT + 1))
    assert {account["presence"] for account in reported} == set(expected_end)  # in every state that it can have


def stepped(mode: str) -> list[dict[str, Any]]:
    if ring_memory.implementation() != "compiled":
        pytest.skip("the compiled ring is not built here; the plain one is killed at its opcodes above")
    ran = run_killing(mode, "chosen")
    if "no single steps" in ran.stderr or "ended by itself with 3" in ran.stderr:
        pytest.skip("this sandbox lets no process step through another (ptrace)")
    assert (ran.returncode, ran.stderr) == (0, "")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_compiled_writer_killed_at_any_change_of_the_memory() -> None:
    """Between two machine instructions; only those that change the shared memory make a difference to anybody."""
    reported = stepped("writing")
    for size in (24, 0):
        *kills, end = [account for account in reported if account["size"] == size]
        changes = [account["changed"] for account in kills]
        assert changes == ["data"] * (len(changes) - 2) + ["position", "signal"]
        assert [account["end"] for account in kills[:-2]] == [[0, "RingAbandoned"]] * (len(changes) - 2)
        assert [account["end"] for account in kills[-2:]] == [[1, "RingAbandoned"]] * 2
        assert end["finished"] and len(changes) > 2


def test_a_compiled_reader_killed_at_any_change_of_the_memory() -> None:
    *kills, end = stepped("reading")
    assert [(account["changed"], account["is_read"]) for account in kills] == [("position", True), ("signal", True)]
    assert all(account["other"] and account["end"] == "RingAbandoned" for account in (*kills, end))
    assert end["finished"]


@pytest.mark.parametrize("form", ["chosen", "plain", "polling"])
def test_a_busy_writer_killed_at_random_moments(form: str) -> None:
    reported = accounts("busy-writer", form, BUSY_KILLS)
    assert len(reported) == BUSY_KILLS
    for account in reported:
        assert not account["finished"] and account["orderly"] == [True, True]
        (count, word), (other_count, other_word) = account["ends"]
        assert (word, other_word) == ("RingAbandoned", "RingAbandoned") and count == other_count


@pytest.mark.parametrize("form", ["chosen", "plain", "polling"])
def test_a_busy_reader_killed_at_random_moments(form: str) -> None:
    reported = accounts("busy-reader", form, BUSY_KILLS)
    assert len(reported) == BUSY_KILLS
    for account in reported:
        assert not account["finished"] and account["orderly"] == [True]
        assert account["end"] == "RingAbandoned"
        assert account["ends"] == [[account["written"], "RingClosed"]]  # the other lost nothing


ABANDON = """
import os, sys
from vnext.runtime.transport.ring.writer import RingWriter
writer = RingWriter.create(reader_count=1)
print(writer.name, flush=True)
sys.stdin.readline()
writer.write(b"last words")
os.kill(os.getpid(), 9)
"""


def test_an_end_that_dies_is_noticed_at_the_usual_pace_too() -> None:
    """The other tests ask more often than vnext does."""
    command = [sys.executable, "-c", ABANDON]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        reader = RingReader.attach(process.stdout.readline().strip(), 0)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert reader.read() == b"last words"
        with pytest.raises(RingAbandoned):
            reader.read()
        reader.close()


def test_without_locks_everybody_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shared_file.fcntl, "F_OFD_SETLK")
    with RingWriter.create(capacity_bytes=64, reader_count=1) as writer, RingReader.attach(writer.name, 0) as reader:
        assert reader.read(timeout_s=0.001) is None
        writer.write(b"x" * 32)
        with pytest.raises(TimeoutError):
            writer.write(b"x" * 32, timeout_s=0.001)
