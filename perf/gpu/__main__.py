"""The check on a GPU: `scripts/gpu_check.sh`, or `python -m perf.gpu [--only PART ...] [--dry-run] [--out FOLDER]`.

Owns the order of the parts, their limits of time, the record and the table at the end. A part runs in a process of its own,
so that its failure, its crash or its hang stops no other. Exit code: 0 where every part passed (or this machine lacks its
tool, which the table says), 1 where one failed, 2 where the check cannot begin, 3 where none failed but one is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from perf.gpu.part import NAMES
from perf.gpu.report import FAILED, MISSING, ROOT, Report, as_values, read

LIMITS_S = {"build": 75, "kernels": 85, "numba": 35, "engine": 140, "ipc": 30, "sanitize": 50, "bench": 115}
"""530 seconds in all, so that everything ends within nine minutes."""
GRACE_S = 3
PROGRAM = (sys.executable, "-m", "perf.gpu.part")


class Ran(NamedTuple):
    """A part, how long it took, what it said."""

    name: str
    seconds: float
    report: Report


def main() -> int:
    options = parse()
    if not options.dry_run and (reason := why_not_here()):
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    from perf.gpu.facts import facts, state

    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "command": " ".join(("scripts/gpu_check.sh", *sys.argv[1:])),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": version(), "dry_run": options.dry_run, "before": state(), **facts(),
    }  # fmt: skip
    done = [run_part(name, options.dry_run, options.out) for name in NAMES if name in options.only]
    record |= {"after": state(), "parts": {each.name: {"seconds": each.seconds} | as_values(each.report) for each in done}}
    path = options.out / record_name(record)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print_table(done, record, path)
    verdicts = {each.report.verdict for each in done}
    return 1 if FAILED in verdicts else 3 if MISSING in verdicts else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="PART", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: the same calls on the CPU at toy sizes, untimed")
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "records", help="where the record and the logs go")
    return parser.parse_args()


def why_not_here() -> str:
    """Why nothing can be checked on this machine; "" where it can."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch; name a Python that has it: PYTHON=/path/to/python3 scripts/gpu_check.sh"
    if not torch.cuda.is_available():
        return "torch sees no GPU here; --dry-run makes the same calls on the CPU"
    return ""


def version() -> str:
    from vnext.version import __version__

    return __version__


def record_name(record: dict[str, Any]) -> str:
    device = record["device"].get("name", "no gpu") if not record["dry_run"] else "dry run"
    return f"{record['measured_at'][:10]}-gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def run_part(name: str, dry: bool, out: Path) -> Ran:
    """The part in a session of its own, ended with all that it started when its time is over."""
    print(f"gpu_check: {name} ...", flush=True)
    begin_s, limit_s = time.monotonic(), LIMITS_S[name]
    with tempfile.TemporaryDirectory() as folder, (out / f"gpu-{name}.log").open("wb") as log:
        result = Path(folder) / "result.json"
        command = [*PROGRAM, name, str(result), *(["--dry-run"] if dry else [])]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
            why = f"ended with status {status} and no result: see gpu-{name}.log"
        except subprocess.TimeoutExpired:
            why = f"took longer than {limit_s} s"
        end(process)
        report = read(result) or Report(FAILED, why)
    return Ran(name, round(time.monotonic() - begin_s, 1), report)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part's session."""
    for sign, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def print_table(done: list[Ran], record: dict[str, Any], path: Path) -> None:
    """Short, and last."""
    where = record["device"].get("name", "the CPU's shim") if not record["dry_run"] else "the CPU's shim, a dry run: no times"
    print(f"\n{where}; load {record['before']['load'][0]} before, {record['after']['load'][0]} after; {path}")
    for each in done:
        print(f"{each.name:<10}{each.report.verdict:<9}{each.seconds:>7.1f} s  {each.report.why}".rstrip())
        for figure in each.report.figures:
            value = "-" if figure.value is None else f"{figure.value:g}"
            met = {True: "met", False: "MISSED", None: ""}[figure.met]
            print(f"  {figure.name:<52}{value:>10} {figure.unit:<8}{figure.target:<10}{met}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
