"""what-if: the same arrivals under other configurations, compared and ranked.

Owns the command: which configurations, what clients would have felt, what is recommended and how sure that is. The model of
step times is step_times.py's, the run what_if_run.py's. The log's own configuration is run by the same model, so that
numbers are compared with numbers of their kind, and once on the recorded times, which must give the log again, event by event.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vnext.replay import render
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.step_noise import Noise, misfit, noise
from vnext.replay.step_times import Model, Recorded, fit, held_out, recorded
from vnext.replay.verify import why_not_decided
from vnext.replay.what_if_run import Ran, Served, StepTime, rerun, retrace
from vnext.sched.policies import PolicyError, policy_of
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import EngineStarted
from vnext.state.reduce import start
from vnext.state.state import Flight

BAR_WIDTH = 30
UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}
FIXED = {"eos_token_ids", "vocab_size"}
"""What belongs to the model, not to the configuration."""
ERROR_P50_MAX, ERROR_P99_MAX = 0.05, 0.10
"""Up to these the model is as good as it should be."""
HICCUP_FROM = 2.0
"""From so many times the usual on, what a step took is not its own slowness but a pause of the machine."""
GAIN, MET_GAIN = 0.05, 0.005
"""Smaller gains in a time or a rate, or in the share of requests that meet the objective, are within the model's error."""


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What a request should feel: at most so many us until its first token, and so many between two on average; 0: any."""

    ttft_us: float = 0.0
    itl_us: float = 0.0


class Felt(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration's outcome. Times in ms at the median and 99 %; `tokens_s` over the whole run; `met` the share of
    requests that met the objective (1 without one), refused ones counted as missed; `good_s` those per second.

    `changes` is what differs from the log's configuration, "" for its own.
    """

    changes: str
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    tokens_s: float
    met: float
    good_s: float
    requests: int
    refused: int
    steps: int
    preemptions: int
    hit_rate: float
    seconds: float


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`recorded` is what the log itself shows, `unchanged` its configuration by the model, `runs` the others.

    `reproduced` counts the leading events of the log that come out again on the recorded times, of `events`. The errors are
    the model's, relative, of steps that it has not seen; `noise` is what equal steps differ in, beyond which no model goes,
    and `misfit` how far the model is from the usual time of equal steps.
    `recommended` are changes, "" to leave it as it is.
    """

    step_error_p50: float
    step_error_p90: float
    step_error_p99: float
    steps_fitted: int
    noise: Noise
    misfit: Noise
    reproduced: int
    events: int
    recorded: Felt
    unchanged: Felt
    runs: list[Felt]
    recommended: str
    reason: str


Changes = tuple[tuple[str, object], ...]


def what_if(
    log_path: Path, candidates: Sequence[Changes], objective: Objective, jobs: int = 1, own_policy: bool = False
) -> WhatIf:
    """Run every candidate. UnusableLog if the log has no times, or a configuration cannot work; `own_policy` as in `verify`."""
    log = open_log(log_path)
    if why_not := why_not_decided(log, own_policy):
        raise UnusableLog(f"the steps of this log cannot be decided here: {why_not}")
    started = log.header.started
    configs = [changed(started, changes) for changes in candidates]
    taken = recorded(log)
    model = fit(taken.features, taken.step_us)
    again, (features, step_us) = retrace(taken, started), held_out(taken.features, taken.step_us)
    unchanged = felt("", rerun(taken, started, started.config, timed(model, taken)), objective)
    runs = _all(log_path, taken, model, candidates, configs, objective, jobs)
    recommended, reason = recommendation(unchanged, runs, objective)
    return WhatIf(
        step_error_p50=model.error_p50, step_error_p90=model.error_p90, step_error_p99=model.error_p99,
        steps_fitted=model.steps, noise=noise(taken.features, taken.step_us),
        misfit=misfit(features, step_us, model.predict(features)), reproduced=reproduced(taken, again),
        events=len(taken.events), recorded=felt("", again, objective), unchanged=unchanged, runs=runs,
        recommended=recommended, reason=reason,
    )  # fmt: skip


def timed(model: Model, taken: Recorded) -> StepTime:
    """The clock of one run: the model, with what a turn of this log cost beside its step.

    A model knows usual times only, and a machine has hiccups. So the n-th step takes as much more or less than the model says as
    the n-th recorded one did: every run meets the same hiccups, and what is felt at 99 % has them too. Up to HICCUP_FROM times
    the usual it is slower or faster by a factor; what a step took beyond that was a pause, which is as long for any other step.
    """
    usual_us = model.predict(taken.features)
    factor = np.where(taken.step_us > 0, np.minimum(taken.step_us / usual_us, HICCUP_FROM), 1.0)
    pause_us = np.maximum(taken.step_us - HICCUP_FROM * usual_us, 0.0)
    uneven = itertools.cycle(zip(factor.tolist(), pause_us.tolist()))

    def end_us(flight: Flight, begin_us: float) -> float:
        factor, pause_us = next(uneven)
        return begin_us + model.step_us(flight) * factor + pause_us + taken.overhead_us

    return end_us


def reproduced(taken: Recorded, again: Ran) -> int:
    """Leading events of the log that the run gave again."""
    pairs = enumerate(zip(taken.events, again.events))
    return next((place for place, (one, other) in pairs if one != other), min(len(taken.events), len(again.events)))


def _all(
    log_path: Path,
    taken: Recorded,
    model: Model,
    candidates: Sequence[Changes],
    configs: Sequence[SchedulerConfig],
    objective: Objective,
    jobs: int,
) -> list[Felt]:
    if jobs == 1 or len(candidates) < 2:
        started = open_log(log_path).header.started
        return [
            felt(words(changes), rerun(taken, started, config, timed(model, taken)), objective)
            for changes, config in zip(candidates, configs)
        ]
    shares = [(str(log_path), list(candidates[share::jobs]), objective) for share in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(_share, shares))
    return [parts[place % jobs][place // jobs] for place in range(len(candidates))]


def _share(share: tuple[str, list[Changes], Objective]) -> list[Felt]:
    """One process's candidates; it reads and fits the log itself, with the same result."""
    path, candidates, objective = share
    log = open_log(Path(path))
    taken = recorded(log)
    model = fit(taken.features, taken.step_us)
    configs = [changed(log.header.started, changes) for changes in candidates]
    return _all(Path(path), taken, model, candidates, configs, objective, 1)


