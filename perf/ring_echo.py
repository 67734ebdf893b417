"""The other process of bench_ring.py: sends back on one ring what it reads on another, until that is closed."""

from __future__ import annotations

import sys

from vnext.runtime.ring import RingClosed, RingReader, RingWriter


def main(requests: str, answers: str) -> None:
    with RingReader.attach(requests, 0) as reader, RingWriter.create(answers, reader_count=1) as writer:
        print("ready", flush=True)
        while True:
            try:
                writer.write(reader.read())
            except RingClosed:
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
