"""The part `bench`: speed on a GPU against its targets, each figure checked for being right before it is timed.

Owns the order and that one measurement's failure does not stop the others. In a dry run everything is called at toy sizes
and no figure has a value.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perf.gpu import bench_attention, bench_launch, bench_rows, bench_step
from perf.gpu.place import Place, place
from perf.gpu.report import FAILED, PASSED, Figure, Report, figure

Measurements = Callable[[Place, float | None], Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]]
SUITES: tuple[Measurements, ...] = (bench_attention.run, bench_launch.run, bench_rows.run, bench_step.run)


def run(dry: bool, folder: Path) -> Report:
    """All suites; what could not be measured is told in `why`."""
    here = place(dry, folder)
    rate = here.clock.copy_rate()
    figures, details, wrong = [figure("copy bandwidth", None if rate is None else rate * 1e-12, "TB/s")], {}, []
    for suite in SUITES:
        try:
            for found, told in suite(here, rate):
                figures += found
                details |= told
        except Exception as error:  # a suite's failure is a finding; the next suite is measured all the same
            traceback.print_exc()
            wrong.append(
                f"{suite.__module__.rpartition('.')[2]}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
    missing = [name for name, told in details.items() if told.get("missing")]
    why = "; ".join(wrong + [f"{name}: {details[name]['missing']}" for name in missing])
    return Report(FAILED if wrong else PASSED, why, tuple(figures), details)
