"""Runs a measurement of `vnext-bench`, prints the report and, on request, writes it as JSON and holds it to bounds."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from math import isinf
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from vnext.base.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.commands.bench.bounds import Bound, UnknownFigure, bounds_of, broken, require_measured
from vnext.commands.bench.client_watch import client_notes, cores_busy
from vnext.commands.bench.compare import compare
from vnext.commands.bench.options import OWN, URL
from vnext.commands.bench.report import Result, make_report, require_writable, table_of, text, write_report
from vnext.commands.bench.serve import serve, tokenizer_of
from vnext.commands.bench.server_runs import Load, Measured, MeasurementFailed, ServerUnusable, measure_server
from vnext.commands.bench.sweep import sweep
from vnext.commands.bench.workload import Workload, prompts
from vnext.commands.machine import machine
from vnext.models.errors import ModelError
from vnext.options.parser import Given
from vnext.options.reader import engine_of, require_no_engine, server_url
from vnext.options.table import as_flags
from vnext.runtime.client.output_stream import EngineDead, Refused
from vnext.runtime.processes.launch import StartFailed, StartRefused
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import SettingsError
from vnext.server.console import reporting
from vnext.text.files import CheckpointUnreadable

REFUSALS = (SettingsError, UnknownFigure, StartRefused, ServerUnusable, ModelError, CheckpointUnreadable, InvalidRequest, Refused)
FAILURES = (StartFailed, MeasurementFailed, EngineDead, ChildDied)


def run(given: Given, argv: Sequence[str]) -> int:
    """Measure once; returns the exit status (exits.py). `argv` is without the program's name."""
    try:
        bounds = bounds_of(given.values.get("asserted", ()))
        if given.values.get("json"):
            require_writable(Path(given.values["json"]), f"--json {given.values['json']}")
        if given.command == "compare":
            return compared(given, bounds)
        if given.command == "report":
            return tabled(given)
        require_measured(bounds, given)
        before = machine(), cores_busy()
        measured = MEASURES.get(given.command, alone)(given)
    except (*REFUSALS, *FAILURES) as error:
        sentence = str(error) if isinstance(error, UnknownFigure) else as_flags(str(error), given.labels)
        print(f"vnext-bench: {sentence}", file=sys.stderr)
        return REFUSED if isinstance(error, REFUSALS) else FAILED
    except KeyboardInterrupt:
        print("vnext-bench: interrupted, nothing was measured", file=sys.stderr)
        return INTERRUPTED
    command = shlex.join(["vnext-bench", *without_key(argv)])
    report = make_report(name=given.command, command=command, before=before, after=machine(), result=measured)
    unwritten = write_report(report, Path(given.values["json"])) if given.values["json"] else ""
    with reporting("vnext-bench"):
        print(measured.shown or text(report))
    for sentence in filter(None, (measured.wrong.sentence, unwritten)):
        print(f"vnext-bench: {sentence}", file=sys.stderr)
    status = held(bounds, report.figures) or (FAILED if measured.wrong.sentence or unwritten else DONE)
    return INTERRUPTED if measured.wrong.is_cut else status


def held(bounds: Sequence[Bound], figures: Mapping[str, float]) -> int:
    """The exit status; prints which bounds do not hold."""
    try:
        wrong = broken(bounds, figures)
    except MeasurementFailed as error:
        wrong = [str(error)]
    for sentence in wrong:
        print(f"vnext-bench: {sentence}", file=sys.stderr)
    return FAILED if wrong else DONE


def compared(given: Given, bounds: Sequence[Bound]) -> int:
    """Print two files side by side; bounds hold for the ratios after / before."""
    files = [given.values.get(name, "") for name in ("before", "after")]
    if not all(files):
        raise SettingsError("name two files: vnext-bench compare BEFORE AFTER.")
    ratios, shown = compare(*map(Path, files))
    with reporting("vnext-bench"):
        print(shown)
    return held(bounds, ratios)


