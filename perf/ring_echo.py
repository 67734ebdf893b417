"""The child processes of bench_ring.py: one echoes each message, the others measure the time of transfer.

The clock is CLOCK_MONOTONIC, which all processes of a machine share; a message begins with its send time.
"""

from __future__ import annotations

import json
import struct
import sys
import time

from vnext.runtime.processes import futex
from vnext.runtime.transport.ring.common import RingClosed
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

FORMS = {"chosen": None, "plain": futex.choose_wait_method()}
STAMP = struct.Struct("<q")
WARMUP_COUNT = 100


def echo(requests: str) -> None:
    """Reads from one ring, creates another, writes back; both sides sleep between messages."""
    with RingReader.attach(requests, 0, spin_us=0) as reader, RingWriter.create(reader_count=1) as writer:
        print(writer.name, flush=True)
        while True:
            try:
                writer.write(reader.read())
            except RingClosed:
                return


def listen(name: str, index: str, spin_us: str, form: str) -> None:
    """Prints quantiles of the time from before `write` to after `read`, in microseconds, as JSON."""
    times_ns = []
    with RingReader.attach(name, int(index), spin_us=float(spin_us), waits=FORMS[form]) as reader:
        print("ready", flush=True)
        while True:
            try:
                message = reader.read()
            except RingClosed:
                break
            times_ns.append(time.monotonic_ns() - STAMP.unpack_from(message)[0])
    times_us = sorted(time_ns / 1e3 for time_ns in times_ns[WARMUP_COUNT:])
    quantiles = {"min": 0.0, "p50": 0.5, "p99": 0.99}
    print(json.dumps({name: round(times_us[int(len(times_us) * share)], 1) for name, share in quantiles.items()}))


if __name__ == "__main__":
    {"echo": echo, "listen": listen}[sys.argv[1]](*sys.argv[2:])
