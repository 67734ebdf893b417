"""export: a log for other tools: a timeline for Perfetto, tables as CSV, Parquet or Arrow, spans of OpenTelemetry.

Owns the files' forms; columns.py owns the tables and answers/trace.py the timeline.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from rich.console import Console

from vnext.replay.answers.trace import trace
from vnext.replay.console.commands import print_answer, writing
from vnext.replay.console.render import counted
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.tables.columns import Columns, Log


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The `files` that were written, and how many rows, spans or events each has."""

    files: dict[str, int]


def exported(path: Path, form: str, out: Path) -> Exported:
    """Write a log in a form of FORMS to a file, or tables into a folder. Raises UnusableLog."""
    with writing(out, "place"):
        return Exported(files=FORMS[form](path, out))


def _perfetto(path: Path, out: Path) -> dict[str, int]:
    with out.open("w") as file:
        return {str(out): trace(open_log(path), file, str(out)).trace_events}


def _tables(path: Path, out: Path, suffix: str, write: Callable[[Path, Columns], None]) -> dict[str, int]:
    log = Log(path)
    out.mkdir(parents=True, exist_ok=True)
    files = {out / f"{name}.{suffix}": table for name, table in (("requests", log.requests), ("steps", log.steps))}
    for file, table in files.items():
        write(file, table)
    return {str(file): len(next(iter(table.values()))) for file, table in files.items()}


def _csv(path: Path, out: Path) -> dict[str, int]:
    def write(file: Path, table: Columns) -> None:
        with file.open("w", newline="") as opened:
            writer = csv.writer(opened)
            writer.writerow(table)
            writer.writerows([_cell(each) for each in row] for row in zip(*(column.tolist() for column in table.values())))

    return _tables(path, out, "csv", write)


def _cell(value: object) -> object:
    """A value of a CSV table; empty where it is unknown, and shown as text where a spreadsheet would run it."""
    if isinstance(value, float):
        return "" if np.isnan(value) else round(value, 6)
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") and value else value


def _of_pyarrow(form: str, module: str, writer: str, path: Path, out: Path) -> dict[str, int]:
    try:
        arrow, write = import_module("pyarrow"), getattr(import_module(module), writer)
    except ImportError:
        raise UnusableLog(f"--to {form} needs pyarrow: pip install 'vnext[parquet]', or export csv") from None
    return _tables(path, out, form, lambda file, table: write(arrow.table(dict(table)), file))


# ---- spans -------------------------------------------------------------------------------------------------------


def _otlp(path: Path, out: Path) -> dict[str, int]:
    """A request to the HTTP endpoint of a collector, `/v1/traces`, with a span for each request."""
    spans = list(_spans(Log(path).requests))
    service = {"attributes": [_attribute("service.name", "vnext")]}
    scope = {"scope": {"name": "vnext"}, "spans": spans}
    out.write_text(json.dumps({"resourceSpans": [{"resource": service, "scopeSpans": [scope]}]}))
    return {str(out): len(spans)}


def _spans(requests: Columns) -> Iterator[dict[str, object]]:
    for row in zip(*(column.tolist() for column in requests.values())):
        each = dict(zip(requests, row))
        ends = [each[name] for name in ("ended", "last", "first") if not np.isnan(each[name])]
        if np.isnan(each["came"]) or not ends:
            continue
        name = str(each["name"] or each["id"])
        known = {
            "gen_ai.response.id": name, "gen_ai.usage.input_tokens": each["prompt_tokens"],
            "gen_ai.usage.output_tokens": each["tokens"],
            "gen_ai.response.time_to_first_chunk": each["ttft_ms"] / 1e3, "vnext.client": each["client"], "vnext.end": each["end"],
        }  # fmt: skip
        first = [] if np.isnan(each["first"]) else [{"name": "first_token", "timeUnixNano": _nanoseconds(each["first"])}]
        yield {
            "traceId": xxhash.xxh3_128_hexdigest(name.encode()), "spanId": xxhash.xxh3_64_hexdigest(name.encode()),
            "name": "request", "kind": 2,
            "startTimeUnixNano": _nanoseconds(each["came"]), "endTimeUnixNano": _nanoseconds(ends[0]), "events": first,
            "attributes": [_attribute(key, value) for key, value in known.items() if value == value],
            "status": {"code": 2 if "error" in each["end"] else 0},
        }  # fmt: skip


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e6) * 1000)


def _attribute(key: str, value: str | int | float) -> dict[str, object]:
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    return {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {"doubleValue": value}}


FORMS: dict[str, Callable[[Path, Path], dict[str, int]]] = {
    "perfetto": _perfetto, "csv": _csv, "parquet": partial(_of_pyarrow, "parquet", "pyarrow.parquet", "write_table"),
    "arrow": partial(_of_pyarrow, "arrow", "pyarrow.feather", "write_feather"), "otlp": _otlp,
}  # fmt: skip
ENTRIES = {"perfetto": "event", "otlp": "span"}
"""What a form's file is made of, where it is not of rows."""


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    exporting = command(
        "export", run, "write a log for other tools",
        "A timeline or spans of requests as a file; tables of requests and steps as two files in a folder.",
    )  # fmt: skip
    exporting.add_argument("--to", choices=tuple(FORMS), required=True, help="the form")
    exporting.add_argument("-o", "--out", type=Path, required=True, help="the file or, for tables, the folder")


def run(arguments: argparse.Namespace, console: Console) -> None:
    answer = exported(arguments.log, arguments.to, arguments.out)
    print_answer(arguments, console, answer, partial(print_exported, form=arguments.to))


def print_exported(console: Console, answer: Exported, form: str) -> None:
    for file, count in answer.files.items():
        console.print(f"written: {file}, {counted(count, ENTRIES.get(form, 'row'))}", soft_wrap=True)