def changed(started: EngineStarted, changes: Changes) -> SchedulerConfig:
    """The log's configuration with changes. UnusableLog if it cannot work."""
    config = msgspec.structs.replace(started.config, **dict(changes))
    try:
        policy_of(config.policy)
        start(msgspec.structs.replace(started, config=config))
    except (IllegalEvent, PolicyError) as error:
        raise UnusableLog(f"{words(changes)} cannot work: {error}") from error
    return config


def words(changes: Changes) -> str:
    return " ".join(f"{name}={value}" for name, value in changes)


# ---- what clients feel -------------------------------------------------------------------------------------------


def felt(changes: str, ran: Ran, objective: Objective) -> Felt:
    """A run by what its clients felt."""
    told = [served for served in ran.served if served.tokens]
    first = np.array([served.first_us - served.arrived_us for served in told])
    began_us = min((served.arrived_us for served in ran.served), default=0.0)
    seconds = max(ran.end_us - began_us, 1.0) / 1e6
    good = sum(meets(served, objective) for served in told)
    count = len(ran.served) + ran.refused
    return Felt(
        changes=changes, ttft_ms=_ms(first), itl_ms=_ms(ran.gaps_us), tokens_s=sum(served.tokens for served in told) / seconds,
        met=good / count if count else 1.0, good_s=good / seconds, requests=count, refused=ran.refused, steps=ran.steps,
        preemptions=ran.preemptions, hit_rate=ran.hit_tokens / max(ran.queried_tokens, 1), seconds=seconds,
    )  # fmt: skip


def meets(served: Served, objective: Objective) -> bool:
    """Whether a request felt what it should: its first token in time, the others on average."""
    if objective.ttft_us and served.first_us - served.arrived_us > objective.ttft_us:
        return False
    between = (served.last_us - served.first_us) / max(served.tokens - 1, 1)
    return not objective.itl_us or between <= objective.itl_us


def _ms(values_us: np.ndarray) -> tuple[float, float]:
    if not len(values_us):
        return 0.0, 0.0
    middle, far = (np.percentile(values_us, (50, 99)) / 1e3).tolist()
    return middle, far


