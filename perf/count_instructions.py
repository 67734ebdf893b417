"""Count the instructions of a steady step, a visit, a streamed token and a request: `python -m perf.count_instructions`.

Owns the counting: valgrind's callgrind runs `steady_core` and `steady_edge`, and calls of an otherwise unused libc function
separate the parts. ZMQ's threads are counted, kernel work is not. Beside busy processes messages come at other times: an edge's
counts vary by 10 % (a core's by 0.3 %, as its clock stands still), so each count is the median of several runs, one after another.
Counts differ between processors, so a record belongs to one processor model. `--record` writes a record, `--json` one elsewhere;
the counts are compared with the newest record of this processor. `--gate 3` ends with 1 where a count is more than 3 per cent above
that record, made by the same Python and libraries: they count too. A change that is meant to cost so much brings a new record.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from vnext.base.version import __version__
from vnext.commands.machine import Machine, machine
from vnext.runtime.protocol.stats import CacheMiss
from vnext.state.state import State

ROWS = 64
STEPS, WINDOWS = 48, 3  # all rows fill a block of 16 tokens in each window
WARM_STEPS = 16
ARRIVALS = 12
VISITORS, VISITS = 16, 8
RUNS = 3
TIMEOUT_S = 300
SUITE = "instructions"
RECORDS = Path(__file__).resolve().parent / "records"
PROGRAMS = {"core": ("step", "visit"), "edge": ("token", "request"), "misses": ("arrival", "explanation")}
USUAL = ("core", "edge")
ASKED, DEPARTS = 4_096, 100  # tokens of a prompt, and where it departs from the one before
MEANS = {
    "step": f"a steady step of {ROWS} rows in the engine core, by row and in all",
    "visit": "four such steps, in which a request of 16 tokens arrives, is answered by 2 and leaves",
    "token": "a streamed token of /v1/completions in the API server, its readers' part included",
    "arrival": f"a request of {ASKED:,} tokens that departs from the one before at token {DEPARTS}, in the engine core, to its end",
    "explanation": "what of that says why the prefix cache missed",
    "request": "a request of /v1/completions that streams two tokens on its own connection, its reader's part included",
}
PARTS = 5  # of an explained arrival: up to its admission, that, up to its end, that, and the rest
_divide = os.getppid  # callgrind dumps its counts before each call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=PROGRAMS, action="append", help="only this one")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of each program, of which the medians are taken (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write a record of this processor")
    parser.add_argument("--json", type=Path, help="record to write, with the counts of each run")
    parser.add_argument("--gate", type=float, metavar="PERCENT", help="end with 1 where a count is so much above the record")
    parser.add_argument("--drive", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        DRIVES[options.drive]()
        os._exit(0)  # skip the shutdown, which is not measured
    if (why_not := reason_not_to_count()) is not None:
        print(f"instructions: not counted, {why_not}")
        return 0
    before, runs = machine(), {}
    try:
        for program in options.program or USUAL:
            runs |= count_often(program, options.runs)
    except (Uncounted, subprocess.TimeoutExpired) as error:
        print(f"instructions: not counted, because {error}")
        return 0
    counted = medians(runs)
    known = newest_record(before.cpu_model, before.instruction_sets)
    for line in compared(counted, known["instructions"] if known else None, before.cpu_model):
        print(f"instructions: {line}")
    for path in [record_path(before)] * options.record + [options.json] * bool(options.json):
        write_record(path, runs, msgspec.to_builtins(before))
    if options.gate is None or known is None or not is_comparable(known["machine"], before):
        return 0
    if above := beyond(counted, known["instructions"], options.gate):
        print(f"instructions: {above}")
    return int(bool(above))


class Uncounted(Exception):
    """Raised with the reason when nothing can be counted."""


def reason_not_to_count() -> str | None:
    return None if shutil.which("valgrind") else "because there is no valgrind here: apt install valgrind"


# ---- what is counted ---------------------------------------------------------------------------------------------


def stop_clock() -> None:
    """Let time stand still for what is imported from now on. Statistics are due four times a second and timestamps become a block
    each second: the slower the machine is under valgrind, the more of them would be counted with each step."""
    for clock in ("monotonic", "monotonic_ns"):
        setattr(time, clock, repeat(getattr(time, clock)()).__next__)


def drive_core() -> None:
    stop_clock()
    from perf.steady_core import SteadyCore

    with SteadyCore() as core:
        core.ask(ROWS, 5000)
        core.run(WARM_STEPS)
        gc.freeze()
        _divide()
        for _ in range(WINDOWS):
            core.run(STEPS // WINDOWS)
            _divide()
        for _ in range(ARRIVALS):
            core.ask(1, 2)
            _divide()  # excludes the client's work
            core.run(STEPS // ARRIVALS)
            _divide()
        os._exit(0)


def drive_edge() -> None:
    from perf.steady_edge import SteadyEdge

    with SteadyEdge(ROWS) as edge:
        edge.run(WARM_STEPS)
        gc.freeze()
        _divide()
        edge.run(STEPS)
        _divide()
        edge.visit(VISITORS)
        _divide()
        for _ in range(VISITS):
            edge.visit(VISITORS)
        _divide()


def drive_misses() -> None:
    """Requests of one client, of which each is explained."""
    from perf.steady_core import SteadyCore
    from vnext.runtime.engine.misses import CacheMisses

    admitted, ended = CacheMisses.admitted, CacheMisses.ended

    class Divided(CacheMisses):
        def admitted(self, before: State, after: State, ids: Collection[int]) -> Mapping[int, CacheMiss]:
            _divide()
            found = admitted(self, before, after, ids)
            _divide()
            return found

        def ended(self, before: State, ids: Collection[int]) -> None:
            _divide()
            ended(self, before, ids)
            _divide()

    with SteadyCore() as core:
        prompt, core.core._misses = np.arange(ASKED, dtype=np.int32) % 2_000 + 1, Divided()
        for number in range(WARM_STEPS + ARRIVALS):
            prompt[DEPARTS] = 2_001 + number
            if number == WARM_STEPS:
                gc.freeze()
            _divide()
            finished = core.core.engine.state.counters.finished
            core.ask_one(prompt.tobytes(), 2, client=5)
            while core.core.engine.state.counters.finished == finished:
                core.run(1)
        _divide()
        lost = core.core._misses.losses.changed
        assert lost >= ARRIVALS * (ASKED - DEPARTS - 32), f"{lost} tokens were explained"
        os._exit(0)


DRIVES = {"core": drive_core, "edge": drive_edge, "misses": drive_misses}


def count_often(program: str, runs: int) -> dict[str, list[int]]:
    """Return the instructions of each part of a program in each of these runs, by its name in MEANS."""
    counts = [count(program) for _ in range(runs)]
    return {part: [each[part] for each in counts] for part in PROGRAMS[program]}


def medians(runs: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the median of each count over the runs."""
    return {part: int(median(each)) for part, each in runs.items()}


