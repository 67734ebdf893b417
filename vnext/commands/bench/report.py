"""A report: one measurement with everything needed to judge and to repeat it."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from vnext.base.version import __version__
from vnext.commands.bench.client_watch import busy_notes
from vnext.commands.bench.compare import read
from vnext.commands.bench.pages import page_of
from vnext.commands.machine import Machine
from vnext.runtime.protocol.settings import SettingsError

Each = TypeVar("Each")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`command` repeats the measurement. `machine` is its state before the measurement, with the load of other programs;
    `cores_busy_before` are the cores that these used right before it. `load` is how requests were sent to a server. `notes` are
    sentences on what distorts the figures. `runs` are the figures of each run of a measurement of several."""

    name: str
    command: str
    measured_at: str
    vnext: str
    machine: Machine
    load_after: tuple[float, ...]
    workload: Mapping[str, object]
    figures: dict[str, float]
    load: dict[str, float] = {}
    cores_busy_before: float = 0.0
    notes: tuple[str, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()


class Wrong(msgspec.Struct, frozen=True):
    """Why figures are not those of all that was asked for, or a file of them was not written: one sentence, "" where they are.
    `is_cut`: Ctrl-C ended the measurement early."""

    sentence: str = ""
    is_cut: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement found; the fields as in Report. `shown` is printed in place of the report's text."""

    figures: dict[str, float]
    workload: Mapping[str, object]
    shown: str = ""
    wrong: Wrong = Wrong()
    load: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()


def progress(what: str, each: Iterable[Each] | None = None, total: int | None = None) -> tqdm[Each]:
    """A bar that goes when it is done, in a terminal alone."""
    return tqdm(each, desc=what, total=total, disable=None, leave=False, dynamic_ncols=True)


class Cut(msgspec.Struct):
    """Whether Ctrl-C ended a measurement early. Mutable."""

    is_cut: bool = False

    def wrong(self, ended: int, asked: int, what: str) -> Wrong:
        """Of so many that were `asked` for, 0 where nobody knows how many."""
        of = f" of {asked}" if asked else ""
        sentence = f"interrupted: {ended}{of} {what} had ended, and the figures are of these"
        return Wrong(sentence, is_cut=True) if self.is_cut else Wrong()


@contextmanager
def until_cut(found: Sized) -> Iterator[Cut]:
    """Ctrl-C ends the block alone, if the block has `found` something until then; else it is raised on."""
    cut = Cut()
    try:
        yield cut
    except KeyboardInterrupt:
        if not found:
            raise
        cut.is_cut = True


def make_report(*, name: str, command: str, before: tuple[Machine, float], after: Machine, result: Result) -> Report:
    """A report of a measurement that has just ended; `before` are the machine and its busy cores before it."""
    here, busy = before
    return Report(
        name=name,
        command=command,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        vnext=__version__,
        machine=here,
        load_after=after.load,
        workload=result.workload,
        figures=result.figures,
        load=result.load,
        cores_busy_before=busy,
        notes=(*busy_notes(busy), *result.notes),
        runs=result.runs,
    )


def require_writable(path: Path, named: str) -> None:
    """Raise SettingsError for a file that cannot be written, before the measurement runs; `named`: its option, as given."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise SettingsError(f"{named} cannot be written ({error.strerror}): choose another file.") from error


def write_report(report: Report, path: Path) -> str:
    """Write it as indented JSON, as `written` does."""
    return written(path, msgspec.json.format(msgspec.json.encode(report), indent=2))


def written(path: Path, data: bytes) -> str:
    """Write a file of what was measured. Returns why that failed, "" if it did not: the figures are still shown."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + b"\n")
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}): what was measured is printed alone."
    return ""


def text(report: Report) -> str:
    """The report as text: the machine, then one line per figure, then the notes."""
    here = report.machine
    load = f"load before {' '.join(map(str, here.load))}, after {' '.join(map(str, report.load_after))}"
    head = f"{report.name}: {here.cpu_model}, {here.cores_usable} cores usable, {load}"
    width = max(map(len, report.figures), default=0)
    lines = (f"  {name:<{width}}  {value:>12,}" for name, value in report.figures.items())
    return "\n".join([head, *lines, *(f"note: {note}" for note in report.notes)])


# ---- tables ------------------------------------------------------------------------------------------------------


def table_of(paths: Sequence[Path], form: str) -> str:
    """A line for each figure of any file, a column for each file; `form` is md, csv or html. Raises SettingsError."""
    measured = [read(path) for path in paths]
    if form == "html":
        return page_of([path.stem for path in paths], measured)
    found = [each.figures for each in measured]
    names = dict.fromkeys(name for figures in found for name in figures)
    if not names:
        raise SettingsError(f"there is no figure in {' and '.join(map(str, paths))}.")
    rows = [["figure", *(path.stem for path in paths)]]
    rows += [[name, *(f"{figures[name]:.10g}" if name in figures else "" for figures in found)] for name in names]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue().rstrip("\n")
    return _markdown(rows)


def runs_table(columns: Mapping[str, str], runs: Sequence[Mapping[str, Any]], best: object = None, word: str = "knee") -> str:
    """The runs of one measurement, a line each; `columns` has the headings of their figures. `best` is marked with the word."""
    names = [name for name in columns if any(name in run for run in runs)]
    lines = ["".join(f"{columns[name]:>15}" for name in names)]
    for run in runs:
        lines.append("".join(f"{_cell(run.get(name, '-')):>15}" for name in names) + (f"  <- {word}" if run is best else ""))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(rows[0]) - 1)}", *lines[1:]])
