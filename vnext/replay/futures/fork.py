"""fork: how likely a failure is after each moment of a log, from seeded futures of the log's states.

Owns the command: which states, how many futures of each, in how many processes, and the plot. If a failure becomes
likely only after some step, that step made it possible. forking.py owns the futures.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.log.codec import SEGMENT_SUFFIX, encode_body
from vnext.replay.console import render
from vnext.replay.console.commands import in_processes, print_answer
from vnext.replay.futures.forking import Future, future_of, future_options
from vnext.replay.futures.redecided import events_of, predicate_of, recorded_events, require_decisions
from vnext.replay.futures.shrinking import write_log
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.index import Index
from vnext.replay.reading.show import state_at
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.writer import Writer, snapshot_of_log
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, plan_of
from vnext.state.reduce import reduce
from vnext.state.state import State

BAR_WIDTH = 16
Z_95 = 1.96
KINDS_SHOWN = 5


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One moment: `failed` of `forks` futures from `step` on failed. `low` and `high` bound the probability (Wilson's
    interval of 95 %). `steps_median` is the median number of steps to a failure, -1 without one."""

    step: int
    forks: int
    failed: int
    probability: float
    low: float
    high: float
    steps_median: int


class Forked(msgspec.Struct, frozen=True, kw_only=True):
    """`kinds` counts the failures by law or wording; `example` is the first one's message, `written` its log."""

    forks: int
    steps: int
    failed: int
    points: list[Point]
    kinds: dict[str, int]
    example: str
    written: str


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One process's share of the work: every `shares`-th future from the `share`-th on."""

    log: str
    points: tuple[int, ...]
    forks: int
    steps: int
    seed: int
    aborts_per_mille: int
    resets_per_mille: int
    predicate: str
    share: int
    shares: int


def futures_of(order: Order) -> list[tuple[int, Future]]:
    """(step, future) of one share. Only its first failure keeps its events."""
    log = open_log(Path(order.log))
    require_decisions(log)
    states = states_at(log, order.points)
    options = future_options(log, order.steps, order.aborts_per_mille, order.resets_per_mille)
    predicate = predicate_of(order.predicate) if order.predicate else None
    found: list[tuple[int, Future]] = []
    kept = False
    for number in range(order.share, order.forks, order.shares):
        step = order.points[number % len(order.points)]
        future = future_of(states[step], order.seed + number, options, predicate)
        if future.kind and kept:
            future = msgspec.structs.replace(future, events=())
        kept = kept or bool(future.kind)
        found.append((step, future))
    return found


def states_at(log: Log, points: Sequence[int]) -> dict[int, State]:
    """The states in which these steps run; -1 is where the log begins. Raises UnusableLog if the log lacks one of them."""
    index = Index(log)
    return {step: index.first if step < 0 else state_at(index, step)[0] for step in sorted(set(points))}


def fork(order: Order, jobs: int = 1) -> tuple[Forked, tuple[int, Future] | None]:
    """All futures of an order, computed by `jobs` processes, with the first failure that has its events."""
    if jobs == 1:
        found = futures_of(order)
    else:
        states_at(open_log(Path(order.log)), order.points)  # builds the index once for all processes
        shares = [msgspec.structs.replace(order, share=share, shares=jobs) for share in range(jobs)]
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = [each for part in in_processes(pool, futures_of, shares) for each in part]
    failures = sorted((each for each in found if each[1].kind), key=lambda each: each[1].seed)
    kinds = Counter(future.kind for _, future in failures)
    return Forked(
        forks=len(found),
        steps=sum(future.steps for _, future in found),
        failed=len(failures),
        points=[_point(step, [future for at, future in found if at == step]) for step in sorted(set(order.points))],
        kinds=dict(kinds.most_common()),
        example=failures[0][1].message if failures else "",
        written="",
    ), next((each for each in failures if each[1].events), None)


