"""Run a suite and write its record: `python -m perf.record bench_state [name]` writes perf/records/<date>-<name>.json.

Owns the format of a record: the state of the machine before the run (its load shows whether other programs were active), the
command, and what was measured; of a suite, the statistics of each benchmark in microseconds. Records are added, never edited.
Programs of this folder that are no suites take their heads from here too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from vnext.base.version import __version__
from vnext.commands.machine import Machine, machine

PERF = Path(__file__).resolve().parent
STATISTICS_US = ("min", "median", "mean", "max", "iqr", "stddev")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=sorted(path.stem for path in PERF.glob("bench_*.py")))
    parser.add_argument("name", nargs="?", default="", help="of the record (default: the suite's)")
    parser.add_argument("-k", dest="only", default="", help="only the benchmarks that pytest's -k would take")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        measured = run_suite(options.suite, Path(folder) / "measured.json", options.only)
    if measured is None:
        return 1
    command = f"python -m pytest perf/{options.suite}.py" + (f" -k '{options.only}'" if options.only else "")
    record = record_of(command, before, {"benchmarks": {each["name"]: figures(each) for each in measured["benchmarks"]}})
    path = PERF / "records" / f"{time.strftime('%Y-%m-%d')}-{options.name or options.suite}.json"
    path.parent.mkdir(exist_ok=True)
    write_record(path, record)
    print(f"written: {path}")
    return 0


def parser_of(doc: str) -> argparse.ArgumentParser:
    """A parser for the program with this docstring, which writes a record where `--json` says."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, help="record to write")
    return parser


def record_of(command: str, before: Machine, measured: dict[str, Any]) -> dict[str, Any]:
    """The record of what was measured since `before`. Of absolute paths in the command it keeps the last name."""
    head = {
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in command.split(" ")), "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "vnext": __version__,
        "machine": msgspec.to_builtins(before), "load_after": machine().load,
    }  # fmt: skip
    return head | measured


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def run_suite(suite: str, output: Path, only: str) -> dict[str, Any] | None:
    """Return pytest-benchmark's results of the benchmarks that match `only`, None if one failed."""
    command = [sys.executable, "-m", "pytest", str(PERF / f"{suite}.py"), "-q", f"--benchmark-json={output}", "-k", only]
    ran = subprocess.run(command, cwd=PERF.parent, check=False)
    return json.loads(output.read_text()) if ran.returncode == 0 else None


def figures(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of one benchmark and its `extra_info`."""
    statistics = measured["stats"]
    spread = {f"{name}_us": round(statistics[name] * 1e6, 3) for name in STATISTICS_US}
    return spread | {"rounds": statistics["rounds"] * statistics.get("iterations", 1)} | measured["extra_info"]


if __name__ == "__main__":
    sys.exit(main())
