"""Stories of the simulator with pins and a clock, until so many hours of that clock have passed, under all laws.

    python scripts/pinned_hours.py --hours 1000 --record perf/records/2026-11-24-pinned-hours.json

Each story has requests that want their beginnings kept for a second up to an hour (tests/sim/scenario_draw.py). Exits with
status 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.sim.scenario_draw import retains, scenario  # noqa: E402
from tests.sim.simulator import Simulation  # noqa: E402
from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402
from vnext.state.events import ClockTicked  # noqa: E402

COUNTS = ("pinned", "expired", "displaced", "yielded", "dropped")


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate stories with pins; print the seed of a failure.")
    parser.add_argument("--hours", type=float, default=1000.0, help="hours of the event clock (default 1000)")
    parser.add_argument("--first-seed", type=int, default=0, help="where to begin (default 0)")
    parser.add_argument("--record", type=Path, help="write what was checked, and on which machine, into this file")
    options = parser.parse_args()
    before, cpu_s, sums = machine(), time.process_time(), Counter[str]()
    for seed in filter(retains, count(options.first_seed)):
        if sums["seconds"] >= 3600 * options.hours:
            break
        simulation = Simulation(scenario(seed))
        try:
            simulation.run_and_require_all()
        except Exception:  # any failure of any kind is a finding
            print(f"seed {seed} failed", flush=True)
            traceback.print_exc()
            return 1
        sums.update(seconds=simulation.now_us // simulation.scenario.second_us, stories=1, events=simulation.event_count)
        sums["ticks"] += sum(isinstance(event, ClockTicked) for event in simulation.events)
        if (pins := simulation.state.pool.pins) is not None:
            sums.update({name: getattr(pins, name) for name in COUNTS})
    figures = {"hours": round(sums.pop("seconds") / 3600, 1), **sums, "cpu_seconds": round(time.process_time() - cpu_s, 1)}
    print(json.dumps(figures))
    if options.record:
        record = {"command": "scripts/pinned_hours.py", "vnext": __version__, **figures, "machine": msgspec.to_builtins(before)}
        options.record.write_text(json.dumps(record | {"load_after": machine().load}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
