"""The walk: many events of seeded scenarios, in a process of its own beside the other tests.

    python tests/walking.py --events 1000000 --parts 0 1 2 3 4 5 6 7 --out results.jsonl

Owns what a part of the walk is, the process that walks, and how a test gets its result. The process gives way to all
others (it is nice) and ends with the one that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PARTS = 8
FIRST_SEED = 10_000
"""Of part 0; each part begins so many seeds behind the one before."""
SEEN = ("finished", "aborted", "preempted", "prefix_hit_tokens")
POLL_S = 0.2
NICENESS = 5


class Walked(msgspec.Struct, frozen=True):
    """What one part did: events checked, seeds in [first_seed, next_seed), totals of what it met, how it failed ("")."""

    part: int
    events: int
    first_seed: int
    next_seed: int
    seconds: float
    met: dict[str, int]
    failure: str


class Walk:
    """The process and its results, as the tests see them."""

    def __init__(self, parts: Sequence[int], events: int, folder: Path) -> None:
        """Starts it. `events`: of all PARTS parts together."""
        self.events_each = -(-events // PARTS)
        self.results: dict[int, Walked] = {}
        self._out, self._said = folder / "results.jsonl", folder / "said.txt"
        command = [sys.executable, __file__, "--events", str(self.events_each * PARTS), "--out", str(self._out), "--parts"]
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [*command, *map(str, parts)], stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )

    def result(self, part: int) -> Walked:
        """Waits for it. Raises AssertionError with the process's last words if it ended without one."""
        while part not in self.results:
            ended = self._process.poll() is not None
            self._read()
            if part not in self.results:
                assert not ended, f"the walk ended without a result for part {part}:\n{self._said.read_text()[-4000:]}"
                time.sleep(POLL_S)
        return self.results[part]

    def _read(self) -> None:
        lines = self._out.read_text().splitlines(keepends=True) if self._out.exists() else []
        for line in lines[len(self.results) :]:
            if line.endswith("\n"):
                walked = msgspec.json.decode(line, type=Walked)
                self.results[walked.part] = walked

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def summary(self) -> str:
        """One sentence for the end of the test run."""
        walked = self.results.values()
        events, seeds = sum(one.events for one in walked), sum(one.next_seed - one.first_seed for one in walked)
        seconds, failed = sum(one.seconds for one in walked), sum(bool(one.failure) for one in walked)
        parts = ", ".join(f"{one.first_seed}-{one.next_seed - 1}" for one in walked)
        end = f"{failed} failed" if failed else "all laws hold"
        return f"walk: {events} events of {seeds} scenarios checked in {seconds:.0f} s beside the tests, {end} (seeds {parts})"


# ---- in the process ----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Walk parts of the simulated events; a line of JSON for each.")
    parser.add_argument("--events", type=int, required=True, help=f"of all {PARTS} parts together")
    parser.add_argument("--parts", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.nice(NICENESS)
    parent = os.getppid()
    try:
        for part in options.parts:
            walked = walk_part(part, options.events // PARTS, parent)
            with options.out.open("a") as out:
                out.write(json.dumps(msgspec.to_builtins(walked)) + "\n")
    except KeyboardInterrupt:
        return 1
    return 0


def walk_part(part: int, events_min: int, parent: int) -> Walked:
    """Seeds in order until so many events are checked, or one of them fails."""
    from vnext.sched.sim.seeds import SeedFailed, explained, run_seed

    started_s, events, failure = time.monotonic(), 0, ""
    first_seed = seed = FIRST_SEED * (part + 1)
    met = dict.fromkeys(SEEN, 0)
    while events < events_min and not failure:
        if os.getppid() != parent:
            raise SystemExit("whoever started the walk is gone")
        try:
            simulation = run_seed(seed)
            for name in SEEN:
                met[name] += getattr(simulation.state.counters, name)
            events += len(simulation.events) - 1  # the first one only starts the engine
        except SeedFailed as failed:
            small = explained(failed)
            failure = "\n".join([str(failed), f"the smallest failing events are {len(small.events)}:", *small.lines, small.message])
        seed += 1
    return Walked(part, events, first_seed, seed, round(time.monotonic() - started_s, 2), met, failure)


if __name__ == "__main__":
    sys.exit(main())
