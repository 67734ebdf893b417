"""Measure the accuracy of what-if against real logs: `python -m perf.what_if_logs LOG ... [--json RECORD]`.

For each log of a server it gives the times to the first token: as recorded, from the model under the log's own settings, and
from the model with the machine's pauses at random moments. The first two should be equal, and the third close to them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import msgspec

from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.replay.futures.ground import Trial, ground_of, timed
from vnext.replay.futures.what_if import DRAWS, reproduced
from vnext.replay.futures.what_if_run import rerun, retrace
from vnext.replay.futures.what_if_score import score
from vnext.replay.reading.objective import Objective
from vnext.replay.reading.source import open_log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="the record to write")
    options = parser.parse_args()
    before = machine()
    found = {path.resolve().parent.name: measured(path) for path in options.logs}
    for name, figures in found.items():
        print(name, json.dumps(figures))
    if options.json:
        record = {
            "command": "python -m perf.what_if_logs FOLDER/NAME/LOG ... --json RECORD", "vnext": __version__,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": msgspec.to_builtins(before),
            "load_after": machine().load, "logs": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measured(path: Path) -> dict[str, object]:
    """Return the median time to the first token in ms, each way, and whether the model reproduces the log event by event."""
    ground, objective = ground_of(open_log(path)), Objective()
    taken, config = ground.taken, ground.started.config
    shown = score("", retrace(taken, ground.started), objective).ttft_ms[0]
    own = rerun(taken, ground.started, config, timed(ground.model, taken, ground.pace), exact=True)
    drawn = sorted(ground.score(Trial((), seed), objective).ttft_ms[0] for seed in range(1, DRAWS + 1))
    unchanged = ground.score(Trial((), 0), objective).ttft_ms[0]
    figures = dict(
        recorded=shown,
        unchanged=unchanged,
        drawn_least=drawn[0],
        drawn_median=statistics.median(drawn),
        drawn_most=drawn[-1],
    )
    return {name: round(value, 2) for name, value in figures.items()} | {
        "off_percent": round(100 * (unchanged / shown - 1), 2),
        "drawn_off_percent": round(100 * (statistics.median(drawn) / shown - 1), 1),
        "events": len(taken.events),
        "reproduced_by_the_model": reproduced(taken, own),
        "steps": len(taken.ends_us),
    }


if __name__ == "__main__":
    sys.exit(main())
