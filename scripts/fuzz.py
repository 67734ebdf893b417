"""Fuzz: simulate scenario after scenario until stopped; a failure is shrunk, printed and written as a log.

    python scripts/fuzz.py --seconds 3600 --jobs 2 --record perf/records/2026-11-20-fuzz.json
    python scripts/fuzz.py --first-seed 4711 --seeds 1              that seed again

Each seed is the whole life of an engine (see vnext/sim). `run_seed(seed)` runs one in a debugger, and `vnext-replay`
opens the written logs. Without --first-seed each run takes new seeds and prints them. Exits with status 1 if a scenario
failed. Ctrl-C is a normal end.
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT_S = 10.0
SEEDS_A_SECOND = 1000
"""The first seed comes from the clock: two runs check different seeds as long as neither runs faster than this."""


def main() -> int:
    options = parsed()
    sys.path.insert(0, str(ROOT))
    return job(options) if options.job else Fuzzing(options).run()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate seeded scenarios until stopped; print the seed of a failure.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long (default: never)")
    parser.add_argument("--seeds", type=int, default=0, help="stop after so many (default: never)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with seeds of its own (default 1)")
    parser.add_argument("--first-seed", type=int, help="where to begin (default: seeds that no run had before)")
    parser.add_argument("--clients", type=int, default=60, help="requests of one scenario (default 60)")
    parser.add_argument("--failures-max", type=int, default=1, help="failures after which it stops (default 1)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="where logs go (default ./fuzz-failures)")
    parser.add_argument("--record", type=Path, help="write what was checked, and on which machine, into this file")
    parser.add_argument("--job", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_seed is None:
        options.first_seed = int(time.time()) * SEEDS_A_SECOND
    return options


# ---- the run -----------------------------------------------------------------------------------------------------


class Fuzzing:
    """One run: its jobs and their results so far. Mutable."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.events = self.seeds = 0
        self.last_seed = options.first_seed
        self.failed: list[int] = []
        self.memory_bytes = [0] * options.jobs
        self.started_s = time.monotonic()
        self.reported: queue.Queue[dict | None] = queue.Queue()

    def run(self) -> int:
        """Run until the time is over, enough scenarios failed, or a signal arrives. Returns 1 if a scenario failed."""
        print(f"seeds from {self.options.first_seed}", flush=True)
        before = self._machine() if self.options.record else None
        jobs = [self._start(number) for number in range(1, self.options.jobs + 1)]
        try:
            self._listen(len(jobs))
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the record is still to be written
            print("stopped", flush=True)
        finally:
            for process in jobs:
                process.terminate()
            broken = [process.wait() for process in jobs]
        self._report()
        if before is not None:
            self._write_record(before)
        return int(bool(self.failed) or any(code > 0 for code in broken))

    def _start(self, number: int) -> subprocess.Popen:
        """Start a job in a process, and a thread that reads its output."""
        given = [arg for name in ("seconds", "seeds", "jobs", "first_seed", "clients", "out") for arg in self._as_option(name)]
        command = [sys.executable, __file__, "--job", str(number), *given]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _as_option(self, name: str) -> list[str]:
        return [f"--{name.replace('_', '-')}", str(getattr(self.options, name))]

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.reported.put(json.loads(line))
        self.reported.put(None)

    def _listen(self, running: int) -> None:
        reported_s = time.monotonic()
        while running and len(self.failed) < self.options.failures_max:
            reported = self.reported.get()
            if reported is None:
                running -= 1
                continue
            self.events += reported["events"]
            self.seeds += 1
            self.last_seed = max(self.last_seed, reported["seed"])
            self.memory_bytes[reported["job"] - 1] = reported["memory_bytes"]
            self.failed += [reported["seed"]] if reported["failed"] else []
            if time.monotonic() - reported_s > REPORT_S:
                reported_s = time.monotonic()
                self._report()

    def _report(self) -> None:
        seconds = time.monotonic() - self.started_s
        failures = f"seeds {self.failed} failed" if self.failed else "no failure"
        print(
            f"{seconds:6.0f} s: {self.events} events of {self.seeds} seeds up to {self.last_seed} "
            f"({self.events / max(seconds, 1e-9):.0f}/s), {max(self.memory_bytes) / 2**20:.0f} MiB a job, {failures}",
            flush=True,
        )

    # ---- the record --------------------------------------------------------------------------------------------------

    def _machine(self):
        from vnext.commands.machine import machine

        return machine()

    def _write_record(self, before) -> None:
        import msgspec

        from vnext.base.version import __version__

        record = {
            "command": " ".join(["python", "scripts/fuzz.py", *sys.argv[1:]]),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vnext": __version__,
            "machine": msgspec.to_builtins(before),
            "load_after": self._machine().load,
            "seconds": round(time.monotonic() - self.started_s, 1),
            "events": self.events,
            "seeds": self.seeds,
            "first_seed": self.options.first_seed,
            "last_seed": self.last_seed,
            "memory_bytes_max": max(self.memory_bytes),
            "failures": len(self.failed),
            "failed_seeds": self.failed,
        }
        self.options.record.parent.mkdir(parents=True, exist_ok=True)
        self.options.record.write_text(json.dumps(record, indent=2) + "\n")
        print(f"written: {self.options.record}", flush=True)


# ---- one job -----------------------------------------------------------------------------------------------------


def job(options: argparse.Namespace) -> int:
    """Run every `jobs`-th seed in order and print a JSON line after each. Ends when the parent closes the pipe."""
    end_s, count = time.monotonic() + options.seconds, 0
    try:
        from tests.sim.seeds import SeedFailed, run_seed

        while time.monotonic() < end_s and (not options.seeds or options.job + count * options.jobs <= options.seeds):
            seed = options.first_seed + options.job - 1 + count * options.jobs
            failed = False
            try:
                simulation = run_seed(seed, options.clients)
            except SeedFailed as failure:
                failed, simulation = True, failure.simulation
                explain(failure, options.out / f"seed-{seed}")
            memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            reported = dict(
                job=options.job, seed=seed, events=simulation.event_count, failed=failed, memory_bytes=memory_bytes
            )
            print(json.dumps(reported), flush=True)
            count += 1
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stderr.close()  # suppresses Python's message about a failed flush of standard output
    return 0


def explain(failure, folder: Path) -> None:
    """Write the log of the failure, shrink it, print and write the rest. Standard output belongs to the parent."""
    from tests.sim.seeds import explained

    traceback.print_exception(failure.error)
    print(failure, file=sys.stderr, flush=True)
    write_log(failure.simulation.events, folder / "whole")
    small = explained(failure)
    write_log(small.events, folder / "smallest")
    whole = len(failure.simulation.events)
    print(f"smallest failing events ({len(small.events)} of {whole}), logs in {folder}:", file=sys.stderr)
    print(*small.lines, small.message, sep="\n", file=sys.stderr, flush=True)


def write_log(events, folder: Path) -> None:
    """Write a log directory as the engine does."""
    from vnext.base.version import __version__
    from vnext.log.codec import segment_name
    from vnext.sim.findings import segment

    folder.mkdir(parents=True, exist_ok=True)
    (folder / segment_name(0)).write_bytes(segment(events, __version__))


if __name__ == "__main__":
    sys.exit(main())