def recommendation(unchanged: Felt, runs: Sequence[Felt], objective: Objective) -> tuple[str, str]:
    """Whatever meets the objective most often; among equals fewer refused, then more good answers a second, then sooner
    first tokens at 99 %. Ties leave it as it is."""

    def worth(run: Felt) -> tuple:
        sooner = -round(run.ttft_ms[1], 3), -round(run.itl_ms[1], 3)
        return round(run.met, 4), -run.refused, round(run.good_s if objective != Objective() else run.tokens_s, 2), *sooner

    best = max(runs, key=worth, default=unchanged)
    if worth(best) <= worth(unchanged) or not _matters(unchanged, best):
        return "", "nothing that was tried is better by more than a model can tell"
    if best.met > unchanged.met:
        return best.changes, f"{best.met:.1%} of the requests meet the objective instead of {unchanged.met:.1%}"
    if best.tokens_s > (1 + GAIN) * unchanged.tokens_s:
        return best.changes, f"{best.tokens_s:.0f} tokens a second instead of {unchanged.tokens_s:.0f}"
    what = ("first token", best.ttft_ms, unchanged.ttft_ms)
    if what[1][1] >= (1 - GAIN) * what[2][1]:
        what = ("the next token", best.itl_ms, unchanged.itl_ms)
    return best.changes, f"{what[0]} at 99 % after {what[1][1]:.1f} ms instead of {what[2][1]:.1f}"


def _matters(unchanged: Felt, best: Felt) -> bool:
    """A gain of a few percent in something that clients feel."""
    if best.met > unchanged.met + MET_GAIN or best.refused < unchanged.refused:
        return True
    sooner = best.ttft_ms[1] < (1 - GAIN) * unchanged.ttft_ms[1] or best.itl_ms[1] < (1 - GAIN) * unchanged.itl_ms[1]
    return best.met >= unchanged.met and (sooner or best.tokens_s > (1 + GAIN) * unchanged.tokens_s)


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`what-if` among the commands."""
    asking = command(
        "what-if", run, "the same arrivals under other configurations, with step times learnt from the log",
        "Arrivals come when they came, whatever the answers. Exit code 1: another configuration is recommended.",
    )  # fmt: skip
    asking.add_argument("--set", metavar="K=V", action="append", default=[], help="a change of every configuration tried")
    asking.add_argument("--sweep", metavar="K=A,B,C", action="append", default=[], help="values to try, all with all")
    asking.add_argument("--slo", default="", metavar="ttft=200ms,itl=50ms", help="what a request should feel: the objective")
    asking.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    asking.add_argument("--own-policy", action="store_true", help="import the policy that the log names: runs its code")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 leave it as it is, 1 something else is better."""
    if arguments.jobs < 1:
        raise UnusableLog(f"--jobs {arguments.jobs}: it must be at least 1")
    tried, objective = candidates(arguments.set, arguments.sweep), objective_of(arguments.slo)
    answer = what_if(arguments.log, tried, objective, arguments.jobs, arguments.own_policy)
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_what_if(console, answer)
    return int(bool(answer.recommended))


OPTIONS = MappingProxyType(
    {
        "max_num_seqs": "running_max",
        "max_num_batched_tokens": "batch_tokens_max",
        "max_model_len": "model_len_max",
        "long_prefill_token_threshold": "prefill_threshold",
        "num_blocks_override": "block_count",
        "enable_prefix_caching": "prefix_caching",
        "enable_chunked_prefill": "chunked_prefill",
        "scheduling_policy": "policy",
    }
)
"""Settings as `vnext serve` calls them, and as a log does."""


def candidates(sets: Sequence[str], sweeps: Sequence[str]) -> list[Changes]:
    """Every configuration to try. UnusableLog for what no configuration has."""
    fixed = [(name, [value_of(name, text)]) for name, text in map(_pair, sets)]
    swept = [(name, [value_of(name, each) for each in text.split(",")]) for name, text in map(_pair, sweeps)]
    names = [name for name, _ in fixed + swept]
    if len(set(names)) < len(names):
        raise UnusableLog(f"{', '.join(names)}: name each setting once")
    if not names:
        return []
    return [tuple(zip(names, values)) for values in itertools.product(*(values for _, values in fixed + swept))]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise UnusableLog(f"{text!r} is no setting: write name=value")
    plain = name.lstrip("-").replace("-", "_")
    return OPTIONS.get(plain, plain), value