def tabled(given: Given) -> int:
    if not given.values["files"]:
        raise SettingsError("name the files: vnext-bench report FILE...")
    shown = table_of(list(map(Path, given.values["files"])), given.values["form"])
    with reporting("vnext-bench"):
        print(shown)
    return DONE


def without_key(argv: Sequence[str]) -> list[str]:
    """The command line as a report may show it."""
    hidden = [word.partition("=")[0] + "=..." if word.startswith("--api-key=") else word for word in argv]
    return ["..." if before == "--api-key" else word for before, word in zip(["", *hidden], hidden)]


def throughput(given: Given) -> Result:
    """Measure the server at the URL, or without one a new engine."""
    values, workload = given.values, workload_of(given.values)
    if not values["url"]:
        if unused := next((option for option in URL if option.name != "api_key" and values[option.name] != option.default), None):
            raise SettingsError(f"{unused.flags[0]} has no effect without --url: leave it out, or name a server.")
        runs = engine_runs()
        return Result(figures=runs.with_engine(engine_of(given), runs.measure_throughput, workload), workload=plain(workload))
    require_no_engine(given)
    load = Load(
        url=server_url(values["url"]),
        api_key=values["api_key"],
        concurrency=values["concurrency"],
        rate=0.0 if isinf(values["request_rate"]) else values["request_rate"],
    )
    batch = prompts(workload, tokenizer_of(values))
    measured = asyncio.run(measure_server(load, workload, batch))
    asked = {"concurrency": load.concurrency, "request_rate": load.rate}
    notes = server_notes(measured)
    return Result(figures=measured.figures, workload=plain(workload), load=asked, notes=notes, wrong=measured.wrong)


def server_notes(measured: Measured) -> tuple[str, ...]:
    """Notes on what distorts a server's figures."""
    figures, notes = measured.figures, client_notes(measured.figures)
    if measured.failure:
        notes.append(f"{figures['failed']} requests failed, the first with: {measured.failure}")
    if "tpot_p50_ms" in figures and "itl_p50_ms" not in figures:
        notes.append("the server does not say how many tokens a chunk holds: the times between tokens are left out")
    return tuple(notes)


def latency(given: Given) -> Result:
    """Measure the latency of a new engine."""
    runs, workload = engine_runs(), workload_of(given.values)
    measure = partial(runs.measure_latency, repeats=given.values["repeats"])
    figures, wrong = runs.with_engine(engine_of(given), measure, workload)
    return Result(figures=figures, workload=plain(workload), wrong=wrong)


def startup(given: Given) -> Result:
    """Start an engine again and again, each time up to its first token."""
    repeats = given.values["repeats"]
    figures, wrong = engine_runs().measure_startup(engine_of(given), repeats)
    return Result(figures=figures, workload={"repeats": repeats}, wrong=wrong)


def engine_runs() -> ModuleType:
    """The measurements of an engine, which a measurement of a server does not load."""
    from vnext.commands.bench import engine_runs

    return engine_runs


def alone(given: Given) -> Result:
    """Measure by the command's own module, which no other command loads."""
    found: Result = import_module(f"vnext.commands.bench.{OWN[given.command].module}").measure(given)
    return found


def plain(workload: Workload) -> dict[str, object]:
    found: dict[str, object] = msgspec.to_builtins(workload)
    return found


MEASURES: dict[str, Callable[[Given], Result]] = {
    "serve": serve, "throughput": throughput, "latency": latency, "startup": startup, "sweep": sweep,
}


def workload_of(given: Mapping[str, Any]) -> Workload:
    """Raises SettingsError for lengths that make no workload."""
    shared, input_length = given["shared_len"], given["input_len"]
    if shared > input_length:
        raise SettingsError(f"--shared-len is {shared}: it is a part of --input-len, which is {input_length}.")
    return Workload(
        prompt_count=given["num_prompts"],
        input_length=input_length,
        output_length=given["output_len"],
        shared_length=shared,
        random=given["random"],
        seed=given["workload_seed"],
    )
