"""gate: hold a scheduling policy, or other settings, to logs: exit 1 where one of them serves its requests worse.

Owns the verdict. For each log the same arrivals run under its own settings and under the new ones, on step times learnt from it
(what_if.py); the log's own settings must reproduce the log: the control, by which no error of the simulator counts as a change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.replay.console import render
from vnext.replay.console.commands import DIFFERENT, SAME, print_answer
from vnext.replay.futures.auto import Changes
from vnext.replay.futures.ground import changed, ground_of, timed, weighed
from vnext.replay.futures.what_if import candidates, reproduced
from vnext.replay.futures.what_if_run import Served, rerun, retrace
from vnext.replay.reading.objective import Objective, meets, objective_of
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.verify import why_not_decided


class Gated(msgspec.Struct, frozen=True, kw_only=True):
    """One log: the shares of its requests that met the objective under its own settings and the new ones, and the requests that met
    it before and do not any more: how many, and the worst one with its first token in ms before and after (-1: it was refused).
    `control` counts the events that the log's own settings do not reproduce."""

    log: str
    before: float
    after: float
    lost: int
    worst: int
    worst_ms: tuple[float, float]
    control: int

    @property
    def is_worse(self) -> bool:
        return self.after < self.before


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """The logs in the order asked for; `holds` where none is worse and each control is without an error."""

    logs: list[Gated]
    holds: bool


def gate(paths: Sequence[Path], changes: Changes, objective: Objective) -> Verdicts:
    """Hold changes to logs. Raises UnusableLog for a log that cannot be run again."""
    found = [_gated(path, changes, objective) for path in paths]
    return Verdicts(logs=found, holds=not any(each.is_worse or each.control for each in found))


def _gated(path: Path, changes: Changes, objective: Objective) -> Gated:
    log = open_log(path)
    if why_not := why_not_decided(log, own_policy=False):
        raise UnusableLog(f"the steps of {path} cannot be decided here: {why_not}")
    ground = ground_of(log)
    if ground.taken.lives:
        raise UnusableLog(f"{path} begins in mid-run: the gate needs whole logs")
    configs = ground.started.config, changed(ground.started, changes)
    logs = ground.taken, weighed(ground.taken, changes)
    runs = [
        rerun(taken, ground.started, each, timed(ground.model, taken, ground.pace)) for taken, each in zip(logs, configs)
    ]
    if runs[0].refused or runs[1].refused:
        raise UnusableLog(f"{path}: the settings refuse requests of this log")
    before, after = ([each.tokens > 0 and meets(each, objective) for each in run.served] for run in runs)
    lost = [place for place, (one, other) in enumerate(zip(before, after)) if one and not other]
    worst = max(lost, key=lambda place: _first_ms(runs[1].served[place]), default=-1)
    ms = tuple(_first_ms(run.served[worst]) for run in runs) if lost else (0.0, 0.0)
    count = max(len(before), 1)
    return Gated(
        log=str(path), before=sum(before) / count, after=sum(after) / count, lost=len(lost), worst=worst,
        worst_ms=(ms[0], ms[1]), control=len(ground.taken.events) - reproduced(ground.taken, retrace(ground.taken, ground.started)),
    )  # fmt: skip


def _first_ms(served: Served) -> float:
    return (served.first_us - served.arrived_us) / 1e3


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    asking = command(
        "gate", run, "hold a policy or settings to logs",
        "Exit code 1: a log is worse, or its own settings do not reproduce it.",
    )  # fmt: skip
    asking.add_argument("others", metavar="LOG", nargs="*", type=Path, help="more logs")
    asking.add_argument("--policy", default="", help="the scheduling policy")
    asking.add_argument("--set", metavar="K=V", action="append", default=[], help="another setting, or weight:CLIENT=3")
    asking.add_argument("--slo", required=True, metavar="ttft=200ms,itl=50ms", help="the latency objective of a request")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if no log is worse."""
    sets = [*([f"policy={arguments.policy}"] if arguments.policy else []), *arguments.set]
    if not sets:
        raise UnusableLog("name what to hold to the logs: --policy fair, --set K=V or --set weight:CLIENT=3")
    objective = objective_of(arguments.slo)
    answer = gate([arguments.log, *arguments.others], candidates(sets, [])[0], objective)
    print_answer(arguments, console, answer, print_gate)
    return SAME if answer.holds else DIFFERENT


def print_gate(console: Console, answer: Verdicts) -> None:
    """A line for each log, the worst request where it is worse, and the verdict."""
    for each in answer.logs:
        console.print(f"{each.log}: {each.before:.1%} of the requests met the objective, then {each.after:.1%}", soft_wrap=True)
        if each.control:
            console.print(f"  control: {render.counted(each.control, 'event')} of its own settings are not reproduced", style="red")
        if each.lost:
            first, then = each.worst_ms
            worst = f"request {each.worst} most, whose first token took {first:,.0f} ms and then {then:,.0f}"
            console.print(f"  {render.counted(each.lost, 'request')} met it only before, {worst}", soft_wrap=True)
    verdict = "the gate holds: no log is worse, and each control is without an error" if answer.holds else "the gate does not hold"
    console.print(verdict, style="bold green" if answer.holds else "bold red")