def value_of(name: str, text: str) -> object:
    """A setting's value by the type of its field."""
    types = {field.name: field.type for field in msgspec.structs.fields(SchedulerConfig) if field.name not in FIXED}
    if name not in types:
        raise UnusableLog(f"there is no setting {name!r}: choose of {', '.join(types)}")
    try:
        return msgspec.convert(text, types[name], strict=False)
    except msgspec.ValidationError as error:
        raise UnusableLog(f"{name}={text} is no value of this setting ({error})") from error


def objective_of(text: str) -> Objective:
    """`ttft=200ms,itl=50ms` as an objective."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(ttft|itl)=(\d+(?:\.\d+)?)(us|ms|s)", part.strip())
        if match is None:
            raise UnusableLog(f"{part!r} is no objective: write ttft=200ms,itl=50ms")
        found[f"{match[1]}_us"] = float(match[2]) * UNITS[match[3]]
    return Objective(**found)


def print_what_if(console: Console, answer: WhatIf) -> None:
    """A table of all runs, bars of what the objective or the throughput says, and the recommendation."""
    good = answer.step_error_p50 <= ERROR_P50_MAX and answer.step_error_p99 <= ERROR_P99_MAX
    console.print(
        f"step times of {answer.steps_fitted:,} steps: error on steps left out {answer.step_error_p50:.1%} at the median, "
        f"{answer.step_error_p99:.1%} at 99 %", style="bold" if good else "bold yellow", soft_wrap=True,
    )  # fmt: skip
    if answer.noise.steps:
        console.print(
            f"{answer.noise.steps:,} steps that are like others differ from them by {answer.noise.p50:.1%} and "
            f"{answer.noise.p99:.1%}: no model of what they compute does better", style="dim", soft_wrap=True,
        )  # fmt: skip
    if answer.misfit.steps and not good:
        console.print(
            f"from the median of steps that are alike it is {answer.misfit.p50:.1%} away at the median, {answer.misfit.p99:.1%} at "
            "99 %: what is left are the machine's hiccups, which every line below has", style="dim", soft_wrap=True,
        )  # fmt: skip
    whole = answer.reproduced == answer.events
    again = "the log comes out again" if whole else f"{answer.reproduced:,} of {answer.events:,} events come out again"
    console.print(f"on its recorded times {again}", style="" if whole else "yellow")
    table = Table(box=SIMPLE_HEAD)
    table.add_column("configuration", header_style="cyan", min_width=16, overflow="fold")
    for name in ("ttft", "99 %", "itl", "99 %", "tok/s", "met", "no", "gave"):
        table.add_column(name, justify="right", header_style="cyan", no_wrap=True)
    rows = [("as recorded", answer.recorded), ("unchanged, by the model", answer.unchanged)]
    for name, each in [*rows, *((run.changes, run) for run in answer.runs)]:
        table.add_row(
            name, *(f"{value:.1f}" for value in (*each.ttft_ms, *each.itl_ms)), f"{each.tokens_s:.0f}", f"{each.met:.0%}",
            str(each.refused), str(each.preemptions),
        )  # fmt: skip
    console.print(table)
    console.print("ttft: ms to the first token; itl: ms between two; no: refused requests; gave: preemptions", style="dim")
    _bars(console, answer)
    advice = f"set {answer.recommended}: {answer.reason}" if answer.recommended else f"leave it as it is: {answer.reason}"
    console.print(advice, style="bold green", soft_wrap=True)


def _bars(console: Console, answer: WhatIf) -> None:
    runs = [("unchanged", answer.unchanged), *((run.changes, run) for run in answer.runs)]
    by_objective = any(run.met < 1 for _, run in runs)
    values = [run.good_s if by_objective else run.tokens_s for _, run in runs]
    most, width = max(values) or 1.0, max(len(name) for name, _ in runs)
    console.print("requests within the objective a second" if by_objective else "tokens a second", style="bold")
    for (name, _), value in zip(runs, values):
        console.print(f"  {name:<{width}}  {'█' * round(BAR_WIDTH * value / most)} {value:.1f}", soft_wrap=True)
