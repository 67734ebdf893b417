"""vnext beside other engines on this machine: `python -m perf.peers SHAPE [--engines ...] [--rows ...] [--json OUT]`.

Owns the order of a run. In every round each engine starts afresh, does every row and ends; the next round begins with another
engine, so that drift on the machine affects all of them. Figures are medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from perf.peers import report, sessions
from perf.peers.files import FILES, vocab_size_of
from perf.peers.sessions import ENGINES, EngineError, Session
from perf.peers.shapes import HOSTED, QUANTISED, SHAPES
from perf.peers.workloads import ROWS, first_job, row_jobs, warm_up_job
from vnext.base.version import __version__
from vnext.commands.machine import machine

REPEATS = {"decode": 3, "prefill": 5, "long": 3, "concurrent": 1, "shared": 1}
SMOKE_SCALE = 1 / 16
REFERENCE = "transformers"
BUSY_WINDOW_S = 1.0
ENVIRONMENT = (
    "VNEXT_ISA", "VNEXT_KV_CACHE_DTYPE", "VNEXT_QUANTIZATION", "VNEXT_ACTIVATIONS", "ONEDNN_", "MKL_", "PEERS_OPENVINO_",
)  # fmt: skip
"""How the names of variables begin that choose what engines compute with."""


class Results:
    """The measurements so far: figures by row and engine, the load of each session, each engine's description."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[float]]] = {}
        self.sessions: list[dict[str, Any]] = []
        self.about: dict[str, dict[str, Any]] = {}
        self.first_tokens: dict[str, list[int]] = {}

    def add(self, row: str, engine: str, value: float) -> None:
        self.rows.setdefault(row, {}).setdefault(engine, []).append(value)


def main() -> int:
    options = parse_options()
    try:
        folder = sessions.checkpoint(options.shape, options.seed)
        options.vocab_size = vocab_size_of(folder)
        models = {name: sessions.converted(ENGINES[name], folder) for name in options.engines}
        before = machine()
        limits = measured_limits(options, folder) if options.limits else {}
        results = measure(options, models)
    except EngineError as error:
        print(f"perf.peers: {error}", file=sys.stderr)
        return 1
    in_order = {row: {name: results.rows[row][name] for name in options.engines} for row in options.rows}
    print(report.table(in_order, options.engines[0], limits))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record(options, before, limits, results, in_order), indent=2) + "\n")
        print(f"written: {options.json}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.peers", description="vnext beside other engines, here.")
    parser.add_argument("shape", choices=[*sorted(SHAPES), *HOSTED, *sorted(QUANTISED), *FILES])
    everyone, every_row = list(ENGINES), list(ROWS)
    parser.add_argument("--engines", nargs="+", choices=everyone, help="ratios are to the first (default: all that read the model)")
    parser.add_argument("--rows", nargs="+", choices=every_row, default=every_row)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each engine (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the prompts")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--no-limits", dest="limits", action="store_false", help="do not measure the machine itself")
    parser.add_argument("--smoke", action="store_true", help="a sixteenth of the tokens, once: only shows that it runs")
    options = parser.parse_args()
    options.scale = SMOKE_SCALE if options.smoke else 1.0
    options.rounds = 1 if options.smoke else options.rounds
    if options.shape in HOSTED:  # which few engines know
        options.engines, options.limits = options.engines or ["vnext", REFERENCE], False
    options.engines = options.engines or [name for name in everyone if options.shape in SHAPES or ENGINES[name].reads_gguf]
    return options


