"""Ranks as processes, seen from the engine core: what they send, who is silent, and a ring that stays full."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from fake_engine import wait_until
from msgspec.structs import replace

from vnext.runtime.engine.executor import MpExecutor
from vnext.runtime.engine.progress import RanksStalled
from vnext.runtime.processes.proc import why_halted
from vnext.runtime.processes.subprocesses import start_child
from vnext.runtime.protocol.messages import StepResult, encoder
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.results import ResultsSender, head


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[MpExecutor]:
    """Two light processes in place of ranks; they wait for their settings, which never come."""
    children = [start_child(f"rank {rank}", "vnext.runtime.engine.main") for rank in range(2)]
    executor = MpExecutor(children, tmp_path, lambda *_: pytest.fail("no rank is told anything here"))
    yield executor
    executor.stop(grace_s=0.0)


def result(rank: int, step: int) -> bytes:
    return encoder.encode(StepResult(rank=rank, step=step, digest=0, token_digest=0, seconds=0.0))


def connected(ranks: MpExecutor) -> ResultsSender:
    sender, before = ResultsSender(ranks._address), len(ranks._results.sockets)
    wait_until(lambda: ranks._results.wait(0.1) and len(ranks._results.sockets) > before)
    return sender


def test_what_no_rank_sends_is_dropped_with_a_word(ranks: MpExecutor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    got = []
    with connected(ranks) as sender:
        for message in (b"\xc1", b"", b"\x95" * 3000, result(1, 4)):
            sender.send(message)
        wait_until(lambda: bool(got.extend(ranks.receive()) or got))
        sender._socket.sendall(b"\xff\xff\xff\xff, a length that no message has")
        wait_until(lambda: not ranks.receive() and len(caplog.messages) == 4)
        sender.send(result(1, 5))
        wait_until(lambda: bool(got.extend(ranks.receive()) or len(got) == 2))
    assert [(message.rank, message.step) for message in got] == [(1, 4), (1, 5)]
    assert all("was dropped" in message for message in caplog.messages)


def test_results_come_in_pieces_and_many_at_once(ranks: MpExecutor) -> None:
    """However a stream is cut, and from several ranks: each rank's messages whole and in order."""
    rng, got = random.Random(5), []
    with connected(ranks) as one, connected(ranks) as other:
        first = StepResult(rank=0, step=0, digest=0, token_digest=0, seconds=0.0)
        sent = [replace(first, step=step, tokens=bytes(step % 7 * 30_000)) for step in range(40)]
        stream = b"".join(head.pack(len(data)) + data for data in map(encoder.encode, sent))
        while stream:
            count = rng.choice((1, 3, 5, 4000, 70_000))
            one._socket.sendall(stream[:count])
            stream = stream[count:]
            if rng.random() < 0.3:
                other.send(result(1, len(stream)))
            got += ranks.receive()
    assert [message for message in got if message.rank == 0] == sent
    steps = [message.step for message in got if message.rank == 1]
    assert steps and steps == sorted(steps, reverse=True) and ranks._answered[0] == 39


def test_a_result_that_waits_for_its_reader_does_not_stop_both(ranks: MpExecutor) -> None:
    """A rank that sends a long result reads no ring meanwhile: where that is full the engine core reads the result."""
    long = StepResult(rank=0, step=1, digest=0, token_digest=0, seconds=0.0, tokens=bytes(8 << 20))
    name = ranks._ring.name
    with connected(ranks) as sender, RingReader.attach(name, 0) as reader, RingReader.attach(name, 1) as second:
        half = bytes(reader._segment.capacity_bytes // 2 - 8)

        def rank() -> None:
            sender.send(encoder.encode(long))
            for _ in range(3):
                reader.read(10)

        threads = [threading.Thread(target=rank), threading.Thread(target=lambda: [second.read(10) for _ in range(3)])]
        for thread in threads:
            thread.start()
        for _ in range(3):
            ranks.send(half)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert ranks.receive() == [long]


def test_what_nobody_reads_any_more_is_lost(ranks: MpExecutor) -> None:
    """A rank that outlives its engine core goes on to its ring, which says that it is closed."""
    with connected(ranks) as sender:
        ranks._results.close()
        for _ in range(3):
            sender.send(result(0, 1))


def test_the_socket_of_a_rank_that_ends_wakes_the_engine_core_once(ranks: MpExecutor) -> None:
    """Its process may take long to end after that: a poller that still watched its socket would never sleep meanwhile."""
    poller = zmq.Poller()
    with connected(ranks) as sender, connected(ranks) as other:
        ranks.watch(poller)
        sender.send(result(0, 3))
        sender.close()
        assert [message.step for message in received(ranks, poller)] == [3], "its last words"
        assert received(ranks, poller) == [] and not poller.poll(0), "nothing more comes from it"
        other.send(result(1, 3))
        assert [message.rank for message in received(ranks, poller)] == [1], "the other goes on"


def received(ranks: MpExecutor, poller: zmq.Poller) -> list[StepResult]:
    """What has come when the poller wakes."""
    assert poller.poll(5000)
    return ranks.receive()


def test_silent_ranks_are_named_and_one_that_is_stopped_alone(ranks: MpExecutor) -> None:
    first, second = (child.pid for child in ranks._children)
    wait_until(lambda: not why_halted(first) and not why_halted(second))
    ranks._answered = [3, 2]
    assert ranks.why_silent(3) == f"rank 1 (process {second}) does not answer"
    assert ranks.why_silent(4) == f"rank 0 (process {first}), rank 1 (process {second}) do not answer"
    os.kill(second, signal.SIGSTOP)
    wait_until(lambda: bool(why_halted(second)))
    assert ranks.why_silent(4) == f"rank 1 (process {second}) is stopped by a signal"


def test_a_ring_that_stays_full_is_watched(ranks: MpExecutor) -> None:
    """The engine core looks for progress while it waits for room, and may give up."""
    looked = []

    def look() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise RanksStalled("step 1 has had no result")

    ranks.while_full = look
    with RingReader.attach(ranks._ring.name, 0) as reader, RingReader.attach(ranks._ring.name, 1):
        half = bytes(reader._segment.capacity_bytes // 2 - 8)
        ranks.send(half)
        ranks.send(half)
        with pytest.raises(RanksStalled):
            ranks.send(half)
    assert len(looked) == 3
