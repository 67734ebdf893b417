"""Crash stories of the simulator everywhere: a crash after every event of each, recovered, under all laws.

    python scripts/crash_stories.py --stories 10000 --record perf/records/2026-11-26-crash-stories.json
    python scripts/crash_stories.py --stories 10000 --record THE SAME --continue     from where that record ends
    python scripts/crash_stories.py --first-seed 4711 --stories 1                    one story again

The ranks die, or the engine core and they; once, or again while they recover (tests/sim/crashes.py). Every answer must be
the model's and that of the undisturbed engine. A copy of the simulation crashes in its place, so that the events before a crash are
simulated once. The record is written after every RECORD_STORIES stories too, so a run that is cut off has one. Exits with status 1
if a story failed. Ctrl-C is a normal end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.sim.crashes import KINDS, LONG_SEEDS, crash_everywhere  # noqa: E402
from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402

REPORT_S = 30.0
RECORD_STORIES = 100


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate stories with a crash after every event; print the seed of a failure.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long (default: never)")
    parser.add_argument("--stories", type=int, default=10_000, help="the number of stories (default 10000)")
    parser.add_argument("--first-seed", type=int, default=0, help="where to begin (default 0)")
    parser.add_argument("--clients", type=int, default=2, help="requests of one story (default 2; the work grows with its square)")
    parser.add_argument("--failures-max", type=int, default=1, help="failures after which it stops (default 1)")
    parser.add_argument("--from-the-beginning", action="store_true", help="no copies: each crash from its story's beginning")
    parser.add_argument("--record", type=Path, help="write what was checked, and on which machine, into this file")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="go on from where the record ends, if there is one")
    options = parser.parse_args()
    run = Run(options)
    if options.goes_on and options.record.exists():
        run.go_on_from(json.loads(options.record.read_text()))
    try:
        run.stories()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    run.report()
    run.record()
    return int(bool(run.failed))


class Run:
    """One run and what it has done so far. Mutable."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._before = options, machine()
        self._started_s = time.monotonic()
        self._seconds_before = self._processor_seconds_before = 0.0
        self.done = self.events = self.folded = 0
        self.crashes = [0] * len(KINDS)
        self.failed: list[int] = []

    def go_on_from(self, record: dict[str, Any]) -> None:
        """Count from what another run has recorded."""
        self.done, self.events, self.folded = record["stories"], record["events"], record["events_folded"]
        self.crashes, self.failed = list(record["crashes"].values()), record["failed_seeds"]
        self._options.first_seed = record["first_seed"]
        self._seconds_before, self._processor_seconds_before = record["seconds"], record["processor_seconds"]

    def stories(self) -> None:
        """Story after story until the time is over, all are done or enough have failed."""
        options, reported_s = self._options, self._started_s
        begin = options.first_seed + self.done + len(self.failed)
        for seed in range(begin, options.first_seed + options.stories):
            self._story(seed)
            if time.monotonic() - self._started_s > options.seconds or len(self.failed) >= options.failures_max:
                return
            if time.monotonic() - reported_s > REPORT_S:
                reported_s = time.monotonic()
                self.report()
            if self.done % RECORD_STORIES == 0:
                self.record()

    def _story(self, seed: int) -> None:
        try:
            found = crash_everywhere(seed, self._options.clients, self._options.from_the_beginning)
        except Exception:  # any failure of any kind is a finding
            traceback.print_exc()
            print(f"seed {seed} failed", flush=True)
            self.failed.append(seed)
            return
        self.done, self.events, self.folded = self.done + 1, self.events + found.events, self.folded + found.folded
        self.crashes = [count + more for count, more in zip(self.crashes, found.crashes)]

    def report(self) -> None:
        failures = f"seeds {self.failed} failed" if self.failed else "no failure"
        seconds = time.monotonic() - self._started_s
        print(f"{seconds:6.0f} s: {sum(self.crashes)} crashes in {self.done} stories, {self.events} events, {failures}", flush=True)

    def figures(self) -> dict[str, object]:
        """What was done, for a record."""
        return {
            "seconds": round(self._seconds_before + time.monotonic() - self._started_s, 1),
            "processor_seconds": round(self._processor_seconds_before + time.process_time(), 1),
            "stories": self.done,
            "one_long_story_in": LONG_SEEDS,
            "first_seed": self._options.first_seed,
            "clients": self._options.clients,
            "crashes": dict(zip((kind.name for kind in KINDS), self.crashes)),
            "events": self.events,
            "events_folded": self.folded,
            "failures": len(self.failed),
            "failed_seeds": self.failed,
        }

    def record(self) -> None:
        """Write what was done so far, and on which machine, in one step, where that is wanted."""
        if (path := self._options.record) is None:
            return
        head = {
            "command": " ".join(["python", "scripts/crash_stories.py", *sys.argv[1:]]),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vnext": __version__,
            "machine": msgspec.to_builtins(self._before),
            "load_after": machine().load,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(head | self.figures(), indent=2) + "\n")
        draft.replace(path)
        print(f"written: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
