"""watch: checks a live log frame by frame while it grows.

Owns the alarms: a broken law, a decision or digest that differs from the engine's, an engine that is stuck,
and a log that is damaged, or silent while a step should end; and how a webhook hears of one. Watching decides every
step again, so it needs about as much processor time as the engine core, in a separate process with a separate priority.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.base.spelling import reason
from vnext.log import codec
from vnext.log.codec import Frame, SegmentStart
from vnext.replay.console import render
from vnext.replay.console.commands import print_answer
from vnext.replay.console.ended import Ended
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.tail import Damaged, Tail, is_kept, newest_log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.verify import load_difference, plan_difference, why_not_decided
from vnext.sched.policies import PATIENCE, PolicyError, is_built_in
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import AdapterEvicted, AdapterLoaded, AnyEvent, EngineRecovered, plan_of
from vnext.state.facilities.adapters import may_run
from vnext.state.laws import check, check_cheap
from vnext.state.reduce import reduce
from vnext.state.state import State

ALL_LAWS_FRAMES = 64
"""Frames between two checks of all laws; the cheap ones are checked after every frame."""
POLL_S = 0.1
TOLD_EVERY_S = 5.0
WEBHOOK_S = 10.0


ASKS = {
    "damaged": "verify", "gap": "verify", "digest": "verify", "decision": "verify", "silent": "show", "stuck": "show",
}  # fmt: skip
"""The command that says more of an alarm; of others, a smaller log does."""
INTERRUPTED = Ended(kind="complete", line="not yet: it was followed until Ctrl-C")


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: "law M1", "decision", "digest", "event", "gap", "stuck", "silent" or "damaged". `step` is the last
    planned."""

    kind: str
    step: int
    event: int
    message: str


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen until the end or the first alarm. `closed`: the engine has closed its log, which will not grow; `written`
    is when it last wrote, "" if the log has no times."""

    log: str
    frames: int
    events: int
    steps: int
    running: int
    waiting: int
    alarm: Alarm | None
    closed: bool = False
    written: str = ""


class Watcher:
    """Checks one engine. Mutable: pass it every item of its log in order; `alarm` is the first problem. `closed`: the last item
    was the frame with which an engine closes its log."""

    def __init__(self, log: Log, all_laws: bool = False) -> None:
        self.state: State = first_state(log)
        self.alarm: Alarm | None = None
        self.frames = self.events = self.steps = 0
        self.closed, self._closes = False, log.header.closes
        self._chain = log.chain
        self._all_laws, self._decides = all_laws, not why_not_decided(log)
        self._stuck = StuckDetector()

    def take(self, item: SegmentStart | Frame) -> Alarm | None:
        """Check one more item. Returns the alarm if there is a problem; later items are ignored."""
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
        self._chain = codec.chained(self._chain, digest(self.state), frame.body)
        if self._chain != frame.digest:
            self.raise_alarm("digest", "the state after this frame is not what the engine had")
        self.closed = self._closes and codec.is_closing(frame)
        if why := self._stuck.frame(frame, self.state):
            self.raise_alarm("stuck", why)

    def _event(self, event: AnyEvent) -> None:
        if (plan := plan_of(event)) is not None and self._decides:
            try:
                if difference := plan_difference(self.state, plan):
                    message = f"step {plan.step} has {difference[0]} {difference[1]} where the scheduler decides {difference[2]}"
                    self.alarm = Alarm(kind="decision", step=plan.step, event=self.state.sequence, message=message)
            except PolicyError as error:
                self.raise_alarm("decision", str(error))
        if isinstance(event, AdapterLoaded | AdapterEvicted) and self._decides:
            if difference := load_difference(self.state, event):
                self.raise_alarm("decision", f"of adapters {difference[1]} where the scheduler decides {difference[2]}")
        try:
            self.state = reduce(self.state, event)
        except IllegalEvent as error:
            self.raise_alarm("event", f"{type(event).__name__} may not happen: {error}")
            return
        except LawBroken as error:
            self.raise_alarm(f"law {error.law}", str(error))
            return
        self.events += 1
        self.steps += plan is not None
        if why := self._stuck.event(event, self.state):
            self.raise_alarm("stuck", why)

    def _require(self, laws: Callable[[State], None]) -> None:
        try:
            laws(self.state)
        except LawBroken as error:
            self.raise_alarm(f"law {error.law}", str(error))

    def raise_alarm(self, kind: str, message: str) -> None:
        """Record an alarm; only the first counts."""
        step, event = self.state.planned - 1, self.state.sequence - 1
        self.alarm = self.alarm or Alarm(kind=kind, step=step, event=event, message=message)

    def watched(self, log: Path) -> Watched:
        state = self.state
        return Watched(
            log=str(log), frames=self.frames, events=self.events, steps=self.steps, running=len(state.rows),
            waiting=len(state.waiting), alarm=self.alarm, closed=self.closed, written=_written(log) if self.closed else "",
        )  # fmt: skip


def _written(path: Path) -> str:
    """When a log was last written; "" if it has no times."""
    found = timestamps_of(open_log(path))
    return "" if found is None else render.moment(int(found.times_ns[-1]) + found.wall_minus_monotonic_ns)


def follow(
    tail: Tail,
    watcher: Watcher,
    silent_s: float,
    once: bool,
    goes_on: Callable[[Watcher, float], bool],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Watch until an alarm, until the engine has closed the log, with `once` until the current end of the log, or until `goes_on`,
    which hears now and then for how many seconds nothing was written, says no. A step may take `silent_s` seconds."""
    heard_s = written_s = reported_s = now()
    while watcher.alarm is None:
        frames = watcher.frames
        try:
            for item in tail.news():
                if watcher.take(item) is not None:
                    return
        except Damaged as error:
            watcher.raise_alarm("damaged", str(error))
            return
        if once or watcher.closed:
            return
        time_s = now()
        written_s = time_s if watcher.frames != frames else written_s
        if watcher.frames != frames or not watcher.state.requests:
            heard_s = time_s
        elif time_s - heard_s > silent_s:
            live = len(watcher.state.requests)
            watcher.raise_alarm("silent", f"{live} requests live and nothing was written for {silent_s:g} s: a step hangs")
            return
        if time_s - reported_s > TOLD_EVERY_S:
            reported_s = time_s
            if not goes_on(watcher, time_s - written_s):
                return
        sleep(POLL_S)


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    watching = command(
        "watch", run, "follow a live log and raise an alarm when a law breaks or the engine is stuck",
        "Ends with an alarm (exit code 1), where the engine closes its log, or on Ctrl-C (0). With --live, LOG is the folder of "
        "all starts' logs.",
    )  # fmt: skip
    watching.add_argument("--live", action="store_true", help="follow the newest log in the folder LOG")
    watching.add_argument("--wait", action="store_true", help="with --live: go on with the next start's log")
    watching.add_argument("--whole", action="store_true", help="begin at the start of the log, not at its newest segment")
    watching.add_argument("--once", action="store_true", help="stop at the current end of the log")
    watching.add_argument("--laws", action="store_true", help="check all laws after every frame (slower)")
    watching.add_argument("--webhook", metavar="URL", default="", help="where to POST an alarm as JSON (its text is in `text`)")
    watching.add_argument("--silent", type=float, default=60.0, help="seconds without growth before an alarm (default 60)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0 if nothing was wrong, 1 after an alarm."""
    if not arguments.silent > 0:
        raise UnusableLog(f"--silent {arguments.silent:g}: it must be more than 0 seconds")
    if arguments.webhook and not arguments.webhook.startswith(("http://", "https://")):
        raise UnusableLog(f"--webhook {arguments.webhook}: it must begin with http:// or https://")
    if arguments.wait and (arguments.once or not arguments.live):
        raise UnusableLog("--wait goes on with the next log of a folder: give --live too, and no --once")
    folder = arguments.log if arguments.live else None
    while True:
        arguments.log = newest_log(folder) if folder else arguments.log
        answer = _watched(arguments, console, folder)
        if not arguments.wait or answer.alarm is not None or getattr(arguments, "ended", None) is INTERRUPTED:
            break
        if not arguments.json:
            print_watched(console, answer)
        if folder is None or not _next_began(folder, arguments.log):
            arguments.ended = INTERRUPTED
            break
    print_answer(arguments, console, answer, print_watched)
    if answer.alarm is not None and arguments.webhook and (failed := posted(arguments.webhook, answer.log, answer.alarm)):
        print(f"vnext-replay: the alarm did not reach {arguments.webhook} ({failed})", file=sys.stderr)
    return int(answer.alarm is not None)


def _watched(arguments: argparse.Namespace, console: Console, folder: Path | None) -> Watched:
    path: Path = arguments.log
    tail = Tail(path, arguments.whole)
    watcher = Watcher(tail.log, arguments.laws)

    def goes_on(watcher: Watcher, quiet_s: float) -> bool:
        kept = quiet_s < TOLD_EVERY_S or is_kept(path)
        if not arguments.json:
            print_progress(console, watcher.watched(path), quiet_s, kept)
        return kept or folder is None or _next(folder, path) == path

    try:
        follow(tail, watcher, arguments.silent, arguments.once, goes_on)
    except KeyboardInterrupt:  # how a user stops it
        arguments.ended = INTERRUPTED
    return watcher.watched(path)


def _next(folder: Path, path: Path) -> Path:
    """The log of the latest start in a folder: names sort by time."""
    return max((found.parent for found in folder.glob(f"*/*{codec.SEGMENT_SUFFIX}")), key=lambda log: log.name, default=path)


def _next_began(folder: Path, path: Path) -> bool:
    """Wait until a later start writes a log; False after Ctrl-C."""
    try:
        while _next(folder, path) == path:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return False
    return True


def posted(url: str, log: str, alarm: Alarm) -> str:
    """Send an alarm as JSON. Returns why it may not have arrived, "" if it was accepted."""
    body = msgspec.json.encode({"text": f"{log}: {_reported(alarm)}", "log": log, "alarm": alarm})
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "vnext-replay"})
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_S):
            return ""
    except (OSError, ValueError, HTTPException) as error:  # ValueError: a port that is no number
        return reason(error, with_file=True)


