"""The parts `bench` and `step`: speed on a GPU against targets. Each result is checked before it is timed.

Owns the order, and isolates failures: a failed measurement does not stop the others. Each measurement is recorded at once. A
dry run calls everything at toy sizes and gives no figures.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perf.gpu import bench_attention, bench_launch, bench_rows, bench_step, bench_thin
from perf.gpu.findings import Findings
from perf.gpu.place import Place, place
from perf.gpu.report import FAILED, MISSING, PASSED, Figure, Verdict, figure

Measurements = Callable[[Place, float | None], Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]]


def bench(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Attention, launches, rows and sampling, adapters."""
    return measure(dry, folder, findings, bench_attention.run, bench_launch.run, bench_rows.run, bench_thin.run)


def step(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Whole decode steps and the gap between them."""
    return measure(dry, folder, findings, bench_step.run)


def measure(dry: bool, folder: Path, findings: Findings, *suites: Measurements) -> Verdict:
    """Run each suite; `why` lists the failed measurements."""
    here, wrong, missing = place(dry, folder), [], []
    rate = here.clock.copy_rate()
    findings.figures(figure("copy bandwidth", None if rate is None else rate * 1e-12, "TB/s"))
    for suite in suites:
        try:
            for figures, details in suite(here, rate):
                findings.figures(*figures)
                for name, reported in details.items():
                    findings.detail(name, reported)
                    missing += [f"{name}: {reported['missing']}"] if "missing" in reported else []
        except Exception as error:  # a suite's failure is a finding; the next suite still runs
            traceback.print_exc()
            said = str(error).splitlines() or [type(error).__name__]
            wrong.append(f"{suite.__module__.rpartition('.')[2]}: {said[0]}")
    return Verdict(FAILED if wrong else MISSING if missing else PASSED, "; ".join(wrong + missing))
