"""Fuzz: simulate scenario after scenario until stopped, and print the seed of any that fails.

    python scripts/fuzz.py --seconds 600 --jobs 2

Each seed is a whole engine's life (see vnext/sched/simulator.py); `simulate(scenario(seed))` runs a failure again. Ends
with status 1 if a scenario failed. Stopping it with Ctrl-C is a normal end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT_S = 10.0


def main() -> int:
    options = parsed()
    sys.path.insert(0, str(ROOT))
    if options.jobs > 1:
        return run_jobs(options)
    try:
        return run(options)
    except KeyboardInterrupt:
        return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate seeded scenarios until stopped; print the seed of a failure.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long (default: never)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with seeds of its own (default 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="where to begin (default 0)")
    parser.add_argument("--stride", type=int, default=1, help="distance between two seeds (default 1)")
    parser.add_argument("--clients", type=int, default=60, help="requests of one scenario (default 60)")
    return parser.parse_args()


def run_jobs(options: argparse.Namespace) -> int:
    """The same program, `jobs` times over, with interleaved seeds."""
    children = []
    for job in range(options.jobs):
        command = [sys.executable, __file__, "--first-seed", str(options.first_seed + job), "--stride", str(options.jobs)]
        command += ["--seconds", str(options.seconds), "--clients", str(options.clients)]
        children.append(subprocess.Popen(command))
    try:
        return max(child.wait() for child in children)
    except KeyboardInterrupt:
        return max(child.wait() for child in children)


def run(options: argparse.Namespace) -> int:
    """Seeds in order. Returns 1 at the first failure."""
    from vnext.sched.sim_scenario import scenario
    from vnext.sched.simulator import simulate

    started_s = reported_s = time.monotonic()
    seed, events = options.first_seed, 0
    while (now_s := time.monotonic()) - started_s < options.seconds:
        try:
            events += len(simulate(scenario(seed, options.clients)).events)
        except Exception:  # any failure of any kind is a finding: its seed is what matters
            traceback.print_exc()
            print(f"seed {seed} fails: simulate(scenario({seed}, {options.clients})) runs it again", flush=True)
            return 1
        if now_s - reported_s > REPORT_S:
            reported_s = now_s
            print(f"seeds {options.first_seed}..{seed} by {options.stride}: {events} events, no failure", flush=True)
        seed += options.stride
    print(f"seeds {options.first_seed}..{seed - options.stride} by {options.stride}: {events} events, no failure", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
