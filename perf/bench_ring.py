"""A round trip through two rings: this process writes, another reads and writes back. `python -m pytest perf/bench_ring.py`

Both sides sleep in the kernel between messages (no spinning), as ranks do on a machine without cores to spare, so two
wake-ups are in each figure.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vnext.runtime.ring import RingReader, RingWriter

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 10.0


@pytest.fixture
def round_trip() -> Iterator[Callable[[bytes], bytes | None]]:
    name = f"vnext-bench-{secrets.token_hex(4)}"
    with RingWriter.create(reader_count=1) as writer:
        command = [sys.executable, "-m", "perf.ring_echo", f"{name}-there", f"{name}-back"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as echo:
            assert echo.stdout.readline() == b"ready\n", "the echoing process did not start"
            with RingReader.attach(f"{name}-back", 0) as reader:

                def there_and_back(message: bytes) -> bytes | None:
                    writer.write(message)
                    return reader.read(TIMEOUT_S)

                yield there_and_back
                writer.close()
                echo.wait(TIMEOUT_S)


@pytest.mark.parametrize("size_bytes", (16, 4096, 65536))
def test_round_trip(benchmark, round_trip: Callable[[bytes], bytes | None], size_bytes: int) -> None:
    """16 bytes: a steady decode plan. 4 KiB: an arrival. 64 KiB: a long prompt."""
    message = secrets.token_bytes(size_bytes)
    assert benchmark.pedantic(round_trip, (message,), rounds=2000, warmup_rounds=100) == message
