"""what-if: runs the same arrivals under other configurations, and compares and ranks them.

Owns the command: which configurations to run, and what is said of them. ground.py owns single runs, step_times.py the model of
step times, what_if_score.py figures and the verdict. The log's own configuration runs on the same model, so that like is compared
with like. It also runs once on the recorded times, which must reproduce the log, event by event.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vnext.replay.console import render
from vnext.replay.console.commands import print_answer
from vnext.replay.futures.auto import WEIGHT, Changes, sought
from vnext.replay.futures.ground import Runs, Source, Trial, changed, ground_of, timed
from vnext.replay.futures.recording import Recorded
from vnext.replay.futures.replicas import counts_of, policies_of, print_replicas, replicas
from vnext.replay.futures.step_times import Noise, held_out, misfit, noise
from vnext.replay.futures.what_if_run import Ran, retrace
from vnext.replay.futures.what_if_score import NO_OBJECTIVE, Between, RunScore, Tested, recommendation, score, worth
from vnext.replay.reading.objective import Objective, objective_of
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.verify import why_not_decided
from vnext.state.config import STORED_NAMES, SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived
from vnext.state.params import WEIGHT_MAX

NAME_WIDTH = 22  # leaves the figures enough room on a terminal of 80 columns
BAR_WIDTH = 30
FIXED = {"eos_token_ids", "vocab_size"}
"""Settings that belong to the model, not to the configuration."""
ERROR_P50_MAX, ERROR_P99_MAX = 0.05, 0.10
"""Up to these errors the model is good enough."""
LARGER_SHARE = 0.05
DRAWS = 8
"""How many times a run's hiccups and model are drawn again, in all logs together."""
DRAWN_MAX = 12
"""At most this many configurations, the best ones, get drawn hiccups, besides the unchanged one."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """`recorded` is what the log itself shows, None if the step times are another log's; `unchanged` is its
    configuration on the model, `runs` are the others.

    `reproduced` counts the leading events of the log, out of `events`, that recur on the recorded times. The errors are
    the model's, relative, on steps outside of the fit; `noise` is how much equal steps differ, a bound for any model,
    and `misfit` how far the model is from the usual time of equal steps. `recommended` are changes, "" to keep the
    configuration, and `serve`, of --auto, is the command line with them. `revived` requests were alive where a log
    without its beginning starts.
    """

    step_error_p50: float
    step_error_p90: float
    step_error_p99: float
    steps_fitted: int
    noise: Noise
    misfit: Noise
    reproduced: int
    events: int
    recorded: RunScore | None
    unchanged: RunScore
    runs: list[RunScore]
    recommended: str
    reason: str
    revived: int = 0
    serve: str = ""


def what_if(
    log_path: Path, candidates: Sequence[Changes], objective: Objective, jobs: int = 1, own_policy: bool = False,
    times_of: Path | None = None, like: Sequence[Path] = (), auto: bool = False,
) -> WhatIf:  # fmt: skip
    """Run every candidate, and with `auto` what else serves the objective best, with step times learnt from the log `times_of` if
    given. `like` are other logs of the same settings and load. Raises UnusableLog if there are no times, or a configuration
    cannot work; `own_policy` as in `verify`."""
    log = open_log(log_path)
    if why_not := why_not_decided(log, own_policy):
        raise UnusableLog(f"the steps of this log cannot be decided here: {why_not}")
    for changes in candidates:
        changed(log.header.started, changes)
    for path in like:
        _require_alike(log, path)
    with Runs([Source(log_path, times_of), *map(Source, like)], objective, jobs) as runs:
        started, taken, model = runs.grounds[0].started, runs.grounds[0].taken, runs.grounds[0].model
        again = retrace(taken, started) if times_of is None else None
        tried = [*candidates, *(_sought(runs, started) if auto else ())]
        unchanged, found, (recommended, reason) = _tried(runs, tried)
    features, step_us = held_out(taken.features, taken.step_us)
    return WhatIf(
        step_error_p50=model.error_p50, step_error_p90=model.error_p90, step_error_p99=model.error_p99,
        steps_fitted=model.steps, noise=noise(taken.features, taken.step_us),
        misfit=misfit(features, step_us, model.predict(features)),
        reproduced=reproduced(taken, again) if again else 0, events=len(taken.events),
        recorded=score("", again, objective) if again else None, unchanged=unchanged, runs=found,
        recommended=recommended, reason=reason, revived=len(taken.lives), serve=serve_line(started, recommended) if auto else "",
    )  # fmt: skip


def _require_alike(log: Log, path: Path) -> None:
    """Raises UnusableLog if a log is of another model or other settings."""
    own, other = log.header.started, open_log(path).header.started
    if own.config != other.config or own.model != other.model:
        raise UnusableLog(f"{path} is a log of other settings (`vnext-replay compare` names them): --like takes one of the same")


def _tried(runs: Runs, candidates: Sequence[Changes]) -> tuple[RunScore, list[RunScore], tuple[str, str]]:
    """The unchanged configuration, the candidates, the best of them with bounds, and what is recommended and why."""
    _, *found = runs.scores([Trial((), 0), *(Trial(changes, 0) for changes in candidates)])
    order = sorted(range(len(found)), key=lambda place: worth(found[place]), reverse=True)[:DRAWN_MAX]
    drawn, logs = [(), *(candidates[place] for place in order)], len(runs.grounds)
    seeds = [(0, *range(1 + log, DRAWS + 1, logs)) for log in range(logs)]
    wanted = [[[Trial(changes, seed, log) for seed in of_log] for log, of_log in enumerate(seeds)] for changes in drawn]
    runs.scores([trial for each in wanted for of_log in each for trial in of_log])
    tests = [Tested([runs.scores(of_log) for of_log in each]) for each in wanted]
    bounds = {test.run.changes: test.run for test in tests}
    return tests[0].run, [bounds.get(run.changes, run) for run in found], recommendation(tests[0], tests[1:])


def _sought(runs: Runs, started: EngineStarted) -> list[Changes]:
    """What `--auto` finds best."""

    def scores_of(tried: Sequence[Changes]) -> list[RunScore]:
        return runs.scores([Trial(changes, 0) for changes in tried])

    return sought(scores_of, started.config, lambda changes: _can_work(started, changes), runs.objective, _lightest(runs))


def _lightest(runs: Runs) -> list[str]:
    """The clients, those whose requests may take the fewest tokens first."""
    asked = Counter[int]()
    for each in runs.grounds[0].taken.outside:
        if isinstance(each.event, RequestArrived) and each.event.client:
            asked[each.event.client] += len(each.event.prompt) // 4 + each.event.sampling.max_tokens
    return [f"{client:016x}" for client, _ in reversed(asked.most_common())]


def _can_work(started: EngineStarted, changes: Changes) -> bool:
    try:
        changed(started, changes)
    except UnusableLog:
        return False
    return True


def reproduced(taken: Recorded, again: Ran) -> int:
    """How many leading events of the log the run reproduced."""
    pairs = enumerate(zip(taken.events, again.events))
    return next((place for place, (one, other) in pairs if one != other), min(len(taken.events), len(again.events)))


def serve_line(started: EngineStarted, recommended: str) -> str:
    """The command with these changes (`words`) as options; "" where there are none."""
    names = {stored: option for option, stored in OPTIONS.items()}
    pairs = [each.partition("=") for each in recommended.split() if not each.startswith(WEIGHT)]
    flags = [(names.get(name, name).replace("_", "-"), value) for name, _, value in pairs]
    given = {"True": "--{}", "False": "--no-{}"}
    options = [given.get(value, "--{} {}").format(name, value) for name, value in flags]
    weights = [each.removeprefix(WEIGHT).split("=") for each in recommended.split() if each.startswith(WEIGHT)]
    also = "".join(f"  # in the file of keys `weight: {weight}` for the client {client}" for client, weight in weights)
    return f"vnext serve {' '.join((started.model, *options))}{also}" if recommended else ""


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    asking = command(
        "what-if", run, "run the same arrivals under other configurations, with step times learnt from the log",
        "Requests arrive at their recorded times, whatever the answers. Exit code 1: another configuration is recommended.",
    )  # fmt: skip
    asking.add_argument("--set", metavar="K=V", action="append", default=[], help="a setting for all, or weight:CLIENT=3")
    asking.add_argument("--sweep", metavar="K=A,B,C", action="append", default=[], help="values to try, in all combinations")
    asking.add_argument("--auto", action="store_true", help="seek settings that meet --slo")
    asking.add_argument("--slo", default="", metavar="ttft=200ms,itl=50ms", help="the latency objective of a request")
    asking.add_argument(
        "--times-of", type=Path, metavar="LOG", help="learn step times from this log, if LOG has none"
    )  # fmt: skip
    asking.add_argument(
        "--like", type=Path, metavar="LOG", action="append", default=[],
        help="another log of the same settings and load (repeat)",
    )  # fmt: skip
    asking.add_argument("--replicas", default="", metavar="1,2,4", help="replay arrivals on that many engines (docs/routing.md)")
    asking.add_argument("--routing", default="", metavar="POLICY,...", help="with --replicas: the routing policies (default: all)")
    asking.add_argument("--jobs", type=int, default=1, help="number of processes (default 1)")
    asking.add_argument("--own-policy", action="store_true", help="import the policy that the log names, which runs its code")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if the configuration should stay, 1 if another is better."""
    if arguments.jobs < 1:
        raise UnusableLog(f"--jobs {arguments.jobs}: it must be at least 1")
    tried, objective = candidates(arguments.set, arguments.sweep), objective_of(arguments.slo)
    if arguments.replicas:
        return _run_replicas(arguments, console, tried, objective)
    if arguments.auto and objective.is_any:
        raise UnusableLog(f"--auto seeks the settings that meet an objective: {NO_OBJECTIVE}")
    answer = what_if(
        arguments.log, tried, objective, arguments.jobs, arguments.own_policy, arguments.times_of, arguments.like, arguments.auto
    )
    print_answer(arguments, console, answer, print_what_if)
    return int(bool(answer.recommended))