def print_progress(console: Console, answer: Watched, quiet_s: float = 0.0, kept: bool = True) -> None:
    """Print one line of progress. `kept`: the log's engine lives, as far as this machine knows."""
    line = f"{render.counted(answer.steps, 'step')}, {answer.running} running, {answer.waiting} waiting: all is well"
    quiet = f", and nothing was written for {quiet_s:.0f} s" if quiet_s >= TOLD_EVERY_S else ""
    console.print(line + quiet + ("" if kept else "; no engine of this machine has this log open"), soft_wrap=True)


def print_watched(console: Console, answer: Watched) -> None:
    if answer.alarm is None:
        print_progress(console, answer)
        if answer.closed:
            left = answer.running + answer.waiting
            unfinished = f" with {render.counted(left, 'request')} unfinished" if left else ""
            written = f"; it last wrote at {answer.written}" if answer.written else ""
            console.print(f"the engine has closed this log{unfinished}{written}", soft_wrap=True)
        return
    console.print(_reported(answer.alarm), style="bold red", soft_wrap=True)
    console.print(f"ask vnext-replay {ASKS.get(answer.alarm.kind, 'shrink')} {answer.log}", soft_wrap=True)


def _reported(alarm: Alarm) -> str:
    return f"{alarm.kind} at step {alarm.step}, event {alarm.event}: {render.printable(alarm.message)}"


