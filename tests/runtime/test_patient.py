"""A stderr that nobody reads: words are left out, and nobody waits."""

from __future__ import annotations

import os
import time

from vnext.runtime.protocol.log_lines import PatientStream


def test_words_are_left_out_while_nobody_reads_and_come_again_after_that() -> None:
    reading, writing = os.pipe()
    stream, began_s = PatientStream(writing, timeout_ms=50), time.monotonic()
    for number in range(4000):
        stream.write(f"{number:0100}\n")
    assert time.monotonic() - began_s < 60
    lines = os.read(reading, 2**20).split(b"\n")
    assert [int(each) for each in lines[:-1]] == [*range(len(lines) - 1)] and 100 < len(lines) < 4000
    stream.write("ü\udc80\n")
    assert os.read(reading, 100) == b"\xc3\xbc\\udc80\n"
    os.close(reading)
    stream.write("nobody reads it any more")
    os.close(writing)