def _run_replicas(arguments: argparse.Namespace, console: Console, tried: Sequence[Changes], objective: Objective) -> int:
    """`what-if --replicas`: recommends nothing, so the answer is no difference. Raises UnusableLog."""
    if len(tried) > 1 or arguments.auto:
        raise UnusableLog("--replicas takes settings by --set, and neither --sweep nor --auto: it compares one configuration")
    counts, policies, log = counts_of(arguments.replicas), policies_of(arguments.routing), open_log(arguments.log)
    if why_not := why_not_decided(log, arguments.own_policy):
        raise UnusableLog(f"the steps of this log cannot be decided here: {why_not}")
    ground = ground_of(log, arguments.times_of)
    started = msgspec.structs.replace(ground.started, config=changed(ground.started, tried[0] if tried else ()))
    clock = partial(timed, ground.model, ground.taken, ground.pace)
    answer = replicas(ground.taken, started, ground.model, clock, counts, policies, objective)
    print_answer(arguments, console, answer, print_replicas)
    return 0


OPTIONS = MappingProxyType(
    {
        "num_blocks_override": "page_count",
        "enable_prefix_caching": "prefix_caching",
        "enable_chunked_prefill": "chunked_prefill",
        "scheduling_policy": "policy",
    }
)
"""Settings by the names of `vnext serve`, where a log has other names."""
BY_STORED_NAME = {stored: name for name, stored in STORED_NAMES.items()}


