"""Benchmark of the ring between processes: one way to 1 and 2 readers, and a round trip. `python -m pytest perf/bench_ring.py`

One way: messages are 200 us apart. pytest-benchmark shows the writer's cost of `write`; `one_way_us` (in a record, and printed
below the table) is the time each reader measured from before `write` to after `read`. "spinning" readers poll until the next
message, "sleeping" ones wait in the kernel. A spinning reader needs its own core: with fewer cores than processes, a reader
that shares the writer's core notices a message only when the writer sleeps. Round trip: both sides sleep between messages, so
each figure includes two wake-ups.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from perf.ring_echo import FORMS, STAMP, WARMUP_COUNT
from vnext.runtime.transport.ring.memory import implementation
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 10.0
GAP_S = 200e-6
SPIN_US = {"sleeping": 0, "spinning": 5000}
ROUNDS = 2000


def process(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "perf.ring_echo", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.mark.parametrize(("form", "size_bytes"), (("chosen", 16), ("chosen", 4096), ("plain", 16)))
@pytest.mark.parametrize("mode", SPIN_US)
@pytest.mark.parametrize("reader_count", (1, 2))
def test_one_way(benchmark, reader_count: int, mode: str, size_bytes: int, form: str) -> None:
    """16 bytes: a steady decode plan. 4 KiB: an arrival. "chosen": the compiled implementation if it is built."""
    filling = secrets.token_bytes(size_bytes - STAMP.size)
    with ExitStack() as stack:
        writer = stack.enter_context(RingWriter.create(reader_count=reader_count, waits=FORMS[form]))
        listeners = [process("listen", writer.name, index, SPIN_US[mode], form) for index in range(reader_count)]
        readers = [stack.enter_context(listener) for listener in listeners]
        for reader in readers:
            assert reader.stdout.readline() == "ready\n", "a reading process did not start"
        benchmark.pedantic(
            lambda: writer.write(STAMP.pack(time.monotonic_ns()) + filling),
            setup=lambda: time.sleep(GAP_S),
            rounds=ROUNDS,
            warmup_rounds=WARMUP_COUNT,
        )
        writer.close()
        reported = [json.loads(reader.communicate(timeout=TIMEOUT_S)[0]) for reader in readers]
    served = implementation() if form == "chosen" else form
    benchmark.extra_info |= {"form": served, "one_way_us": reported}
    print(f"\none way, {reader_count} {mode}, {size_bytes} bytes, {served}: {reported}")


@pytest.fixture
def round_trip() -> Iterator[Callable[[bytes], bytes | None]]:
    with RingWriter.create(reader_count=1) as writer, process("echo", writer.name) as echo:
        with RingReader.attach(echo.stdout.readline().strip(), 0, spin_us=0) as reader:

            def there_and_back(message: bytes) -> bytes | None:
                writer.write(message)
                return reader.read(TIMEOUT_S)

            yield there_and_back
            writer.close()
            echo.wait(TIMEOUT_S)


@pytest.mark.parametrize("size_bytes", (16, 4096, 65536))
def test_round_trip(benchmark, round_trip: Callable[[bytes], bytes | None], size_bytes: int) -> None:
    """64 KiB: a long prompt."""
    message = secrets.token_bytes(size_bytes)
    assert benchmark.pedantic(round_trip, (message,), rounds=2000, warmup_rounds=100) == message
