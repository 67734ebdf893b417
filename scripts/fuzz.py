"""Fuzz: simulate scenario after scenario until stopped; a failure is shrunk, printed and written as a log.

    python scripts/fuzz.py --seconds 600 --jobs 2

Each seed is a whole engine's life (see vnext/sched/sim/simulator.py); `simulate(scenario(seed))` runs a failure again, and
`vnext-replay` opens the written logs. Ends with status 1 if a scenario failed. Stopping it with Ctrl-C is a normal end.
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
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="where logs go (default ./fuzz-failures)")
    parser.add_argument("--clients", type=int, default=60, help="requests of one scenario (default 60)")
    return parser.parse_args()


def run_jobs(options: argparse.Namespace) -> int:
    """The same program, `jobs` times over, with interleaved seeds."""
    children = []
    for job in range(options.jobs):
        command = [sys.executable, __file__, "--first-seed", str(options.first_seed + job), "--stride", str(options.jobs)]
        command += ["--seconds", str(options.seconds), "--clients", str(options.clients), "--out", str(options.out)]
        children.append(subprocess.Popen(command))
    try:
        return max(child.wait() for child in children)
    except KeyboardInterrupt:
        return max(child.wait() for child in children)


def run(options: argparse.Namespace) -> int:
    """Seeds in order. Returns 1 at the first failure."""
    from vnext.sched.sim.scenario import scenario
    from vnext.sched.sim.simulator import Simulation

    started_s = reported_s = time.monotonic()
    seed, events = options.first_seed, 0
    while (now_s := time.monotonic()) - started_s < options.seconds:
        simulation = Simulation(scenario(seed, options.clients))
        try:
            simulation.run_and_require_all()
        except Exception as error:  # any failure of any kind is a finding: its seed is what matters
            traceback.print_exc()
            print(f"seed {seed} fails: simulate(scenario({seed}, {options.clients})) runs it again", flush=True)
            explain(simulation, error, options.out / f"seed-{seed}")
            return 1
        events += len(simulation.events)
        if now_s - reported_s > REPORT_S:
            reported_s = now_s
            print(f"seeds {options.first_seed}..{seed} by {options.stride}: {events} events, no failure", flush=True)
        seed += options.stride
    print(f"seeds {options.first_seed}..{seed - options.stride} by {options.stride}: {events} events, no failure", flush=True)
    return 0


def explain(simulation, error: Exception, folder: Path) -> None:
    """Write the log of the failure, shrink it, print and write what is left."""
    from vnext.sched.sim.shrink import shrink
    from vnext.sched.sim.judge import failing_like, fewer_clients, judge, kind_of, told, toy_voice

    write_log(simulation.events, folder / "whole")
    finding = judge(simulation.events)
    if finding is not None:
        small = shrink(simulation.events, failing_like(finding.kind), toy_voice(simulation.scenario.config.vocab_size))
    else:  # only clocks, transport or a second rank show it: what is made smaller is the scenario
        kind = kind_of(error)
        small = fewer_clients(simulation, lambda caught: kind_of(caught) == kind)
    write_log(small, folder / "smallest")
    print(f"smallest failing events ({len(small)} of {len(simulation.events)}), logs in {folder}:")
    print("\n".join(told(small)))
    print((judge(small) or finding or error), flush=True)


def write_log(events, folder: Path) -> None:
    """A log directory as the engine writes it."""
    from vnext.sched.sim.log import segment
    from vnext.state.log import segment_name
    from vnext.version import __version__

    folder.mkdir(parents=True, exist_ok=True)
    (folder / segment_name(0)).write_bytes(segment(events, __version__))


if __name__ == "__main__":
    sys.exit(main())