def count(program: str) -> dict[str, int]:
    """Return the instructions of each part of a program, by its name in MEANS."""
    with tempfile.TemporaryDirectory(prefix="vnext-count-") as folder:
        out = Path(folder) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", "--dump-before=getppid", f"--callgrind-out-file={out}", "-q"]
        command += [sys.executable, "-m", "perf.count_instructions", "--drive", program]
        env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            command, cwd=RECORDS.parent.parent, env=env, timeout=TIMEOUT_S, check=False, capture_output=True, text=True
        )
        if ran.returncode:
            raise Uncounted(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-2000:]}")
        dumps = sorted(out.parent.glob("callgrind.out.*"), key=lambda path: int(path.suffix[1:]))
        totals = [total_of(path) for path in dumps[1:]]  # the first dump is the start
    if program == "misses":
        arrivals = [totals[at : at + PARTS] for at in range(WARM_STEPS * PARTS, (WARM_STEPS + ARRIVALS) * PARTS, PARTS)]
        return {"arrival": int(median(map(sum, arrivals))), "explanation": int(median(each[1] + each[3] for each in arrivals))}
    if program == "edge":
        return {"token": totals[0] // (STEPS * ROWS), "request": totals[2] // (VISITS * VISITORS)}
    steps, arrivals = totals[:WINDOWS], totals[WINDOWS + 1 : WINDOWS + 2 * ARRIVALS : 2]
    return {"step": int(median(steps)) * WINDOWS // STEPS, "visit": sum(arrivals) // ARRIVALS}


def total_of(dump: Path) -> int:
    """Return the total count of one callgrind dump."""
    return int(re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)[1])


# ---- records -----------------------------------------------------------------------------------------------------


def newest_record(cpu_model: str, instruction_sets: Sequence[str], folder: Path = RECORDS) -> dict[str, Any] | None:
    """Return the newest record of this processor model with these instruction sets, since virtual machines call several generations
    by one name; file names begin with the date."""
    for path in sorted(folder.glob(f"*-{SUITE}-*.json"), reverse=True):
        record = json.loads(path.read_text())
        known = record["machine"]
        if known["cpu_model"] == cpu_model and list(known["instruction_sets"]) == [*instruction_sets]:
            return record
    return None


def compared(counted: dict[str, int], known: dict[str, int] | None, cpu_model: str) -> list[str]:
    """Return a line for each count, with its change against a record."""
    if known is None:
        return [f"{name} {value:,}" for name, value in counted.items()] + [f"no record of {cpu_model} to compare with"]
    return [
        f"{name} {value:,} ({100 * (value / known[name] - 1):+.1f} % against the record of this processor)"
        if name in known else f"{name} {value:,} (not in the record of this processor)"
        for name, value in counted.items()
    ]  # fmt: skip


def is_comparable(known: Mapping[str, Any], now: Machine) -> bool:
    """Return whether a record's machine has this one's Python and libraries."""
    return known["python"] == now.python and known["libraries"] == now.libraries


def beyond(counted: Mapping[str, int], known: Mapping[str, int], percent: float) -> str:
    """Return a sentence that names what takes more instructions than the record allows, "" where nothing does."""
    found = {name: (value, known[name]) for name, value in counted.items() if 100 * value > (100 + percent) * known.get(name, value)}
    above = [f"a {name} takes {100 * (value / before - 1):.1f} %" for name, (value, before) in found.items()]
    more = "more instructions than the record: find what costs them, or record that they are meant (--record)."
    return f"{' and '.join(above)} {more}" if above else ""


def record_path(of: Machine) -> Path:
    """Return where today's record of a machine's processor belongs."""
    words = f"{of.cpu_model} {''.join(of.instruction_sets[-1:])}"
    model = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return RECORDS / f"{time.strftime('%Y-%m-%d')}-{SUITE}-{model}.json"


def write_record(path: Path, runs: Mapping[str, Sequence[int]], before: dict[str, Any]) -> None:
    """Write the medians and the counts of each run."""
    record = {
        "command": "python -m perf.count_instructions --record",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": before,
        "means": MEANS,
        "instructions": medians(runs),
        "runs": runs,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
