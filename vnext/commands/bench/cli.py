"""`vnext-bench`: runs a measurement, prints the report and, on request, writes it as JSON and holds it to bounds."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from math import isinf
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NamedTuple

import msgspec

from vnext.base.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.base.version import __version__
from vnext.commands.bench.bounds import Bound, UnknownFigure, bounds_of, broken, require_measured
from vnext.commands.bench.client_watch import client_notes, cores_busy
from vnext.commands.bench.compare import compare
from vnext.commands.bench.report import Result, make_report, require_writable, table_of, text, write_report
from vnext.commands.bench.serve import GROUPS, serve, tokenizer_of
from vnext.commands.bench.server_runs import Load, Measured, MeasurementFailed, ServerUnusable, measure_server
from vnext.commands.bench.sweep import LOADS, RATES, sweep
from vnext.commands.bench.workload import Workload, prompts
from vnext.commands.machine import machine
from vnext.models.errors import ModelError
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

REFUSALS = (SettingsError, UnknownFigure, StartRefused, ServerUnusable, ModelError, CheckpointUnreadable, InvalidRequest, Refused)
FAILURES = (StartFailed, MeasurementFailed, EngineDead, ChildDied)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once; returns the exit status (exits.py). `argv` is without the program's name, None for the process's own."""
    begin_process()
    argv = command_line() if argv is None else list(argv)
    given = make_parser().given(argv, environment())
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
    if given.values["json"]:
        write_report(report, Path(given.values["json"]))
    with reporting("vnext-bench"):
        print(measured.shown or text(report))
    return held(bounds, report.figures)


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
    """Print files as one table."""
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
    return Result(figures=measured.figures, workload=plain(workload), load=asked, notes=server_notes(measured))


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
    return Result(figures=runs.with_engine(engine_of(given), measure, workload), workload=plain(workload))


def startup(given: Given) -> Result:
    """Start an engine again and again, each time up to its first token."""
    repeats = given.values["repeats"]
    return Result(figures=engine_runs().measure_startup(engine_of(given), repeats), workload={"repeats": repeats})


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