def _point(step: int, futures: Sequence[Future]) -> Point:
    failed = sorted(future.steps for future in futures if future.kind)
    low, high = wilson(len(failed), len(futures))
    return Point(
        step=step, forks=len(futures), failed=len(failed), probability=len(failed) / max(len(futures), 1), low=low, high=high,
        steps_median=failed[len(failed) // 2] if failed else -1,
    )  # fmt: skip


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95 % bounds of a probability after `hits` of `count` (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, Z_95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    width = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return max(middle - width, 0.0), min(middle + width, 1.0)


def spread(last: int, points: int, first: int = -1) -> tuple[int, ...]:
    """`points` steps, evenly spaced from the log's beginning to `last`. `first` is the step before its first one."""
    if points <= 1:
        return (last,)
    steps = dict.fromkeys(round(first + (last - first) * place / (points - 1)) for place in range(points))
    return tuple(-1 if step == first else step for step in steps)


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    forking = command(
        "fork", run, "run seeded futures of a logged state, to see how likely a failure is from there",
        "Requests like the log's keep arriving at its rate; every decision is the engine's. --points also forks from earlier "
        "steps: a failure became possible where its probability rises. Exit code 1: some future fails.",
    )  # fmt: skip
    forking.add_argument("step", metavar="STEP", type=int, help="the last step from which to fork; -1 for the log's beginning")
    forking.add_argument("--points", type=int, default=1, help="number of steps, up to STEP, to fork from (default 1: only STEP)")
    forking.add_argument("--forks", type=int, default=100, help="number of futures, over all points (default 100)")
    forking.add_argument("--steps", type=int, default=1000, help="maximum steps of a future (default 1000)")
    forking.add_argument("--seed", type=int, default=0, help="seed of the first future (default 0)")
    forking.add_argument("--aborts", type=int, default=20, help="aborts per 1000 steps (default 20)")
    forking.add_argument("--resets", type=int, default=2, help="cache resets per 1000 steps (default 2)")
    forking.add_argument("--jobs", type=int, default=1, help="number of processes (default 1)")
    forking.add_argument("--predicate", metavar="FILE:FUNC", default="", help="FUNC(before, event, after) is true on a failure too")
    forking.add_argument("-o", "--out", type=Path, help="write the log of the first failing future, for shrink")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if no future fails, 1 if some do."""
    if min(arguments.points, arguments.forks, arguments.steps, arguments.jobs) < 1 or arguments.step < -1:
        raise UnusableLog("--points, --forks, --steps and --jobs are at least 1, and STEP at least -1")
    log = open_log(arguments.log)
    points = spread(arguments.step, arguments.points, first_state(log).planned - 1)
    order = Order(
        log=str(arguments.log), points=points, forks=arguments.forks, steps=arguments.steps,
        seed=arguments.seed, aborts_per_mille=arguments.aborts, resets_per_mille=arguments.resets,
        predicate=arguments.predicate, share=0, shares=1,
    )  # fmt: skip
    answer, failure = fork(order, arguments.jobs)
    if failure is not None and arguments.out:
        answer = msgspec.structs.replace(answer, written=str(write_future(log, *failure, arguments.out)))
    print_answer(arguments, console, answer, print_forked)
    return int(answer.failed > 0)


def write_future(log: Log, step: int, future: Future, out: Path) -> Path:
    """The log from its beginning to the plan of a step, followed by this future. Raises UnusableLog if it cannot be
    written."""
    if not log.header.index:
        started, *events = events_of(log)
        return write_log([started, *events_until(events, step), *future.events], out)
    if out.suffix == SEGMENT_SUFFIX:
        raise UnusableLog(f"{log.paths[0].parent} has lost its first segment, so -o {out} cannot be one file: name a new folder")
    privacy, width = log.header.privacy, log.header.token_width
    header = msgspec.structs.replace(log.header, previous=0, closes=False)
    writer, state = Writer(out, header, lambda each: snapshot_of_log(each, privacy)), first_state(log)
    for event in (*events_until(tuple(recorded_events(log)), step), *future.events):
        body = encode_body(state.sequence, (event,), (), 0, width)
        writer.ready(state)
        try:
            state = reduce(state, event)
        except IllegalEvent:
            writer.write(body, state)  # verify finds the same event rejected
            break
        writer.write(body, state)
    writer.close()
    return out


def events_until(events: Sequence[AnyEvent], step: int) -> Sequence[AnyEvent]:
    """The events up to and including the plan of a step; none for step -1, where the log begins."""
    for number, event in enumerate(events):
        if step >= 0 and (plan := plan_of(event)) is not None and plan.step == step:
            return events[: number + 1]
    return ()


def print_forked(console: Console, answer: Forked) -> None:
    """Print the probability of a failure by the step of the fork, as bars."""
    console.print(f"{render.counted(answer.forks, 'future')}, {render.counted(answer.steps, 'step')} together", style="bold")
    for point in answer.points:
        bar = "█" * round(point.probability * BAR_WIDTH)
        bounds = f"{point.probability:6.1%} ({point.low:.1%} to {point.high:.1%})"
        console.print(f"  from step {point.step:>9,} {bounds:<23} {f'{point.failed} of {point.forks}':>12}  {bar}".rstrip())
    if not answer.failed:
        console.print("no future fails", style="bold green")
        return
    for kind, count in list(answer.kinds.items())[:KINDS_SHOWN]:
        console.print(f"  {count} x {render.printable(kind)}")
    console.print(render.printable(answer.example), style="bold red", soft_wrap=True)
    if answer.written:
        console.print(f"written: {answer.written}", soft_wrap=True)