def candidates(sets: Sequence[str], sweeps: Sequence[str]) -> list[Changes]:
    """Every configuration to try. Raises UnusableLog for an unknown setting."""
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
    return OPTIONS.get(plain) or BY_STORED_NAME.get(plain, plain), value


def value_of(name: str, text: str) -> object:
    """A setting's value by the type of its field."""
    if name.startswith(WEIGHT):
        if not text.isdecimal() or not 1 <= int(text) <= WEIGHT_MAX:
            raise UnusableLog(f"{name}={text}: a weight is 1 to {WEIGHT_MAX}")
        return int(text)
    types = {field.name: field.type for field in msgspec.structs.fields(SchedulerConfig) if field.name not in FIXED}
    if name not in types:
        raise UnusableLog(f"there is no setting {name!r}: choose of {', '.join(types)}")
    try:
        return msgspec.convert(text, types[name], strict=False)
    except msgspec.ValidationError as error:
        raise UnusableLog(f"{name}={text} is no value of this setting ({error})") from error


def print_what_if(console: Console, answer: WhatIf) -> None:
    """Print how good the step times are, a table of all runs, bars for the objective or the throughput, and the advice."""
    _print_accuracy(console, answer)
    if answer.revived:
        lived = render.counted(answer.revived, "request")
        console.print(
            f"the log begins in mid-run: {lived} that lived there continue in every run with what they had computed, and "
            "nothing else is in the cache; their first tokens are not counted", style="dim", soft_wrap=True,
        )  # fmt: skip
    if answer.recorded is None:
        console.print("the step times are another log's: there is nothing \"as recorded\" to compare with", style="dim")
    else:
        _print_reproduced(console, answer)
    console.print(_table(answer))
    keys = "".join(f"; {key}" for _, key in _counts(answer).values())
    console.print(f"ttft: ms to the first token; itl: ms between two{keys}", style="dim")
    console.print(
        f"below a figure: another run's, 9 times in 10, by {DRAWS} runs with redrawn hiccups; {_known(answer)}",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    for run in answer.runs:
        if run.larger > LARGER_SHARE * run.steps:
            share = f"{run.larger / run.steps:.0%} of its steps are larger than any in this log"
            console.print(f"{run.changes}: {share}, and their times are a guess", style="yellow", soft_wrap=True)
    _bars(console, answer)
    verdict = "leave it as it is: " if answer.unchanged.met is not None else ""
    advice = f"set {answer.recommended}: {answer.reason}" if answer.recommended else f"{verdict}{answer.reason}"
    console.print(advice, style="bold green", soft_wrap=True)
    if answer.serve:
        console.print(render.printable(answer.serve), soft_wrap=True)


def _known(answer: WhatIf) -> str:
    """What the bounds know of how runs differ."""
    logs = answer.unchanged.between.logs if answer.unchanged.between is not None else 1
    return f"{logs} logs show how runs differ" if logs > 1 else "one log hides how runs differ: --like"


def _print_accuracy(console: Console, answer: WhatIf) -> None:
    """Print the errors of the step times, beside those that no model could avoid."""
    good = answer.step_error_p50 <= ERROR_P50_MAX and answer.step_error_p99 <= ERROR_P99_MAX
    console.print(
        f"step times of {answer.steps_fitted:,} steps: error on left-out steps {answer.step_error_p50:.1%} at the median, "
        f"{answer.step_error_p99:.1%} at 99 %", style="bold" if good else "bold yellow", soft_wrap=True,
    )  # fmt: skip
    if answer.noise.steps:
        console.print(
            f"{answer.noise.steps:,} similar steps differ from each other by {answer.noise.p50:.1%} and "
            f"{answer.noise.p99:.1%}: no model of what they compute can do better", style="dim", soft_wrap=True,
        )  # fmt: skip
    if answer.misfit.steps and not good:
        console.print(
            f"from the median of similar steps it is {answer.misfit.p50:.1%} away at the median, {answer.misfit.p99:.1%} at "
            "99 %: the rest is the machine's hiccups, which every line below includes", style="dim", soft_wrap=True,
        )  # fmt: skip


def _print_reproduced(console: Console, answer: WhatIf) -> None:
    whole = answer.reproduced == answer.events
    again = "the simulation reproduces the log" if whole else f"{answer.reproduced:,} of {answer.events:,} events are reproduced"
    console.print(f"on its recorded times {again}", style="" if whole else "yellow")


def _table(answer: WhatIf) -> Table:
    """All runs; under each figure its bounds, where they differ."""
    has_objective = answer.unchanged.met is not None
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("configuration", header_style="cyan", min_width=13, overflow="fold")
    counts, met = _counts(answer), ["met"] if has_objective else []
    for name in ("ttft", "99 %", "itl", "99 %", "tok/s", *met, *(name for name, _ in counts.values())):
        table.add_column(name, justify="right", header_style="cyan", no_wrap=True)
    rows = [("as recorded", answer.recorded)] if answer.recorded is not None else []
    rows.append(("unchanged, modelled", answer.unchanged))
    for name, each in [*rows, *((run.changes, run) for run in answer.runs)]:
        met = [f"{each.met:.0%}"] if has_objective else []
        figures = [*(f"{value:.1f}" for value in (*each.ttft_ms, *each.itl_ms)), f"{each.tokens_s:.0f}", *met]
        first, rest = (name, "") if each.between is None else _in_two(name)
        table.add_row(first, *figures, *(str(getattr(each, name)) for name in counts))
        if each.between is not None:
            table.add_row(rest, *_bounds(each.between, has_objective), style="dim")
    return table


def _counts(answer: WhatIf) -> dict[str, tuple[str, str]]:
    """The counts that are not 0 in every run: a field's column and key."""
    known = {"refused": ("no", "no: refused requests"), "preemptions": ("gave", "gave: preemptions")}
    runs = [run for run in (answer.recorded, answer.unchanged, *answer.runs) if run is not None]
    return {name: words for name, words in known.items() if any(getattr(run, name) for run in runs)}


def _in_two(name: str) -> tuple[str, str]:
    """A configuration's name in two parts: beside its figures and, if it is long, beside their bounds."""
    if len(name) <= NAME_WIDTH:
        return name, ""
    cut = max(name.rfind("_", 0, NAME_WIDTH), name.rfind(" ", 0, NAME_WIDTH)) + 1 or NAME_WIDTH
    return name[:cut], name[cut:]


def _bounds(between: Between, has_objective: bool) -> list[str]:
    """The bounds of each figure; empty where they are equal."""
    figures = [*between.ttft_ms, *between.itl_ms, between.tokens_s]
    pairs = [tuple(f"{bound:.0f}" if bounds[1] >= 100 else f"{bound:.1f}" for bound in bounds) for bounds in figures]
    if has_objective and between.met is not None:
        low, high = (f"{bound:.0%}" for bound in between.met)
        pairs.append((low if low == high else low[:-1], high))
    return ["" if low == high else f"{low}-{high}" for low, high in pairs]


def _bars(console: Console, answer: WhatIf) -> None:
    runs = [("unchanged", answer.unchanged), *((run.changes, run) for run in answer.runs)]
    by_objective = answer.unchanged.met is not None and any((run.met or 0.0) < 1 for _, run in runs)
    values = [(run.good_s or 0.0) if by_objective else run.tokens_s for _, run in runs]
    most, width = max(values) or 1.0, max(len(name) for name, _ in runs)
    console.print("requests within the objective a second" if by_objective else "tokens a second", style="bold")
    for (name, _), value in zip(runs, values):
        console.print(f"  {name:<{width}}  {'█' * round(BAR_WIDTH * value / most)} {value:.1f}", soft_wrap=True)
