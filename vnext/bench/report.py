"""Reports: one measurement with everything that is needed to judge and to repeat it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from vnext.machine import Machine
from vnext.version import __version__


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`command` repeats it. `machine` is as it was before: its load is that of other programs."""

    name: str
    command: str
    measured_at: str
    vnext: str
    machine: Machine
    load_after: tuple[float, ...]
    workload: dict[str, Any]
    figures: dict[str, float]


def make_report(
    *, name: str, command: str, before: Machine, after: Machine, workload: dict[str, Any], figures: dict[str, float]
) -> Report:
    """A report of what has just been measured."""
    return Report(
        name=name,
        command=command,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        vnext=__version__,
        machine=before,
        load_after=after.load,
        workload=workload,
        figures=figures,
    )


def write_report(report: Report, path: Path) -> None:
    """As indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def text(report: Report) -> str:
    """For people: machine first, then a line a figure."""
    here = report.machine
    load = " ".join(map(str, here.load))
    head = f"{report.name}: {here.cpu_model}, {here.cores_usable} cores usable, load before {load}"
    width = max(map(len, report.figures), default=0)
    return "\n".join([head, *(f"  {name:<{width}}  {value:>12,}" for name, value in report.figures.items())])
