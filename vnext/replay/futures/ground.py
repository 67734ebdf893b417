"""Ground: what hypothetical runs stand on: a log by its times, the model of its steps, and the machine's pace.

Owns single runs and their figures, in this process or in others. auto.py and what_if.py say which to make.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from vnext.replay.console.commands import in_processes
from vnext.replay.futures.auto import WEIGHT, Changes
from vnext.replay.futures.recording import Prompts, Recorded, kinds_of, on_times_of, overheads_of, recorded
from vnext.replay.futures.step_times import Drawn, Model, Pace, fit, of_kinds, stretches
from vnext.replay.futures.what_if_run import StepTime, rerun
from vnext.replay.futures.what_if_score import RunScore, score
from vnext.replay.reading.objective import Objective
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.sched.policies import PolicyError, policy_of
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived
from vnext.state.reduce import start
from vnext.state.state import StepInFlight

Arrival = TypeVar("Arrival", bound=AnyEvent)


class Trial(msgspec.Struct, frozen=True):
    """One run to make: the changes, the seed of its hiccups (0: those of the log), and which of the logs."""

    changes: Changes
    seed: int
    log: int = 0


class Ground(msgspec.Struct, frozen=True):
    """The common basis of all runs: the log by its times, the model of its steps, and the machine's pace."""

    started: EngineStarted
    taken: Recorded
    model: Model
    pace: Pace

    def score(self, trial: Trial, objective: Objective) -> RunScore:
        clock = self.redrawn(trial.seed) if trial.seed else timed(self.model, self.taken, self.pace)
        ran = rerun(weighed(self.taken, trial.changes), self.started, changed(self.started, trial.changes), clock)
        return score(words(trial.changes), ran, objective)

    def redrawn(self, seed: int) -> StepTime:
        """The clock of a machine that meets this one's hiccups in other stretches, and the model that its log would give: of the
        same steps, so that rare ones stay, each off by as much as a drawn one of its kind."""
        taken, predicted_us = self.taken, self.model.predict(self.taken.features)
        waited, begins = kinds_of(taken.begins, taken.began_us, taken.ends_us)
        kinds, took_us = 2 * waited + begins, taken.ends_us - taken.began_us
        places = stretches(len(kinds), seed)
        like = of_kinds(kinds, places)
        try:
            model = fit(taken.features, predicted_us * (taken.step_us / predicted_us)[like], taken.began_us)
        except UnusableLog:  # it has drawn too few steps with a time
            model = self.model
        overhead_us = overheads_of((waited, begins), (took_us - taken.step_us)[like])
        hiccups = Drawn(kinds[places], took_us[places], usual_us(self.model, taken)[places])
        return timed(model, msgspec.structs.replace(taken, overhead_us=overhead_us), hiccups)


def ground_of(log: Log, times_of: Path | None = None) -> Ground:
    """The model and the pace of a log; `times_of` names another log to take them from. Raises UnusableLog if that has
    no times."""
    taken = recorded(log) if times_of is None else on_times_of(log, recorded(open_log(times_of)))
    model = fit(taken.features, taken.step_us, taken.began_us)
    return Ground(log.header.started, taken, model, Pace(taken.began_us, taken.ends_us, usual_us(model, taken)))


def usual_us(model: Model, taken: Recorded) -> np.ndarray:
    """The usual time of each step of a log and its turn (float64[n])."""
    usual: np.ndarray = model.predict(taken.features) + taken.overhead_us[kinds_of(taken.begins, taken.began_us, taken.ends_us)]
    return usual


def timed(model: Model, taken: Recorded, pace: Pace | Drawn) -> StepTime:
    """The clock of one run: the usual time of a step and its turn, at the machine's pace."""
    prompts, step_us, overhead_us = Prompts(), model.single(), taken.overhead_us.ravel().tolist()

    def end_us(scheduled: StepInFlight, begin_us: float, had_waited: bool) -> float:
        kind = 2 * had_waited + prompts.begin(scheduled.ids, scheduled.tokens)
        return pace.end_us(begin_us, step_us(scheduled) + overhead_us[kind], kind)

    return end_us


def changed(started: EngineStarted, changes: Changes) -> SchedulerConfig:
    """The log's configuration with changes. Raises UnusableLog if it cannot work."""
    config = msgspec.structs.replace(started.config, **{name: value for name, value in changes if not name.startswith(WEIGHT)})
    try:
        policy_of(config.policy)
        start(msgspec.structs.replace(started, config=config))
    except (IllegalEvent, PolicyError) as error:
        raise UnusableLog(f"{words(changes)} cannot work: {error}") from error
    return config


def weighed(taken: Recorded, changes: Changes) -> Recorded:
    """The log with the weights that changes give to clients. Raises UnusableLog for a client that is not there."""
    given = {name.removeprefix(WEIGHT): value for name, value in changes if name.startswith(WEIGHT)}
    if not given:
        return taken
    found = set[str]()

    def with_weight(event: Arrival) -> Arrival:
        own = [each for each in given if isinstance(event, RequestArrived) and f"{event.client:016x}".startswith(each)]
        found.update(own)
        return msgspec.structs.replace(event, weight=given[own[0]]) if own else event

    outside = [msgspec.structs.replace(each, event=with_weight(each.event)) for each in taken.outside]
    lives = [msgspec.structs.replace(each, arrival=with_weight(each.arrival)) for each in taken.lives]
    if lacks := sorted(given.keys() - found):
        raise UnusableLog(f"{WEIGHT}{lacks[0]} is of no client of this log: `vnext-replay clients` has their numbers")
    return msgspec.structs.replace(taken, outside=outside, lives=lives)


def words(changes: Changes) -> str:
    return " ".join(f"{name}={value}" for name, value in changes)


# ---- runs in other processes -------------------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True):
    """A log, and the one that step times are learnt from, if that is another."""

    log: Path
    times_of: Path | None = None

    def ground(self) -> Ground:
        return ground_of(open_log(self.log), self.times_of)


class Runs:
    """Runs on some logs, each made once. Close it. Mutable."""

    def __init__(self, sources: Sequence[Source], objective: Objective, jobs: int = 1) -> None:
        self.objective, self._found = objective, dict[Trial, RunScore]()
        self.grounds = [source.ground() for source in sources]
        # workers read and fit the logs themselves, with the same result, while this process does other things
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, spawn, _open, (tuple(sources), objective)) if jobs > 1 else None

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def scores(self, trials: Sequence[Trial]) -> list[RunScore]:
        """What these runs give, in order."""
        missing = [trial for trial in dict.fromkeys(trials) if trial not in self._found]
        if self._pool is None:
            self._found.update(zip(missing, map(self._here, missing)))
        elif missing:
            self._found.update(zip(missing, in_processes(self._pool, _there, missing)))
        return [self._found[trial] for trial in trials]

    def _here(self, trial: Trial) -> RunScore:
        return self.grounds[trial.log].score(trial, self.objective)


_opened: list[tuple[list[Ground], Objective]] = []
"""Of a worker."""


def _open(sources: Sequence[Source], objective: Objective) -> None:
    _opened.append(([source.ground() for source in sources], objective))


def _there(trial: Trial) -> RunScore:
    grounds, objective = _opened[0]
    return grounds[trial.log].score(trial, objective)
