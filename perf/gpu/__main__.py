"""The check on a GPU: `scripts/gpu_check.sh`, or `python -m perf.gpu [--only PART ...] [--dry-run] [--out FOLDER]`.

Owns the order of the parts, their time limits, the record and the table at the end. Each part runs in its own process, so its
failure, crash or hang stops no other part. Results reach the disk at once: gpu-check.log has the output, gpu-check.jsonl the
findings, and the record is rewritten after each part. Exit codes: 0 if every part passed (or the table lists it as skipped for
lack of a tool), 1 if one failed, 2 if the check cannot begin, 3 if none failed but one is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from perf.gpu.findings import Findings
from perf.gpu.part import NAMES
from perf.gpu.report import DIED, FAILED, MISSING, ROOT, Report, as_values, by_kernel


class Share(NamedTuple):
    """A part's share of the check's time: the expected time, and the minimum reserved when earlier parts overrun."""

    expected_s: float
    least_s: float


SHARES = {
    "build": Share(40, 30), "kernels": Share(50, 40), "bench": Share(60, 40), "step": Share(50, 40), "numba": Share(20, 10),
    "ipc": Share(20, 10), "engine": Share(140, 60), "serving": Share(105, 60), "sanitize": Share(40, 0),
}  # fmt: skip
TOTAL_S = 530
"""For all parts, so that the check ends within nine minutes."""
DRY_LIMIT_S = 300
"""For a part of a dry run, which compiles for the CPU on any machine."""
GRACE_S = 3
PROGRAM = (sys.executable, "-m", "perf.gpu.part")
LOG, FINDINGS = "gpu-check.log", "gpu-check.jsonl"


class Ran(NamedTuple):
    """A part, its duration and its report."""

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
    for name in (LOG, FINDINGS):
        (options.out / name).unlink(missing_ok=True)
    record: dict[str, Any] = {
        "command": " ".join(("scripts/gpu_check.sh", *sys.argv[1:])),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": version(), "dry_run": options.dry_run, "before": state(), **facts(), "parts": {},
    }  # fmt: skip
    path, end_s, done = options.out / record_name(record), time.monotonic() + TOTAL_S, []
    chosen = [name for name in NAMES if name in options.only]
    for place, name in enumerate(chosen):
        limit_s = DRY_LIMIT_S if options.dry_run else limit(name, chosen[place + 1 :], end_s - time.monotonic())
        done.append(run_part(name, options.dry_run, options.out, limit_s))
        record["parts"][name] = {"seconds": done[-1].seconds} | as_values(done[-1].report)
        path.write_text(json.dumps(record | {"after": state()}, indent=1) + "\n")
    print_table(done, record | {"after": state()}, path)
    verdicts = {each.report.verdict for each in done}
    return 1 if FAILED in verdicts else 3 if MISSING in verdicts else 0


def limit(name: str, later: list[str], left_s: float) -> float:
    """Return a part's time limit: twice the expected time, bounded by the time left minus the minimum of later parts."""
    return max(min(2 * SHARES[name].expected_s, left_s - sum(SHARES[each].least_s for each in later)), 1.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="PART", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: the same calls on the CPU at toy sizes, untimed")
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "records", help="where the record and the logs go")
    return parser.parse_args()


def why_not_here() -> str:
    """Return why this machine cannot run the check, "" if it can."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch; name a Python that has it: PYTHON=/path/to/python3 scripts/gpu_check.sh"
    if not torch.cuda.is_available():
        return "torch sees no GPU here; --dry-run makes the same calls on the CPU"
    return ""


def version() -> str:
    from vnext.base.version import __version__

    return __version__


def record_name(record: dict[str, Any]) -> str:
    device = record["device"].get("name", "no gpu") if not record["dry_run"] else "dry run"
    return f"{record['measured_at'][:10]}-gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def run_part(name: str, dry: bool, out: Path, limit_s: float) -> Ran:
    """Run the part in its own session; at its time limit end it with all processes it started."""
    print(f"gpu_check: {name} ...", flush=True)
    begin_s, findings = time.monotonic(), Findings(out / FINDINGS, name)
    with (out / LOG).open("ab") as log:
        log.write(f"\n==== {name}, at most {limit_s:.0f} s ====\n".encode())
        log.flush()
        command = [*PROGRAM, name, str(findings.path), *(["--dry-run"] if dry else [])]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            why = f"ended with status {process.wait(limit_s)} and no verdict: see {LOG}"
        except subprocess.TimeoutExpired:
            why = f"took longer than {limit_s:.0f} s: what it found until then is below"
        end(process)
    return Ran(name, round(time.monotonic() - begin_s, 1), findings.report(why))


def end(process: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of a part's session."""
    for sign, poll_timeout_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, sign)
            process.wait(poll_timeout_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def print_table(done: list[Ran], record: dict[str, Any], path: Path) -> None:
    """Print the short table that ends the output."""
    where = record["device"].get("name", "the CPU's shim") if not record["dry_run"] else "the CPU's shim, a dry run: no times"
    print(f"\n{where}; load {record['before']['load'][0]} before, {record['after']['load'][0]} after; {path}")
    for each in done:
        print(f"{each.name:<10}{each.report.verdict:<9}{each.seconds:>7.1f} s  {each.report.why}".rstrip())
        for test, counts in by_kernel(each.report).items():
            said = ", ".join(
                f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", DIED, "skipped") if outcome in counts
            )
            print(f"  {test:<76}{said}  {counts.get('why', '')}".rstrip())
        for figure in each.report.figures:
            value = "-" if figure.value is None else f"{figure.value:g}"
            met = {True: "met", False: "MISSED", None: ""}[figure.met]
            print(f"  {figure.name:<52}{value:>10} {figure.unit:<8}{figure.target:<10}{met}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
