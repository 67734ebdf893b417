"""`vnext-bench serve | throughput | latency`: runs a measurement, prints the report and, on request, writes it as JSON.

A report is one measurement with everything needed to judge and to repeat it.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import isinf
from pathlib import Path
from typing import Any

import msgspec

from vnext.base.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.base.version import __version__
from vnext.commands.bench.client_watch import busy_notes, client_notes, cores_busy
from vnext.commands.bench.serve import add_serve, serve
from vnext.commands.bench.server_runs import Load, Measured, MeasurementFailed, ServerUnusable, measure_server
from vnext.commands.bench.workload import Workload, prompts
from vnext.commands.machine import Machine, machine
from vnext.options.parser import Given, Parser
from vnext.options.reader import add_engine_options, command_line, engine_of, environment, require_no_engine, server_url
from vnext.options.table import API_KEY_VARIABLE, Option, as_flags
from vnext.runtime.client.output_stream import EngineDead, Refused
from vnext.runtime.processes.inherited import begin_process
from vnext.runtime.processes.launch import StartFailed, StartRefused
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import SettingsError
from vnext.server.console import reporting
from vnext.text.files import CheckpointUnreadable
from vnext.text.tokenizer import Tokenizer

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo_model"
REFUSALS = (SettingsError, StartRefused, ServerUnusable, CheckpointUnreadable, InvalidRequest, Refused)
FAILURES = (StartFailed, MeasurementFailed, EngineDead, ChildDied)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once; returns the exit status (exits.py). `argv` is without the program's name, None for the process's own."""
    begin_process()
    argv = command_line() if argv is None else list(argv)
    given = make_parser().given(argv, environment())
    try:
        before, busy = machine(), cores_busy()
        require_writable(given.values["json"])
        measured = MEASURES[given.command](given)
    except (*REFUSALS, *FAILURES) as error:
        print(f"vnext-bench: {as_flags(str(error), given.labels)}", file=sys.stderr)
        return REFUSED if isinstance(error, REFUSALS) else FAILED
    except KeyboardInterrupt:
        print("vnext-bench: interrupted, nothing was measured", file=sys.stderr)
        return INTERRUPTED
    report = make_report(
        name=given.command,
        command=shlex.join(["vnext-bench", *without_key(argv)]),
        before=before,
        after=machine(),
        workload=measured.workload,
        cores_busy_before=busy,
        figures=measured.figures,
        load=measured.load,
        notes=(*busy_notes(busy), *measured.notes),
    )
    if given.values["json"]:
        write_report(report, Path(given.values["json"]))
    with reporting("vnext-bench"):
        print(measured.shown or text(report))
    return DONE


def without_key(argv: Sequence[str]) -> list[str]:
    """The command line as a report may show it."""
    hidden = [word.partition("=")[0] + "=..." if word.startswith("--api-key=") else word for word in argv]
    return ["..." if before == "--api-key" else word for before, word in zip(["", *hidden], hidden)]


def require_writable(path: str) -> None:
    """Raise SettingsError for a report that cannot be written, before the measurement runs."""
    try:
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("ab").close()
    except OSError as error:
        raise SettingsError(f"--json {path} cannot be written ({error.strerror}): choose another file") from error


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures; for a server also the load, and notes on what distorts the figures. `shown` is in place of the report's text."""

    figures: dict[str, float]
    workload: Mapping[str, object]
    shown: str = ""
    load: dict[str, float] = {}
    notes: tuple[str, ...] = ()


def throughput(given: Given) -> Result:
    """Measure the server at the URL, or without one a new engine."""
    values, workload = given.values, workload_of(given.values)
    if not values["url"]:
        from vnext.commands.bench.engine_runs import measure_throughput

        return with_engine(given, workload, lambda llm: measure_throughput(llm, workload))
    require_no_engine(given)
    load = Load(
        url=server_url(values["url"]),
        api_key=values["api_key"],
        concurrency=values["concurrency"],
        rate=0.0 if isinf(values["request_rate"]) else values["request_rate"],
    )
    batch = prompts(workload, Tokenizer.load(values.get("model") or DEMO_MODEL))
    measured = asyncio.run(measure_server(load, workload, batch))
    asked = {"concurrency": load.concurrency, "request_rate": load.rate}
    return Result(figures=measured.figures, workload=msgspec.to_builtins(workload), load=asked, notes=server_notes(measured))


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
    from vnext.commands.bench.engine_runs import measure_latency

    workload, repeats = workload_of(given.values), given.values["repeats"]
    return with_engine(given, workload, lambda llm: measure_latency(llm, workload, repeats))