# ---- an engine that is stuck -------------------------------------------------------------------------------------
# Detects an engine that is alive but makes no progress, from its events alone.
#
# Owns three signs. A healthy engine never shows any of them, whatever its policy and however small its cache:
#     idle        requests live, nothing runs, and nothing is planned in IDLE_FRAMES frames in a row
#     livelock    since the last reported token, steps have computed everything that lives PATIENCE + 2 times over
#     law S6      the scheduler itself decides to do nothing although something could be computed
#
# A fourth sign needs a clock and belongs to watch: a log that stops growing while requests live.


IDLE_FRAMES = 3


class StuckDetector:
    """One engine's signs. Mutable: pass it every event with the state after it, and the end of every frame."""

    def __init__(self) -> None:
        self._idle_frames = 0
        self._reported = -1
        self._computed = 0
        self._recovers = False

    def event(self, event: AnyEvent, after: State) -> str:
        """Why the engine is stuck after this event, "" if it is not."""
        counters = after.counters
        progress = counters.generated_tokens + counters.aborted + after.next_id
        if progress != self._reported:
            self._reported, self._computed = progress, 0
        if isinstance(event, EngineRecovered):
            self._recovers, self._computed = True, 0
        if plan_of(event) is None:
            return ""
        self._recovers = False
        self._computed += after.in_flight[-1].tokens
        in_flight = after.config.max_num_batched_tokens * (after.config.pipeline_depth + 1)
        if self._computed <= in_flight:
            return ""
        alive = int((after.rows.known + after.rows.placeholders).sum()) + sum(entry.known for entry in after.waiting)
        if self._computed > (PATIENCE + 2) * alive + in_flight:
            return f"livelock: {self._computed} tokens were computed since anybody was told one, of {alive} that live"
        return ""

    def frame(self, frame: Frame, after: State) -> str:
        """Why the engine is stuck after this frame, "" if it is not."""
        if any(plan_of(event) is not None for event in frame.events) or not after.requests or after.in_flight:
            self._idle_frames = 0
            return ""
        if self._recovers or after.paused or _awaits_adapter(after):  # ranks that start plan nothing
            return ""
        if _decides_nothing(after):
            return f"law S6: {len(after.requests)} requests live, nothing runs, and the decision is to do nothing"
        self._idle_frames += 1
        if self._idle_frames < IDLE_FRAMES:
            return ""
        return f"idle: {len(after.requests)} requests live, nothing runs, and {IDLE_FRAMES} frames in a row plan nothing"


def _awaits_adapter(state: State) -> bool:
    """Whether nothing runs and a request waits for an adapter that no slot holds: ranks read it, which may take frames."""
    return bool(state.slots) and not len(state.rows) and not all(may_run(state, entry.id) for entry in state.waiting)


def _decides_nothing(state: State) -> bool:
    """Whether the scheduler plans nothing. False if the policy is the engine's own: reading a log must not import it."""
    return is_built_in(state.config.policy) and schedule(state) is None