URL = (
    Option("url", ("--url",), str, "", "a running server; MODEL then provides the tokenizer"),
    Option("api_key", ("--api-key",), str, "", f"the server's key; prefer {API_KEY_VARIABLE}"),
    Option("concurrency", ("--concurrency", "--max-concurrency"), int, 0, "maximum requests at a time, with --url; 0 for no limit"),
    Option("request_rate", ("--request-rate",), float, 0.0, "requests per second, with --url; 0 for all at once"),
)
REPEATS = Option("repeats", ("--repeats",), int, 5, "number of batches")
STARTS = Option("repeats", ("--repeats",), int, 3, "number of starts")
WORKLOAD = (
    Option("input_len", ("--input-len",), int, 128, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 64, "tokens of each answer"),
    Option("shared_len", ("--shared-len",), int, 0, "tokens that all prompts share at the beginning"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)


ASSERTED = Option(
    "asserted", ("--assert",), tuple[str, ...], (), "bounds on figures, as 'ttft.p99<500ms' 'failed<=0'; status 1 where one fails"
)


BATCHES = Option("batches", ("--batches",), str, "32,64,128,256,512", "requests in decode, one line each")
ROUNDS = Option("rounds", ("--rounds",), int, 64, "steps of each measurement")
STEP_MS = Option("step_ms", ("--step-ms",), float, 10.0, "milliseconds in which the ranks compute a step")
GPU_PRICE = Option("gpu_price", ("--gpu-price",), float, 2.0, "dollars for a GPU for an hour")
CACHE = (
    Option("hit_rates", ("--hit-rates",), str, "0,25,50,75,100", "percentages of a prompt that all share"),
    Option("num_prompts", ("--num-prompts",), int, 16, "number of prompts of each rate"),
    Option("input_len", ("--input-len",), int, 256, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 16, "tokens of each answer"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)
PROMPTS = (
    Option("num_prompts", ("--num-prompts",), int, 200, "number of requests of a run"), *WORKLOAD,
    Option("max_num_batched_tokens", ("--max-num-batched-tokens",), int, 8192, "tokens in a step"),
    Option("bench_device", ("--device",), str, "h100", "the GPU: a100, h100, h200, b200, l40s, l4 or rtx4090"), GPU_PRICE,
)
LOAD = (
    RATES, Option("goodput", ("--goodput",), tuple[str, ...], (), "bounds of a good request in ms, as ttft:500 tpot:50"),
    *PROMPTS, Option("max_num_seqs", ("--max-num-seqs",), int, 256, "requests in the batch"),
    Option("tensor_parallel_size", ("--tensor-parallel-size", "-tp"), int, 1, "GPUs that share the model"),
    Option("from_log", ("--from-log",), str, "", "learn step times from this log, in place of the roofline"),
)
SIZE = (
    Option("slo", ("--slo",), str, "", "what must hold, as ttft.p99<500ms,itl.p99<50ms"),
    Option("request_rate", ("--request-rate",), float, 10.0, "requests a second of all replicas together"), *PROMPTS,
    Option("gpus_each", ("--gpus-each",), str, "1,2,4,8", "numbers of GPUs that may share the model"),
)
OVERLAP = (
    Option("batches", ("--batches",), str, "1,8,32", "requests in decode, one line each"),
    Option("input_len", ("--input-len",), int, 32, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 128, "tokens of each answer"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)
SUMS = (
    Option("ranks", ("--ranks",), str, "2", "numbers of ranks, as 2,4"),
    Option("sizes", ("--sizes",), str, "2,8,32,128,512,2048", "KiB of a rank's tensor"),
    Option("rounds", ("--rounds",), int, 30, "rounds of each size"),
    Option("bench_device", ("--device",), Literal["auto", "cpu", "cuda"], "auto", "auto takes GPUs where each rank has one"),
)


class Own(NamedTuple):
    """A command with a module of its own, which no other command loads."""

    module: str
    help: str
    options: tuple[Option, ...]
    has_model: bool = False
    has_engine: bool = False


OWN = MappingProxyType({
    "cache": Own("cache", "measure throughput by the hit rate of the prefix cache, and what attention reads", CACHE, True, True),
    "allreduce": Own("all_reduce", "measure sums over ranks by size: the library's and ours, and where to switch", SUMS),
    "comm": Own("control.comm", "measure what a step sends to the ranks, beside a broadcast of everything", (BATCHES, ROUNDS)),
    "sched": Own(
        "control.sched", "measure what deciding a step takes, and what it costs", (BATCHES, ROUNDS, STEP_MS, GPU_PRICE)
    ),
    "overlap": Own("overlap", "measure which share of the control plane compute hides, by batch", OVERLAP, True, True),
    "size": Own("control.size", "say how many GPUs hold a load to --slo, by the model of `simulate` (`vnext size`)", SIZE, True),
    "simulate": Own("control.simulate", "run the scheduler alone on modelled steps of a GPU, of 8b, 70b or any MODEL", LOAD, True),
})  # fmt: skip
FORM = Option("form", ("--format",), Literal["md", "csv", "html"], "md", "Markdown, CSV or a page of HTML")


def make_parser() -> Parser:
    parser = Parser(prog="vnext-bench", description="Measure an engine or a server.")
    parser.add_argument("--version", action="version", version=f"vnext-bench {__version__}")
    commands = parser.add_commands(" | ".join([*MEASURES, *OWN, "compare", "report"]))
    running = commands.add_parser("serve", help="measure a running server as `vllm bench serve` does")
    add_load(running, GROUPS)
    swept = commands.add_parser("sweep", help="measure a running server at one load after another, and find the knee")
    without = {option.name for option in GROUPS["result"]} - {"goodput"}
    without |= {option.name for option in GROUPS["arrivals"]} - {"burstiness", "num_warmups"}
    kept = {title: tuple(option for option in options if option.name not in without) for title, options in GROUPS.items()}
    add_load(swept, kept | {"loads": LOADS})
    fast = commands.add_parser("throughput", help="measure the throughput of many requests")
    add_workload(fast, Option("num_prompts", ("--num-prompts",), int, 64, "number of prompts"))
    for option in URL:
        fast.add_option(fast, option, stays_out=False)
    add_engine_options(fast)
    quick = commands.add_parser("latency", help="measure the time of one batch")
    add_workload(quick, Option("num_prompts", ("--batch-size",), int, 1, "number of prompts"))
    quick.add_option(quick, REPEATS, stays_out=False)
    add_engine_options(quick)
    began = commands.add_parser("startup", help="measure the time from the start of an engine to its first token")
    began.add_model()
    began.add_option(began, STARTS, stays_out=False)
    add_result(began)
    add_engine_options(began)
    for name, own in OWN.items():
        add_own(commands.add_parser(name, help=own.help), own)
    both = commands.add_parser("compare", help="compare two reports or result files")
    both.add_argument("before", nargs="?", default="", help="a file of --json or --save-result; --save-detailed adds intervals")
    both.add_argument("after", nargs="?", default="", help="another one")
    both.add_option(both, ASSERTED, stays_out=False)
    many = commands.add_parser("report", help="print reports and result files as one table")
    many.add_argument("files", nargs="*", default=(), help="files as of compare")
    many.add_option(many, FORM, stays_out=False)
    return parser


def add_own(parser: Parser, own: Own) -> None:
    if own.has_model:
        parser.add_model()
    group = parser.add_argument_group("workload")
    for option in own.options:
        parser.add_option(group, option, stays_out=False)
    add_result(parser)
    if own.has_engine:
        add_engine_options(parser)


def add_load(parser: Parser, groups: Mapping[str, tuple[Option, ...]]) -> None:
    """Add the options of a load on a running server."""
    parser.add_model()
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            parser.add_option(group, option, stays_out=False)
    add_result(parser)


def add_workload(parser: Parser, count: Option) -> None:
    parser.add_model()
    group = parser.add_argument_group("workload")
    for option in (count, *WORKLOAD):
        parser.add_option(group, option, stays_out=False)
    group.add_argument("--random", action="store_true", help="use random tokens instead of text")
    add_result(parser)


def add_result(parser: Parser) -> None:
    parser.add_argument("--json", default="", metavar="FILE", help="also write the report to FILE")
    parser.add_option(parser, ASSERTED, stays_out=False)


if __name__ == "__main__":
    sys.exit(main())
