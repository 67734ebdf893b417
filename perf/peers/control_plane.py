"""vnext's control plane beside vLLM's: `python -m perf.peers.control_plane --json FILE [--vllm PYTHON]...`.

Owns the order of a run and its record. In every round each engine is a fresh process (run_vnext_scheduler.py here,
run_vllm_scheduler.py with each interpreter named by --vllm, by default those that setup.sh made), and the next round
begins with another one. A process reports the medians of its calls; the record has these of all rounds, and their median as
the figure. `--add` continues a record, so that a run can be split.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from perf.peers.__main__ import cores_busy
from perf.peers.report import plain, summary
from perf.peers.sessions import HERE, PEERS, ROOT, EngineError, environment
from vnext.base.version import __version__
from vnext.commands.machine import machine

RUNNING = (32, 256, 1024)
# What each row means, and its unit. A row that an engine does not have is left out for it.
ROWS = {
    **{f"step_{n}": (f"a step with its outputs, {n} requests", "us") for n in RUNNING},
    **{f"bare_{n}": (f"the same without the outputs, {n}", "us") for n in RUNNING},
    **{f"message_{n}": (f"a step's message to the workers, {n}", "bytes") for n in RUNNING},
    **{f"encode_{n}": (f"making that message, {n}", "us") for n in RUNNING},
    "arrival": ("a prompt of 4,096 tokens arrives", "us"),
    "first_miss": ("its first step planned, cache miss", "us"),
    "first_hit": ("its first step planned, cache hit", "us"),
    **{f"blocks_{n}": (f"a block taken and freed, {n} at once", "ns") for n in (1, 32, 256)},
    "import_s": ("a process that imports the scheduler", "s"),
    "import_mb": ("its peak memory", "MB"),
    "loop": ("1,000 turns of an empty loop", "us"),
}
BASE = "vnext"
IMPORT = "import {}; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
RUNNER_TIMEOUT_S = 600
# vLLM without a GPU and without the hub: it compiles and downloads nothing.
VLLM_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
}  # fmt: skip
Figures = Mapping[str, Mapping[str, float]]


class Runner(msgspec.Struct, frozen=True):
    """One process of a round: an interpreter, its script, and the module whose import is its scheduler's."""

    python: str
    script: str
    module: str


def main() -> int:
    options = parse_options()
    runners = [Runner(sys.executable, "run_vnext_scheduler.py", "vnext.sched.schedule")]
    runners += [Runner(python, "run_vllm_scheduler.py", "vllm.v1.core.sched.scheduler") for python in options.vllm]
    sessions = json.loads(options.json.read_text())["sessions"] if options.add else []
    PEERS.mkdir(parents=True, exist_ok=True)
    (PEERS / ".gitignore").write_text("*\n")
    before = machine()
    try:
        for round_index in range(next_round(sessions), next_round(sessions) + options.rounds):
            shift = round_index % len(runners)
            sessions += [session(runner, round_index) for runner in runners[shift:] + runners[:shift]]
            write(options.json, record(before, sessions))
    except EngineError as error:
        print(f"perf.peers.control_plane: {error}", file=sys.stderr)
        return 1
    print(table(rows_of(sessions)))
    print(f"written: {options.json}")
    return 0


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the record after every round, so that an interrupted run keeps its rounds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.peers.control_plane", description="vnext beside vLLM, here.")
    made = sorted(str(path) for path in (PEERS / "venvs").glob("vllm*/bin/python"))
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--vllm", action="append", metavar="PYTHON", help=f"an interpreter that has vLLM ({made})")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each engine (default: %(default)s)")
    parser.add_argument("--add", action="store_true", help="continue the record that is there")
    options = parser.parse_args()
    options.vllm = made if options.vllm is None else options.vllm
    return options


def next_round(sessions: Sequence[Mapping[str, Any]]) -> int:
    return max((each["round"] for each in sessions), default=-1) + 1


def session(runner: Runner, round_index: int) -> dict[str, Any]:
    """One engine measured once, in fresh processes. EngineError with the engine's last words."""
    print(f"round {round_index + 1}: {runner.script}, {runner.python}", file=sys.stderr, flush=True)
    seen = {"round": round_index, "load": os.getloadavg(), "cores_busy_before": round(cores_busy(), 2)}
    import_s, import_mb = imported(runner)
    reported = json.loads(spoken(runner, [runner.python, str(HERE / runner.script)]).splitlines()[-1])
    default = next(iter(reported["figures"]))  # further ones are other modes of the same engine
    reported["figures"][default] |= {"import_s": import_s, "import_mb": import_mb}
    return seen | reported


def imported(runner: Runner) -> tuple[float, float]:
    """Seconds of a whole process that imports the scheduler, and the most MB it had resident."""
    begin_s = time.perf_counter()
    kib = int(spoken(runner, [runner.python, "-c", IMPORT.format(runner.module)]).splitlines()[-1])
    return time.perf_counter() - begin_s, kib * 1024 / 1e6


def spoken(runner: Runner, command: Sequence[str]) -> str:
    """Return a process's output. Raises EngineError if it failed."""
    own = environment(1) | VLLM_ENVIRONMENT
    ran = subprocess.run(
        command, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=RUNNER_TIMEOUT_S
    )
    if ran.returncode:
        raise EngineError(f"{runner.script} with {runner.python} failed: {ran.stderr[-2000:]}")
    return ran.stdout


# ---- arithmetic and text -----------------------------------------------------------------------------------------


def rows_of(sessions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Row -> engine -> its value in each round, in the order of ROWS."""
    rows: dict[str, dict[str, list[float]]] = {}
    for row in ROWS:
        for each in sessions:
            for engine, figures in each["figures"].items():
                if row in figures:
                    rows.setdefault(row, {}).setdefault(engine, []).append(figures[row])
    return rows


def times_less(runs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return how many times less vnext takes than each other engine, by medians: every row here is a cost."""
    if BASE not in runs:
        return {}
    ours = median(runs[BASE])
    return {engine: round(median(values) / ours, 2) for engine, values in runs.items() if engine != BASE}


def table(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """A line for each row: medians, and beside those of others how many times less vnext takes."""
    engines = sorted({engine for runs in rows.values() for engine in runs}, key=lambda name: (name != BASE, name))
    lines = ["".ljust(46) + "".join(engine.rjust(28) for engine in engines)]
    for row, runs in rows.items():
        words, unit = ROWS[row]
        less = times_less(runs)
        cells = [plain(median(runs[engine])) if engine in runs else "-" for engine in engines]
        cells = [f"{cell} ({less[name]:.3g}x)" if name in less else cell for name, cell in zip(engines, cells)]
        lines.append(f"{words}, {unit}".ljust(46) + "".join(cell.rjust(28) for cell in cells))
    return "\n".join(lines)


def record(before: Any, sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything, in the form of perf/records. Machine and load are those of the last piece, each session has its own."""
    figures = {
        row: {
            "what": ROWS[row][0],
            "unit": ROWS[row][1],
            "engines": {engine: summary(values) for engine, values in runs.items()},
            "vnext_takes_less_by": times_less(runs),
        }
        for row, runs in rows_of(sessions).items()
    }
    return {
        "command": "python -m perf.peers.control_plane",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "load_after": machine().load,
        "rows": figures,
        "sessions": list(sessions),
    }


if __name__ == "__main__":
    sys.exit(main())
