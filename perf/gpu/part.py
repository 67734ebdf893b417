"""One part in a process of its own: `python -m perf.gpu.part NAME FINDINGS.jsonl [--dry-run]`.

Owns the names of the parts, the most informative per second first, and turns any exception into the part's verdict. A part
without a verdict was killed or crashed, and the check reports that.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from perf.gpu.findings import Findings
from perf.gpu.report import FAILED, Verdict

NAMES = ("build", "kernels", "bench", "step", "numba", "ipc", "engine", "serving", "sanitize")


def part(name: str) -> Callable[[bool, Path, Findings], Verdict]:
    """A part's function, imported when it is asked for."""
    home = {"build": "build", "bench": "bench", "step": "bench", "serving": "serving"}.get(name, "checks")
    return getattr(import_module(f"perf.gpu.{home}"), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("findings", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    findings = Findings(options.findings, options.name)
    with tempfile.TemporaryDirectory(prefix="vnext-gpu-") as folder:
        try:
            verdict = part(options.name)(options.dry_run, Path(folder), findings)
        except Exception as error:  # the boundary: any failure becomes a verdict, and the next part runs
            traceback.print_exc()
            said = str(error).splitlines() or [""]
            verdict = Verdict(FAILED, f"{type(error).__name__}: {said[0]}")
        findings.verdict(verdict)


if __name__ == "__main__":
    main()
