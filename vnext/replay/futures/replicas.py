"""what-if over replicas: a log's arrivals, sent to several engines by a routing policy, on the model's step times.

Owns the run. Each engine is the one of what_if_run.py with the log's configuration. A router in front of them has their states,
as vnext/routing has them from their streams, and decides as each request arrives. Whatever else came from outside comes to all
engines, of which those that do not have the request ignore it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vnext.replay.futures.recording import Recorded
from vnext.replay.futures.step_times import Model
from vnext.replay.futures.what_if_run import Ran, Rerun, StepTime
from vnext.replay.futures.what_if_score import RunScore, score
from vnext.replay.reading.objective import Objective
from vnext.replay.reading.source import UnusableLog
from vnext.routing.policies import POLICIES, RoutingPolicyError, require_policy
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.state.events import EngineStarted, RequestArrived, generated_by

REPLICAS_MAX = 1024
KEY_BYTES = 256
"""What `consistent_hash` keeps together: a cache salt, or the prompts that begin with the same 64 tokens."""


class ReplicasRun(msgspec.Struct, frozen=True, kw_only=True):
    """One number of replicas under one policy: the outcome for clients, the requests of each replica, and the largest share of all
    prompt tokens that one of them got."""

    replicas: int
    policy: str
    score: RunScore
    requests: list[int]
    largest_share: float


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, and the errors of the step times, as in WhatIf."""

    step_error_p50: float
    step_error_p99: float
    runs: list[ReplicasRun]


def replicas(
    taken: Recorded, started: EngineStarted, model: Model, clock: Callable[[], StepTime], counts: Sequence[int],
    policies: Sequence[str], objective: Objective,
) -> Replicas:  # fmt: skip
    """Run the arrivals over each number of engines under each policy; one engine needs no policy. `clock` makes one for an engine,
    whose requests it knows. Raises UnusableLog."""
    if taken.lives:
        raise UnusableLog("the log begins in mid-run, and no replica is known to have had its requests: give the whole log")
    cases = [(count, policy) for count in counts for policy in (policies if count > 1 else policies[:1])]
    return Replicas(
        step_error_p50=model.error_p50, step_error_p99=model.error_p99,
        runs=[_run(taken, started, clock, count, policy, objective) for count, policy in cases],
    )  # fmt: skip


def _run(
    taken: Recorded, started: EngineStarted, clock: Callable[[], StepTime], count: int, policy: str, objective: Objective
) -> ReplicasRun:
    engines = [Rerun(taken, started, clock(), exact=False) for _ in range(count)]
    coming = [engine.take_outside() for engine in engines][0]
    router, requests, tokens = Router(count, policy), [0] * count, [0] * count
    for time_us, now in itertools.groupby(coming, key=lambda each: each[0]):
        for engine in engines:
            engine.run(time_us)
        routed = []
        for _, event in now:
            if not isinstance(event, RequestArrived):
                for engine in engines:
                    engine.give(time_us, event)
                continue
            place = _place(router, engines, event)
            routed.append(str(event.id))
            requests[place] += 1
            tokens[place] += len(event.prompt) // 4
            engines[place].give(time_us, event)
        for name in routed:
            router.done(name)  # its engine has it by the next decision
    for engine in engines:
        engine.run()
    words = f"{count} of {policy}" if count > 1 else "1"
    found = score(words, together([engine.ran() for engine in engines]), objective)
    share = max(tokens) / max(sum(tokens), 1)
    return ReplicasRun(replicas=count, policy=policy if count > 1 else "", score=found, requests=requests, largest_share=share)


def _place(router: Router, engines: Sequence[Rerun], event: RequestArrived) -> int:
    for view, engine in zip(router.views, engines):
        view.state = engine.state
    prompt = Prompt.of(event.prompt, event.sampling, event.cache_salt, generated_by(event))
    key = event.cache_salt.encode() or event.prompt[:KEY_BYTES]
    place = router.choose(str(event.id), prompt, [True] * len(engines), key)
    assert place is not None, "all are ready"
    return place


def together(runs: Sequence[Ran]) -> Ran:
    sums = {
        name: sum(getattr(each, name) for each in runs)
        for name in ("steps", "larger", "preemptions", "refused", "hit_tokens", "queried_tokens")
    }
    return Ran(
        served=[served for each in runs for served in each.served], gaps_us=np.concatenate([each.gaps_us for each in runs]),
        end_us=max(each.end_us for each in runs), events=[], **sums,
    )  # fmt: skip


# ---- the command's options and its table ---------------------------------------------------------------------------


def counts_of(text: str) -> list[int]:
    """`1,2,4` as numbers of replicas. Raises UnusableLog."""
    counts = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(",")]
    if not all(1 <= count <= REPLICAS_MAX for count in counts):
        raise UnusableLog(f"--replicas {text}: write numbers between 1 and {REPLICAS_MAX}, as in --replicas 1,2,4")
    return counts


def policies_of(text: str) -> list[str]:
    """`prefix,round_robin` as routing policies, all for "". Raises UnusableLog."""
    names = text.split(",") if text else list(POLICIES)
    try:
        for name in names:
            require_policy(name)
    except RoutingPolicyError as error:
        raise UnusableLog(str(error)) from error
    return names


NAMES = ("replicas", "policy", "hits", "ttft p50", "p99", "itl p50", "p99", "tok/s", "gave", "largest")


def print_replicas(console: Console, answer: Replicas) -> None:
    console.print(
        f"step times: error on left-out steps {answer.step_error_p50:.1%} at the median, {answer.step_error_p99:.1%} at 99 %",
        style="dim",
    )  # fmt: skip
    rows = [
        (
            str(run.replicas), run.policy or "-", f"{run.score.hit_rate:.1%}",
            *(f"{each:,.1f}" for each in (*run.score.ttft_ms, *run.score.itl_ms)), f"{run.score.tokens_s:,.0f}",
            str(run.score.preemptions), f"{run.largest_share:.0%}",
        )
        for run in answer.runs
    ]  # fmt: skip
    table = Table(box=SIMPLE_HEAD, padding=0)
    for name, cells in zip(NAMES, zip(*rows)):
        table.add_column(name, min_width=max(map(len, (*name.split(), *cells))))  # no word is broken
    for row in rows:
        table.add_row(*row)
    console.print(table)
    keys = "ttft: ms to the first token; itl: ms between two; gave: preemptions; largest: the share of prompt tokens of one replica"
    console.print(keys, style="dim", soft_wrap=True)
