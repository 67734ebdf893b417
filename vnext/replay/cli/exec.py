"""The commands that run the model again: exec, bisect and profile. They alone load torch, and only when they run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from vnext.kernels.format import ACTIVATIONS, QUANTIZATIONS
from vnext.replay.console.commands import DIFFERENT, SAME, Commands, command, print_answer, terminal
from vnext.replay.execution import render_exec
from vnext.replay.execution.bisection import bisect
from vnext.replay.execution.execution import ModelChoice, execute
from vnext.replay.execution.recorded import add_range, add_steps, selection_of
from vnext.replay.reading.source import UnusableLog
from vnext.replay.rerun.numerics import prepare
from vnext.replay.tables.profile import print_profiled, print_served, profile, served

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHES = ("auto", "int8")
KERNELS = ("torch", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16")
OTHERWISE = {
    "dtype": "dtype", "quantization": "quantization", "activations": "activations", "kv-cache-dtype": "kv_cache_dtype",
    "kernels": "kernels", "deterministic": "deterministic", "tp": "ranks",
}  # fmt: skip
"""Options that change the run, and what they change."""


def add(commands: Commands) -> None:
    executing = command(
        commands, "exec", _exec, "run the model again on the recorded batches and compare every token",
        "LOG must contain texts (--log full). Settings are the log's unless given here.",
    )  # fmt: skip
    add_model(executing)
    add_range(executing)
    executing.add_argument("--solo", action="store_true", help="run each request alone, in its own engine")
    profiling = command(
        commands, "profile", _profile, "run the model again on the recorded batches and measure each operation",
        "LOG must contain texts (--log full). Shows time and rates of each operation of the CPU kernels, and "
        "the engine's own times beside. Drafts that were not kept are left out.",
    )  # fmt: skip
    add_model(profiling)
    add_steps(profiling)
    profiling.add_argument("--calls", type=Path, help="run nothing: draw what a server's /stop_profile wrote, into --out")
    profiling.add_argument("-o", "--out", type=Path, help="also write the log's timeline with each operation, for ui.perfetto.dev")
    bisecting = command(
        commands, "bisect", _bisect, "find the first step, layer and operation that differs in another way to run the model",
        "Repeats each operation of each recorded step on the same inputs: with each request alone (the default), or as "
        "the other options say, and compares it with the log's own settings.",
    )  # fmt: skip
    add_model(bisecting)
    add_steps(bisecting)
    bisecting.add_argument("--solo", action="store_true", help="compare with each request alone, by the same kernels")
    bisecting.add_argument("--tolerance", type=float, help="difference allowed, relative to a row's maximum (by dtype, 0 alone)")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="the model's folder (default: where the log says it was)")
    parser.add_argument("--any-model", action="store_true", help="allow a model whose weights are not those of the log")
    parser.add_argument(
        "--weights", metavar="VERSION=PATH", action="append", default=[],
        help="folder or file of a later version of the weights, for each version (default: where the log says it was)",
    )  # fmt: skip
    parser.add_argument("--inputs", metavar="DIR", type=Path, help="disk tier with vectors of images, sounds (default: the log's)")
    parser.add_argument("--dtype", choices=DTYPES, help="data type of weights and cache")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="quantization of the weights")
    parser.add_argument("--activations", choices=ACTIVATIONS[1:], help="what meets weights of few bits")
    parser.add_argument("--kv-cache-dtype", choices=CACHES, help="data type of keys and values")
    parser.add_argument("--kernels", metavar="NAME", help=f"kernels: {', '.join(KERNELS)}")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, help="as in vnext serve")
    parser.add_argument("--tp", metavar="N", type=int, dest="ranks", help="number of ranks that share each layer (run in turns)")
    parser.add_argument("--threads", type=int, help="threads (default: chosen for the machine)")


def _exec(arguments: argparse.Namespace, console: Console) -> int:
    selection, chosen = selection_of(arguments.steps, arguments.requests), chosen_of(arguments)
    with progress_of("requests" if arguments.solo else "steps") as progress:
        answer = execute(arguments.log, selection, chosen, arguments.solo, progress)
    print_answer(arguments, console, answer, render_exec.print_executed)
    return SAME if answer.same else DIFFERENT


def _profile(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.calls is not None:
        out = arguments.out or arguments.calls.with_suffix(".json")
        print_answer(arguments, console, served(arguments.log, arguments.calls, out), print_served)
        return
    with progress_of("steps") as progress:
        answer = profile(arguments.log, selection_of(arguments.steps, ""), chosen_of(arguments), arguments.out, progress)
    print_answer(arguments, console, answer, print_profiled)


def _bisect(arguments: argparse.Namespace, console: Console) -> int:
    selection, chosen = selection_of(arguments.steps, ""), chosen_of(arguments)
    others = [f"--{name}" for name in OTHERWISE if chosen.changes[OTHERWISE[name]] is not None]
    if arguments.solo and others:
        raise UnusableLog(f"--solo compares under the log's own numbers: leave it or {' '.join(others)} out")
    if arguments.tolerance is not None and not arguments.tolerance >= 0:
        raise UnusableLog(f"--tolerance {arguments.tolerance}: it must be 0 or more")
    with progress_of("steps", "operations") as progress:
        alone = True if arguments.solo else False if others else None
        answer = bisect(arguments.log, selection, chosen, alone, arguments.tolerance, progress)
    print_answer(arguments, console, answer, render_exec.print_bisected)
    return SAME if answer.same else DIFFERENT


def chosen_of(arguments: argparse.Namespace) -> ModelChoice:
    """The options of `add_model`. Sets torch's thread count, which must happen before torch is imported."""
    for name in ("ranks", "threads"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise UnusableLog(f"--{'tp' if name == 'ranks' else name} {getattr(arguments, name)}: it must be at least 1")
    names = ("dtype", "quantization", "activations", "kv_cache_dtype", "kernels", "deterministic", "ranks", "threads")
    prepare(arguments.threads or 0, arguments.deterministic is not False)
    return ModelChoice(
        model=arguments.model, any_model=arguments.any_model, changes={name: getattr(arguments, name) for name in names},
        weights=dict(map(_version_of, arguments.weights)), inputs=arguments.inputs,
    )  # fmt: skip


def _version_of(text: str) -> tuple[int, Path]:
    """A version of the weights and where it is. Raises UnusableLog."""
    version, equals, path = text.partition("=")
    if not (version.isdecimal() and int(version) and equals and path):
        raise UnusableLog(f"--weights {text}: give a version, counted from 1, and its folder or file, as 2=/checkpoints/step-200")
    return int(version), Path(os.path.expanduser(path))  # as it is, where there is no such home


@contextmanager
def progress_of(what: str, compared: str = "tokens") -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("running", total=None)
        yield lambda done, count: bar.update(task, description=f"{done:,} {what}, {count:,} {compared} compared")