def with_engine(given: Given, workload: Workload, measure: Callable[[Any], dict[str, float]]) -> Result:
    """Start an engine, measure, and end it. Raises StartFailed too."""
    from vnext.api.llm import LLM

    with LLM(**msgspec.structs.asdict(engine_of(given))) as llm:
        return Result(figures=measure(llm), workload=msgspec.to_builtins(workload))


def served(given: Given) -> Result:
    """Send a load as `vllm bench serve` does."""
    found = serve(given)
    return Result(figures=found.figures, workload=found.workload, shown=found.shown, load=found.load, notes=found.notes)


MEASURES = {"serve": served, "throughput": throughput, "latency": latency}


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


URL = (
    Option("url", ("--url",), str, "", "a running server; MODEL then provides the tokenizer"),
    Option("api_key", ("--api-key",), str, "", f"the server's key; prefer {API_KEY_VARIABLE}"),
    Option("concurrency", ("--concurrency", "--max-concurrency"), int, 0, "maximum requests at a time, with --url; 0 for no limit"),
    Option("request_rate", ("--request-rate",), float, 0.0, "requests per second, with --url; 0 for all at once"),
)
REPEATS = Option("repeats", ("--repeats",), int, 5, "number of batches")
WORKLOAD = (
    Option("input_len", ("--input-len",), int, 128, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 64, "tokens of each answer"),
    Option("shared_len", ("--shared-len",), int, 0, "tokens that all prompts share at the beginning"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)


def make_parser() -> Parser:
    parser = Parser(prog="vnext-bench", description="Measure an engine or a server.")
    parser.add_argument("--version", action="version", version=f"vnext-bench {__version__}")
    commands = parser.add_commands("serve | throughput | latency")
    running = commands.add_parser("serve", help="measure a running server as `vllm bench serve` does")
    add_serve(running)
    add_json(running)
    fast = commands.add_parser("throughput", help="measure the throughput of many requests")
    add_workload(fast, Option("num_prompts", ("--num-prompts",), int, 64, "number of prompts"))
    for option in URL:
        fast.add_option(fast, option, stays_out=False)
    add_engine_options(fast)
    quick = commands.add_parser("latency", help="measure the time of one batch")
    add_workload(quick, Option("num_prompts", ("--batch-size",), int, 1, "number of prompts"))
    quick.add_option(quick, REPEATS, stays_out=False)
    add_engine_options(quick)
    return parser


def add_workload(parser: Parser, count: Option) -> None:
    parser.add_model()
    group = parser.add_argument_group("workload")
    for option in (count, *WORKLOAD):
        parser.add_option(group, option, stays_out=False)
    group.add_argument("--random", action="store_true", help="use random tokens instead of text")
    add_json(parser)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", default="", metavar="FILE", help="also write the report to FILE")


# ---- reports -----------------------------------------------------------------------------------------------------


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`command` repeats the measurement. `machine` is its state before the measurement, with the load of other programs;
    `cores_busy_before` are the cores that these used right before it. `load` is how requests were sent to a server. `notes` are
    sentences on what distorts the figures."""

    name: str
    command: str
    measured_at: str
    vnext: str
    machine: Machine
    load_after: tuple[float, ...]
    workload: dict[str, Any]
    figures: dict[str, float]
    load: dict[str, float] = {}
    cores_busy_before: float = 0.0
    notes: tuple[str, ...] = ()


def make_report(*, name: str, command: str, before: Machine, after: Machine, **measured: Any) -> Report:
    """A report of a measurement that has just ended; `measured` are the fields with its results."""
    return Report(
        name=name,
        command=command,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        vnext=__version__,
        machine=before,
        load_after=after.load,
        **measured,
    )


def write_report(report: Report, path: Path) -> None:
    """As indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def text(report: Report) -> str:
    """The report as text: the machine, then one line per figure, then the notes."""
    here = report.machine
    load = f"load before {' '.join(map(str, here.load))}, after {' '.join(map(str, report.load_after))}"
    head = f"{report.name}: {here.cpu_model}, {here.cores_usable} cores usable, {load}"
    width = max(map(len, report.figures), default=0)
    lines = (f"  {name:<{width}}  {value:>12,}" for name, value in report.figures.items())
    return "\n".join([head, *lines, *(f"note: {note}" for note in report.notes)])


if __name__ == "__main__":
    sys.exit(main())
