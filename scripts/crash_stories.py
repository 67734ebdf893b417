"""Crash stories of the simulator everywhere: a crash after every event of each, recovered, under all laws.

    python scripts/crash_stories.py --seconds 3600 --record perf/records/2026-11-24-crash-stories.json
    python scripts/crash_stories.py --first-seed 4711 --stories 1           one story again

The ranks die, or the engine core and they; once, or again while they recover (vnext/sched/sim/crashes.py). Every answer must be
the model's and that of the undisturbed engine. Exits with status 1 if a story failed. Ctrl-C is a normal end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.machine import machine  # noqa: E402
from vnext.sched.sim.crashes import KINDS, CrashFailed, crash_everywhere  # noqa: E402
from vnext.version import __version__  # noqa: E402

REPORT_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate stories with a crash after every event; print the seed of a failure.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long (default: never)")
    parser.add_argument("--stories", type=int, default=10_000, help="the number of stories (default 10000)")
    parser.add_argument("--first-seed", type=int, default=0, help="where to begin (default 0)")
    parser.add_argument("--clients", type=int, default=2, help="requests of one story (default 2; the work grows with its square)")
    parser.add_argument("--failures-max", type=int, default=1, help="failures after which it stops (default 1)")
    parser.add_argument("--record", type=Path, help="write what was checked, and on which machine, into this file")
    options = parser.parse_args()
    before, run = machine(), Run(options)
    try:
        run.stories()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    run.report()
    if options.record:
        write_record(options.record, run.figures(), msgspec.to_builtins(before))
    return int(bool(run.failed))


class Run:
    """One run and what it has done so far. Mutable."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._started_s, self._started_cpu_s = time.monotonic(), time.process_time()
        self.done = self.events = 0
        self.crashes = [0] * len(KINDS)
        self.failed: list[int] = []

    def stories(self) -> None:
        """Story after story until the time is over, all are done or enough have failed."""
        options, reported_s = self._options, self._started_s
        for seed in range(options.first_seed, options.first_seed + options.stories):
            self._story(seed)
            if time.monotonic() - self._started_s > options.seconds or len(self.failed) >= options.failures_max:
                return
            if time.monotonic() - reported_s > REPORT_S:
                reported_s = time.monotonic()
                self.report()

    def _story(self, seed: int) -> None:
        try:
            found = crash_everywhere(seed, self._options.clients)
        except CrashFailed as failure:
            traceback.print_exception(failure.error)
            print(failure, flush=True)
            self.failed.append(seed)
            return
        self.done, self.events = self.done + 1, self.events + found.events
        self.crashes = [count + more for count, more in zip(self.crashes, found.crashes)]

    def report(self) -> None:
        failures = f"seeds {self.failed} failed" if self.failed else "no failure"
        seconds = time.monotonic() - self._started_s
        print(f"{seconds:6.0f} s: {sum(self.crashes)} crashes in {self.done} stories, {self.events} events, {failures}", flush=True)

    def figures(self) -> dict[str, object]:
        """What was done, for a record."""
        return {
            "seconds": round(time.monotonic() - self._started_s, 1),
            "processor_seconds": round(time.process_time() - self._started_cpu_s, 1),
            "stories": self.done,
            "first_seed": self._options.first_seed,
            "clients": self._options.clients,
            "crashes": dict(zip((kind.name for kind in KINDS), self.crashes)),
            "events": self.events,
            "failures": len(self.failed),
            "failed_seeds": self.failed,
        }


def write_record(path: Path, figures: dict[str, object], before: dict[str, object]) -> None:
    """A record: the machine before, its load behind, and the figures."""
    head = {
        "command": " ".join(["python", "scripts/crash_stories.py", *sys.argv[1:]]),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": before,
        "load_after": machine().load,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | figures, indent=2) + "\n")
    print(f"written: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
