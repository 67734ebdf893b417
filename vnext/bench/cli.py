"""`vnext-bench throughput | latency`: says what to measure, prints the report, writes it as JSON where asked."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vnext.bench.report import make_report, text, write_report
from vnext.bench.server_runs import Load, MeasurementFailed, ServerUnusable, measure_server
from vnext.bench.workload import Workload, prompts
from vnext.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.machine import machine
from vnext.options import (
    API_KEY_VARIABLE,
    ENGINE_HELP,
    Parser,
    add_engine_options,
    add_model,
    api_key,
    as_flags,
    command_line,
    engine_of,
    server_url,
)
from vnext.runtime.children import ChildDied
from vnext.runtime.launch import StartFailed, StartRefused
from vnext.runtime.output_stream import EngineDead, Refused
from vnext.runtime.settings import SettingsError
from vnext.sampling_params import InvalidRequest
from vnext.server.text.files import CheckpointUnreadable
from vnext.server.text.tokenizer import Tokenizer
from vnext.version import __version__

Figures = dict[str, float]
DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"
REFUSALS = (SettingsError, StartRefused, ServerUnusable, CheckpointUnreadable, InvalidRequest, Refused)
FAILURES = (StartFailed, MeasurementFailed, EngineDead, ChildDied)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure once; returns the exit status (exits.py). `argv` is without the program's name, None for the process's own."""
    argv = command_line() if argv is None else list(argv)
    given = make_parser().given(argv)
    before = machine()
    try:
        require_writable(given["json"])
        workload = workload_of(given)
        figures = MEASURES[given["command"]](given, workload)
    except (*REFUSALS, *FAILURES) as error:
        print(f"vnext-bench: {as_flags(str(error))}", file=sys.stderr)
        return REFUSED if isinstance(error, REFUSALS) else FAILED
    except KeyboardInterrupt:
        print("vnext-bench: interrupted, nothing was measured", file=sys.stderr)
        return INTERRUPTED
    report = make_report(
        name=given["command"],
        command=shlex.join(["vnext-bench", *argv]),
        before=before,
        after=machine(),
        workload=msgspec.to_builtins(workload),
        figures=figures,
    )
    print(text(report))
    if given["json"]:
        write_report(report, Path(given["json"]))
    return DONE


def require_writable(path: str) -> None:
    """Raise SettingsError for a report that could not be written: before the measurement, not after it."""
    try:
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("ab").close()
    except OSError as error:
        raise SettingsError(f"--json {path} cannot be written ({error.strerror}): choose another file") from error


def throughput(given: Mapping[str, Any], workload: Workload) -> Figures:
    """Of a server, where a URL is given, else of an engine of our own."""
    if not given["url"]:
        from vnext.bench.engine_runs import measure_throughput

        return with_engine(given, lambda llm: measure_throughput(llm, workload))
    if useless := [name for name in given if name in ENGINE_HELP]:
        raise SettingsError(f"{useless[0]} is for an engine, and with --url none is started: leave one of the two out.")
    load = Load(
        url=server_url(given["url"]),
        api_key=api_key(given["api_key"]),
        concurrency=at_least(1, "concurrency", given["concurrency"]),
        rate=at_least(0, "request-rate", given["request_rate"]),
    )
    batch = prompts(workload, Tokenizer.load(given.get("model") or DEMO_MODEL))
    return asyncio.run(measure_server(load, workload, batch))


def latency(given: Mapping[str, Any], workload: Workload) -> Figures:
    """Of an engine of our own."""
    from vnext.bench.engine_runs import measure_latency

    repeats = at_least(1, "repeats", given["repeats"])
    return with_engine(given, lambda llm: measure_latency(llm, workload, repeats))


def with_engine(given: Mapping[str, Any], measure: Callable[[Any], Figures]) -> Figures:
    """Measure with an engine that lives as long as that takes. Raises StartFailed too."""
    from vnext.llm import LLM

    with LLM(**msgspec.structs.asdict(engine_of(given))) as llm:
        return measure(llm)


MEASURES = {"throughput": throughput, "latency": latency}


def workload_of(given: Mapping[str, Any]) -> Workload:
    """Raises SettingsError for lengths that make no workload."""
    shared = at_least(0, "shared-len", given["shared_len"])
    input_length = at_least(1, "input-len", given["input_len"])
    if shared > input_length:
        raise SettingsError(f"--shared-len is {shared}: it is a part of --input-len, which is {input_length}.")
    return Workload(
        prompt_count=at_least(1, "number of prompts", given["num_prompts"]),
        input_length=input_length,
        output_length=at_least(1, "output-len", given["output_len"]),
        shared_length=shared,
        random=given["random"],
        seed=given["workload_seed"],
    )


def at_least(lowest: int, name: str, value: Any) -> Any:
    if value < lowest:
        raise SettingsError(f"{name} is {value}: it must be at least {lowest}.")
    return value


def make_parser() -> Parser:
    parser = Parser(prog="vnext-bench", description="Measures an engine or a server.")
    parser.add_argument("--version", action="version", version=f"vnext-bench {__version__}")
    commands = parser.add_commands("throughput | latency")
    fast = commands.add_parser("throughput", help="many requests: how much a second", allow_abbrev=False)
    add_workload(fast, "--num-prompts", 64)
    fast.add_argument("--url", default="", help="a running server; MODEL is then where the tokenizer is")
    fast.add_argument("--api-key", default="", help=f"the server's key, better given as {API_KEY_VARIABLE}")
    fast.add_argument("--concurrency", type=int, default=32, help="requests at once, with --url (default: %(default)s)")
    fast.add_argument("--request-rate", type=float, default=0.0, help="requests a second, with --url; 0: at once")
    add_engine_options(fast.add_argument_group("the engine, without --url"))
    quick = commands.add_parser("latency", help="one batch: how long it takes", allow_abbrev=False)
    add_workload(quick, "--batch-size", 1)
    quick.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    add_engine_options(quick.add_argument_group("the engine"))
    return parser


def add_workload(parser: argparse.ArgumentParser, count_flag: str, count: int) -> None:
    add_model(parser)
    group = parser.add_argument_group("the workload, in tokens")
    group.add_argument(count_flag, dest="num_prompts", type=int, default=count, help="prompts (default: %(default)s)")
    group.add_argument("--input-len", type=int, default=128, help="of each prompt (default: %(default)s)")
    group.add_argument("--output-len", type=int, default=64, help="of each answer (default: %(default)s)")
    group.add_argument("--shared-len", type=int, default=0, help="at the beginning of all prompts (default: 0)")
    group.add_argument("--random", action="store_true", help="random tokens in place of running text")
    group.add_argument("--workload-seed", type=int, default=0, help="the same seed gives the same prompts")
    parser.add_argument("--json", default="", metavar="FILE", help="write the report there, too")


if __name__ == "__main__":
    sys.exit(main())
