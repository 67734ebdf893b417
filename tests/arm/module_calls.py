"""Uses of the compiled modules in C, each named with a hash of what it gave: one program for any processor, without torch.

    python module_calls.py

Whole engines with the state's columns, their logs and redacted events; drafts; two processes that exchange frames through a ring,
and two ranks that sum. test_arm.py compares what two processors print.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from log_drive import drawn_config, engine, record, started

from vnext.base import compiled
from vnext.log.redaction import Redactor
from vnext.runtime.processes import futex
from vnext.runtime.transport.ring import memory as ring_memory
from vnext.runtime.transport.ring.common import RingClosed
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter
from vnext.state.events import StepCommitted
from vnext.state.fold_commit import match_samples

MODULES = [name for name in compiled.MODULES if ".kernels." not in name]
ENGINES, ARRIVALS = 6, 12
FRAMES, RING_BYTES = 300, 1024
EXCHANGE_DATA, SLOT_BYTES, ELEMENTS = 4096, 4096, 1000
"""Where slots begin with two ranks, as exchange_plain.py lays them out, and what each holds."""


def digest_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def logs() -> str:
    """Logs of engines: events, digests of the state and checksums of every frame."""
    found = []
    for seed in range(ENGINES):
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder), config=drawn_config(random.Random(seed)), seed=seed, arrivals=ARRIVALS)
            found += [path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return digest_of(*found)


def redacted() -> str:
    """Events of engines with pseudonyms in place of tokens."""
    found = []
    for seed in range(ENGINES):
        config = drawn_config(random.Random(seed))
        redactor = Redactor(started(config), bytes(range(16)))
        for events, befores, _, _ in engine(config, seed, ARRIVALS):
            for before, event in zip(befores, events):
                matched = match_samples(before, event) if isinstance(event, StepCommitted) else None
                found.append(repr(redactor.redact(before, event, matched)).encode())
    return digest_of(*found)


def drafts() -> str:
    automaton = compiled.load("vnext.sampling.drafters._automaton").SuffixAutomaton()
    found = []
    for seed in range(40):
        tokens = np.random.default_rng(seed).integers(0, 4, 50).astype(np.int32)
        automaton.extend(tokens)
        found.append(repr(automaton.drafts(tokens[-9:], 6, 1.0, 0.1)).encode())
    return digest_of(*found)


def other_process(work: Callable[[], bytes]) -> Callable[[], bytes]:
    """Starts `work` in a fork; a call waits for what it returned."""
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)

        def result() -> bytes:
            with os.fdopen(read_end, "rb") as pipe:
                found = pipe.read()
            assert os.waitpid(pid, 0)[1] == 0, "the other process failed"
            return found

        return result
    status = 1
    try:
        os.write(write_end, work())
        status = 0
    except BaseException:  # a fork ends here, whatever happened
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def all_frames(name: str, waits: futex.WaitMethod | None) -> bytes:
    frames = []
    with RingReader.attach(name, 0, waits=waits, spin_us=0) as reader:
        while True:
            try:
                frames.append(reader.read(timeout_s=60))
            except RingClosed:
                return digest_of(*frames).encode()


def frames(waits: futex.WaitMethod | None) -> str:
    """Frames through a ring that holds few of them, to a process that sleeps where there is none."""
    sizes = np.random.default_rng(1).integers(0, 3 * RING_BYTES, FRAMES).tolist()
    sent = [bytes([index % 251]) * (size if index % 9 == 0 else size % 200) for index, size in enumerate(sizes)]
    with RingWriter.create(capacity_bytes=RING_BYTES, reader_count=1, waits=waits) as writer:
        received = other_process(lambda: all_frames(writer.name, waits))
        for frame in sent:
            writer.write(frame, timeout_s=60)
        writer.close()
        assert received().decode() == digest_of(*sent), "frames were lost or torn"
    return digest_of(*sent)


def summed(memory: mmap.mmap, rank: int) -> bytes:
    """What one of two ranks holds after it has added its numbers to the other's, in each of three types."""
    exchange = compiled.load("vnext.runtime.transport.collectives._exchange").Exchange(memory, 2, rank, SLOT_BYTES)
    found, ticks = [], 0
    for operation, (kind, dtype) in enumerate([(0, np.uint32), (1, np.uint16), (2, np.uint16)] * 4):
        bits = np.random.default_rng(7 * operation + rank).integers(0, 2 ** (8 * dtype().itemsize), ELEMENTS, dtype)
        result = np.empty_like(bits)
        ticks += 1
        exchange.enter(operation, ticks, kind, bits.ctypes.data, bits.nbytes)
        assert exchange.await_all(operation, ticks, kind, bits.nbytes, 0, 60 * 10**9) == -1, "the other rank is missing"
        exchange.add(operation, kind, 0, ELEMENTS, result.ctypes.data)
        is_number = ~np.isnan(result.view(np.float32)) if kind == 0 else True  # which NaN comes is up to the processor
        found.append(np.where(is_number, result, 0).tobytes())
    exchange.release()
    return b"".join(found)


def sums() -> str:
    with mmap.mmap(-1, EXCHANGE_DATA + 4 * SLOT_BYTES) as memory:
        theirs = other_process(lambda: summed(memory, 1))
        ours = summed(memory, 0)
        assert theirs() == ours, "two ranks hold different sums"
    return digest_of(ours)


def main() -> None:
    missing = [name for name in MODULES if compiled.load(name) is None]
    assert not missing, f"not compiled: {missing}"
    assert ring_memory.implementation() == "compiled" and isinstance(futex.choose_wait_method(), futex.Futex)
    futex._membarrier_fence()()
    uses = {
        "logs": logs, "redacted events": redacted, "drafts": drafts, "frames": lambda: frames(None),
        "frames by the plain ring": lambda: frames(futex.Futex()), "sums of ranks": sums,
    }  # fmt: skip
    print(json.dumps({name: use() for name, use in uses.items()}))


if __name__ == "__main__":
    main()