def measure(options: argparse.Namespace, models: dict[str, Path]) -> Results:
    """All rounds. Raises EngineError."""
    results = Results()
    for round_index in range(options.rounds):
        shift = round_index % len(options.engines)
        for name in options.engines[shift:] + options.engines[:shift]:
            print(f"round {round_index + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            measure_engine(options, results, name, models[name], round_index)
    return results


def measure_engine(options: argparse.Namespace, results: Results, name: str, model: Path, round_index: int) -> None:
    """One session: start, every row, memory."""
    read_into_page_cache(model)
    seen = {"engine": name, "load": os.getloadavg(), "cores_busy_before": round(cores_busy(), 2)}
    first = first_job(options.vocab_size, options.seed, round_index)
    with Session(ENGINES[name], model, options.threads, first) as session:
        for row in options.rows:
            if ROWS[row].jobs is not None:
                measure_row(options, results, session, name, row, round_index)
        collected = {"start": session.start_s, "memory": session.memory_mb()}
        seen["memory_shared_once_mb"] = round(session.shared_once_mb(), 1)
        results.about[name] = session.about
    results.sessions.append(seen)
    for row in collected.keys() & set(options.rows):
        results.add(row, name, collected[row])


def measure_row(
    options: argparse.Namespace, results: Results, session: Session, name: str, row: str, round_index: int
) -> None:
    """A warm-up of the row's own shapes, then its repeats, each with prompts of its own."""
    vocab_size = options.vocab_size
    for job in row_jobs(ROWS[row], vocab_size, options.scale, options.seed, round_index, "warm-up"):
        session.answer(warm_up_job(job))
    for repeat in range(1 if options.smoke else REPEATS[row]):
        jobs = row_jobs(ROWS[row], vocab_size, options.scale, options.seed, round_index, repeat)
        answered = [session.answer(job) for job in jobs]
        results.add(row, name, ROWS[row].figure(jobs, [seconds for seconds, _ in answered]))
        if row == "concurrent" and (round_index, repeat) == (0, 0):
            results.first_tokens[name] = [answer[0] for answer in answered[0][1]]


def measured_limits(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """In a process of its own, so that torch is as fresh as in the engines."""
    what = options.shape if options.shape in SHAPES else str(model)
    command = [sys.executable, "-m", "perf.peers.limits", what, "--threads", str(options.threads)]
    environment = sessions.environment(options.threads)
    ran = subprocess.run(command, cwd=sessions.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def record(
    options: argparse.Namespace, before: Any, limits: dict[str, Any], results: Results, rows: dict[str, Any]
) -> dict[str, Any]:
    """Return all results in the format of perf/records."""
    base = options.engines[0]
    figures = {
        row: {
            "unit": ROWS[row].unit,
            "engines": {name: report.summary(values) for name, values in runs.items()},
            f"{base}_is_better_by": report.ratios(row, runs, base),
        }
        for row, runs in rows.items()
    }
    tokens = results.first_tokens
    same = report.agreement(tokens, REFERENCE) if REFERENCE in tokens else {}
    return {
        "command": command_line(options),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "load_after": machine().load,
        "shape": options.shape,
        "threads": options.threads,
        "smoke": options.smoke,
        "limits": limits,
        "engines": {name: results.about[name] for name in options.engines},
        "sessions": results.sessions,
        "rows": figures,
        f"same_first_token_as_{REFERENCE}": same,
    }


def command_line(options: argparse.Namespace) -> str:
    """The command with what it was given by the environment, without this machine's paths."""
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)]
    return " ".join([*given, "python -m perf.peers", *sys.argv[1:]]).replace(str(options.json), "RECORD")


def read_into_page_cache(model: Path) -> None:
    """Read every file of a model, so that no start waits for the disk."""
    for path in sorted(model.rglob("*")) if model.is_dir() else [model]:
        if path.is_file():
            with path.open("rb", buffering=0) as stream:
                while stream.read(2**24):
                    pass


def cores_busy() -> float:
    """Return the number of cores that other programs kept busy while this program slept briefly."""
    idle_s = idle_seconds()
    begin_s = time.perf_counter()
    time.sleep(BUSY_WINDOW_S)
    return max(0.0, (os.cpu_count() or 1) - (idle_seconds() - idle_s) / (time.perf_counter() - begin_s))


def idle_seconds() -> float:
    """Seconds that all cores were idle or waiting for a disk, summed, since the machine started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
