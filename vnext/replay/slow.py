"""slow: what clients of a log felt worst: the latest first tokens, the longest waits for another token, the slowest steps.

Owns where an inquiry begins; `req` and `show` go on from the numbers that it names. Times are those of the stamps beside
the log's segments, and steps where there are none (times.py).
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable

import msgspec
from rich.console import Console

from vnext.replay import render
from vnext.replay.folding import Broken, Folded, first_state, fold
from vnext.replay.source import Log, UnusableLog, open_log
from vnext.replay.times import Clock, stamps_of
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned
from vnext.state.outputs import outputs
from vnext.state.state import Flight, State

TOP_MAX = 1_000
BEFORE = -1


class First(msgspec.Struct, frozen=True, kw_only=True):
    """A request's first token: `ms` after its arrival in step `arrived_step`, sampled by `step`; it has waited in the
    queue up to `admitted_step`. `prompt` tokens, of which the cache had `cached`."""

    ms: float
    id: int
    arrived_step: int
    admitted_step: int
    step: int
    prompt: int
    cached: int


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Two tokens of one request, `ms` apart, sampled by steps `last_step` and `step`, and how often it gave way between:
    the longest of the `requests` that `step` gave another token. `tokens` is the most that a step in between computed."""

    ms: float
    id: int
    last_step: int
    step: int
    preempted: int
    tokens: int
    requests: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step: `ms` from its plan, or the commit before if that came later, to its commit; what it computed; for which
    request most (`most_id`, `most_tokens`)."""

    ms: float
    step: int
    tokens: int
    requests: int
    most_id: int
    most_tokens: int


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """The worst of each kind, worst first, of `counts` (first tokens, gaps, steps) in all, and the medians of all in ms.

    `clock` is "stamps", or "steps" where the log has no times: a step is a millisecond then. `ended` as in `trace`.
    """

    firsts: list[First]
    gaps: list[Gap]
    steps: list[Step]
    counts: tuple[int, int, int]
    medians: tuple[float, float, float]
    clock: str
    ended: str


class _Living(msgspec.Struct):
    """A request as far as it has come. `arrived_step` is -1 if it lives where the log begins: its first token here may be
    another one."""

    arrived_us: float
    arrived_step: int
    prompt: int
    admitted_step: int = -1
    cached: int = 0
    last_us: float = -1.0
    last_step: int = -1
    preempted: int = 0


class _Worst:
    """The longest of what comes, and all times. Mutable."""

    def __init__(self, top: int) -> None:
        self._top, self._heap = top, []
        self.times: list[float] = []

    def meet(self, ms: float, made: Callable[[], msgspec.Struct]) -> None:
        """`made` makes the entry, if this is one of the longest; of equal ones the first is told."""
        self.times.append(ms)
        key = (ms, -len(self.times))
        if len(self._heap) < self._top:
            heapq.heappush(self._heap, (key, made()))
        elif key > self._heap[0][0]:
            heapq.heapreplace(self._heap, (key, made()))

    def entries(self) -> list:
        return [entry for _, entry in sorted(self._heap, key=lambda pair: pair[0], reverse=True)]

    def median(self) -> float:
        return sorted(self.times)[len(self.times) // 2] if self.times else 0.0


class _Seeking:
    """The search while the log is folded. Mutable."""

    def __init__(self, clock: Clock, top: int, first: State) -> None:
        self._clock = clock
        self._living = {id_: _Living(0.0, BEFORE, 0) for id_, _ in first.requests.items()}
        self._planned_us: dict[int, float] = {}
        self._tokens: list[int] = []
        self._first_step = -1
        self._last_us = 0.0
        self.firsts, self.gaps, self.steps = (_Worst(top) for _ in range(3))

    def hear(self, item: Folded) -> None:
        event, now_us = item.event, self._clock.of(item.number, item.before.committed)
        match event:
            case RequestArrived():
                self._living[event.id] = _Living(now_us, item.before.planned, len(event.prompt) // 4)
            case StepPlanned():
                self._planned(item, event, now_us)
            case StepCommitted():
                self._committed(item, event, now_us)

    def _planned(self, item: Folded, event: StepPlanned, now_us: float) -> None:
        flight = item.after.flights[-1]
        if self._first_step < 0:
            self._first_step = event.step
        self._planned_us[event.step] = now_us
        self._tokens.append(flight.tokens)
        for row in event.preempted:
            if (living := self._living.get(int(item.before.rows.id[row]))) is not None:
                living.preempted += 1
        if event.admitted:
            came = len(item.before.rows) - len(event.preempted)
            for id_ in item.after.rows.id[came:].tolist():
                living = self._living.get(id_)
                if living is not None and living.admitted_step < 0:
                    living.admitted_step = event.step
                    living.cached = int(flight.starts[flight.ids == id_][0])

    def _committed(self, item: Folded, event: StepCommitted, now_us: float) -> None:
        flight = item.before.flights[0]
        self._step(flight, now_us)
        waited: list[tuple[float, int]] = []
        news = outputs(item.before, event, item.after)
        for told in news:
            if told.sample >= 0 and (living := self._living.get(told.id)) is not None:
                if living.last_us < 0 and living.arrived_step != BEFORE:
                    self._first(told.id, living, event.step, now_us)
                elif living.last_us >= 0:
                    waited.append((now_us - living.last_us, told.id))
        if waited:
            self._gap(waited, event.step)
        for told in news:
            self._told(told.id, bool(told.finish), event.step, now_us)

    def _step(self, flight: Flight, now_us: float) -> None:
        began_us = self._planned_us.pop(flight.step, None)
        if began_us is None:
            return  # planned before the log begins
        ms, self._last_us = (now_us - max(began_us, self._last_us)) / 1e3, now_us
        most = int(flight.counts.argmax())
        self.steps.meet(ms, lambda: Step(
            ms=ms, step=flight.step, tokens=flight.tokens, requests=len(flight.ids), most_id=int(flight.ids[most]),
            most_tokens=int(flight.counts[most]),
        ))  # fmt: skip

    def _first(self, id_: int, living: _Living, step: int, now_us: float) -> None:
        ms = (now_us - living.arrived_us) / 1e3
        self.firsts.meet(ms, lambda: First(
            ms=ms, id=id_, arrived_step=living.arrived_step, admitted_step=living.admitted_step, step=step,
            prompt=living.prompt, cached=living.cached,
        ))  # fmt: skip

    def _gap(self, waited: list[tuple[float, int]], step: int) -> None:
        """The longest wait of those that this step has ended, the others only counted."""
        longest = max(range(len(waited)), key=lambda place: waited[place][0])
        us, id_ = waited.pop(longest)
        living = self._living[id_]
        self.gaps.times += [each / 1e3 for each, _ in waited]
        self.gaps.meet(us / 1e3, lambda: Gap(
            ms=us / 1e3, id=id_, last_step=living.last_step, step=step, preempted=living.preempted,
            tokens=self._most_tokens(living.last_step + 1, step), requests=len(waited) + 1,
        ))  # fmt: skip

    def _told(self, id_: int, finished: bool, step: int, now_us: float) -> None:
        if finished:
            self._living.pop(id_, None)
        elif (living := self._living.get(id_)) is not None:
            living.last_us, living.last_step, living.preempted = now_us, step, 0

    def _most_tokens(self, first: int, last: int) -> int:
        """The most tokens of a step among these."""
        return max(self._tokens[max(0, first - self._first_step) : last + 1 - self._first_step], default=0)


def slow(log: Log, top: int) -> Slow:
    """The `top` worst of each kind."""
    clock, ended = Clock(stamps_of(log)), "complete"
    seeking = _Seeking(clock, top, first_state(log))
    for item in fold(log):
        if isinstance(item, Folded):
            seeking.hear(item)
        elif isinstance(item, Broken):
            ended = item.message
    kinds = (seeking.firsts, seeking.gaps, seeking.steps)
    return Slow(
        firsts=seeking.firsts.entries(), gaps=seeking.gaps.entries(), steps=seeking.steps.entries(),
        counts=tuple(len(kind.times) for kind in kinds), medians=tuple(kind.median() for kind in kinds),
        clock="stamps" if clock.stamped else "steps", ended=ended,
    )  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`slow` among the commands."""
    seeking = command(
        "slow", run, "what was felt worst: latest first tokens, longest waits for a token, slowest steps",
        "Where to begin: `req` goes on with a request, `show` with a step. Exit code 1: the log could not be folded to its end.",
    )  # fmt: skip
    seeking.add_argument("--top", type=int, default=5, help="how many of each (default 5)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 the whole log, 1 up to where it breaks."""
    if not 1 <= arguments.top <= TOP_MAX:
        raise UnusableLog(f"--top {arguments.top}: it must lie between 1 and {TOP_MAX}")
    answer = slow(open_log(arguments.log), arguments.top)
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_slow(console, answer)
    return int(answer.ended != "complete")


def print_slow(console: Console, answer: Slow) -> None:
    """Three tables, each with the median that its worst are to be compared with."""
    first, gap, step = (f"{count:,} in all, median {ms:,.1f} ms" for count, ms in zip(answer.counts, answer.medians))
    render.records(console, "latest first tokens", ("ms", "request", "arrived", "admitted", "first token", "prompt", "cached"), [
        {"ms": f"{each.ms:,.1f}", "request": f"{each.id}", "arrived": f"before step {each.arrived_step}",
         "admitted": f"step {each.admitted_step}", "first token": f"step {each.step}", "prompt": f"{each.prompt:,}",
         "cached": f"{each.cached:,}"} for each in answer.firsts
    ])  # fmt: skip
    console.print(first, style="dim")
    render.records(console, "longest waits for a token", ("ms", "request", "steps", "gave way", "largest step", "requests"), [
        {"ms": f"{each.ms:,.1f}", "request": f"{each.id}", "steps": f"{each.last_step} to {each.step}",
         "gave way": f"{each.preempted}", "largest step": render.counted(each.tokens, "token"),
         "requests": f"{each.requests}"} for each in answer.gaps
    ])  # fmt: skip
    console.print(gap, style="dim")
    render.records(console, "slowest steps", ("ms", "step", "tokens", "requests", "most for"), [
        {"ms": f"{each.ms:,.1f}", "step": f"{each.step}", "tokens": f"{each.tokens:,}", "requests": f"{each.requests}",
         "most for": f"request {each.most_id}, {render.counted(each.most_tokens, 'token')}"} for each in answer.steps
    ])  # fmt: skip
    console.print(step, style="dim")
    if answer.clock == "steps":
        console.print("the log has no times: a step is taken as a millisecond")
    if answer.ended != "complete":
        console.print(f"up to where it breaks: {render.printable(answer.ended)}", style="bold red", soft_wrap=True)
