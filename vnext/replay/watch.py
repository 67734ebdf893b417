"""watch: a live log, judged frame by frame while it grows.

Owns the alarms: a law that does not hold, a decision or digest that is not the engine's, an engine that is stuck
(stuck.py), a log that is damaged, or silent while a step should end. It decides everything again, so it needs about the
engine core's own processor time, in a process and at a priority of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.replay import render
from vnext.replay.folding import first_state
from vnext.replay.source import Log, UnusableLog
from vnext.replay.stuck import StuckDetector
from vnext.replay.tail import Damaged, Tail, newest_log
from vnext.replay.verify import plan_difference, why_not_decided
from vnext.sched.policies import PolicyError
from vnext.sched.schedule import schedule
from vnext.state import log as logs
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import AnyEvent, StepPlanned
from vnext.state.laws import check, check_cheap
from vnext.state.log import Frame, SegmentStart
from vnext.state.reduce import reduce
from vnext.state.state import State

ALL_LAWS_FRAMES = 64
"""Frames between two checks of all laws; the cheap ones are asked after every frame."""
POLL_S = 0.1
TOLD_EVERY_S = 5.0


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: "law M1", "decision", "digest", "event", "gap", "stuck", "silent" or "damaged". `step` is the last planned."""

    kind: str
    step: int
    event: int
    message: str


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen until the end or the first alarm."""

    log: str
    frames: int
    events: int
    steps: int
    running: int
    waiting: int
    alarm: Alarm | None


class Watcher:
    """Judges one engine. Mutable: give it every item of its log in order; `alarm` is the first thing that is wrong."""

    def __init__(self, log: Log, all_laws: bool = False) -> None:
        self.state: State = first_state(log)
        self.alarm: Alarm | None = None
        self.frames = self.events = self.steps = 0
        self._chain = log.chain
        self._all_laws, self._decides = all_laws, not why_not_decided(log)
        self._stuck = StuckDetector()

    def take(self, item: SegmentStart | Frame) -> Alarm | None:
        """One item more; the alarm if something is wrong, and nothing after it is looked at."""
        if self.alarm is None:
            if isinstance(item, SegmentStart):
                self._chain = item.chain
            else:
                self._frame(item)
        return self.alarm

    def _frame(self, frame: Frame) -> None:
        if frame.first_event != self.state.sequence:
            self.raise_alarm("gap", f"{frame.lost} frames are missing before event {frame.first_event}")
            return
        for event in frame.events:
            self._event(event)
            if self.alarm is not None:
                return
        self.frames += 1
        self._require(check if self._all_laws or self.frames % ALL_LAWS_FRAMES == 0 else check_cheap)
        self._chain = logs.chained(self._chain, digest(self.state), frame.body)
        if self._chain != frame.digest:
            self.raise_alarm("digest", "the state after this frame is not what the engine had")
        if why := self._stuck.frame(frame, self.state):
            self.raise_alarm("stuck", why)

    def _event(self, event: AnyEvent) -> None:
        if isinstance(event, StepPlanned) and self._decides:
            self._decision(event)
        try:
            self.state = reduce(self.state, event)
        except IllegalEvent as error:
            self.raise_alarm("event", f"{type(event).__name__} may not happen: {error}")
            return
        except LawBroken as error:
            self.raise_alarm(f"law {error.law}", str(error))
            return
        self.events += 1
        self.steps += isinstance(event, StepPlanned)
        if why := self._stuck.event(event, self.state):
            self.raise_alarm("stuck", why)

    def _decision(self, event: StepPlanned) -> None:
        try:
            decided = schedule(self.state)
        except PolicyError as error:
            self.raise_alarm("decision", str(error))
            return
        if decided != event:
            field, was, due = plan_difference(event, decided)
            message = f"step {event.step} has {field} {was} where the scheduler decides {due}"
            self.alarm = Alarm(kind="decision", step=event.step, event=self.state.sequence, message=message)

    def _require(self, laws: Callable[[State], None]) -> None:
        try:
            laws(self.state)
        except LawBroken as error:
            self.raise_alarm(f"law {error.law}", str(error))

    def raise_alarm(self, kind: str, message: str) -> None:
        """Only the first one counts."""
        step, event = self.state.planned - 1, self.state.sequence - 1
        self.alarm = self.alarm or Alarm(kind=kind, step=step, event=event, message=message)

    def watched(self, log: str) -> Watched:
        state = self.state
        return Watched(
            log=log, frames=self.frames, events=self.events, steps=self.steps, running=len(state.rows),
            waiting=len(state.waiting), alarm=self.alarm,
        )  # fmt: skip


def follow(
    tail: Tail,
    watcher: Watcher,
    silent_s: float,
    once: bool,
    tell: Callable[[Watcher], None],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until an alarm; with `once` until the log's end as it is. `silent_s`: so long a step may take."""
    heard_s, told_s = now(), now()
    while watcher.alarm is None:
        frames = watcher.frames
        try:
            for item in tail.news():
                if watcher.take(item) is not None:
                    return
        except Damaged as error:
            watcher.raise_alarm("damaged", str(error))
            return
        if once:
            return
        time_s = now()
        if watcher.frames != frames or not watcher.state.requests:
            heard_s = time_s
        elif time_s - heard_s > silent_s:
            live = len(watcher.state.requests)
            watcher.raise_alarm("silent", f"{live} requests live and nothing was written for {silent_s:g} s: a step hangs")
            return
        if time_s - told_s > TOLD_EVERY_S:
            told_s = time_s
            tell(watcher)
        sleep(POLL_S)


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`watch` among the commands."""
    watching = command(
        "watch", run, "follow a live log and raise an alarm when a law breaks or the engine is stuck",
        "Ends with the first alarm (exit code 1), or when it is interrupted (0). LOG with --live is the folder that holds the "
        "logs of all starts.",
    )  # fmt: skip
    watching.add_argument("--live", action="store_true", help="the newest log in the folder LOG")
    watching.add_argument("--whole", action="store_true", help="from the log's beginning, not from its newest segment")
    watching.add_argument("--once", action="store_true", help="to the log's end as it is now, and no further")
    watching.add_argument("--laws", action="store_true", help="all laws after every frame: slower")
    watching.add_argument("--silent", type=float, default=60.0, help="seconds that a step may take (default 60)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 nothing was wrong, 1 an alarm."""
    if arguments.silent <= 0:
        raise UnusableLog(f"--silent {arguments.silent:g}: it must be more than 0 seconds")
    path: Path = newest_log(arguments.log) if arguments.live else arguments.log
    tail = Tail(path, arguments.whole)
    watcher = Watcher(tail.log, arguments.laws)

    def tell(watcher: Watcher) -> None:
        if not arguments.json:
            print_progress(console, watcher.watched(str(path)))

    try:
        follow(tail, watcher, arguments.silent, arguments.once, tell)
    except KeyboardInterrupt:
        pass  # how a person ends it
    answer = watcher.watched(str(path))
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_watched(console, answer)
    return int(answer.alarm is not None)


def print_progress(console: Console, answer: Watched) -> None:
    """One line, now and then."""
    console.print(f"{render.counted(answer.steps, 'step')}, {answer.running} running, {answer.waiting} waiting: all is well")


def print_watched(console: Console, answer: Watched) -> None:
    """The end."""
    if answer.alarm is None:
        print_progress(console, answer)
        return
    alarm = answer.alarm
    where = f"{alarm.kind} at step {alarm.step}, event {alarm.event}"
    console.print(f"{where}: {render.printable(alarm.message)}", style="bold red", soft_wrap=True)
    console.print(f"vnext-replay shrink {answer.log} makes it small", soft_wrap=True)
