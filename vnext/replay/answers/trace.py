"""trace: a log as a timeline in the trace-event format of Perfetto and Chrome.

Owns the folding, which takes runs of steady frames at once (strides.py), and the command; timeline.py owns the drawing.
Times are microseconds since the first frame (times.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console

from vnext.log.reading import read
from vnext.replay.answers.timeline import Timeline, Writer
from vnext.replay.console import render
from vnext.replay.console.commands import index_of, print_answer, writing
from vnext.replay.reading.between import log_between
from vnext.replay.reading.folding import IMPOSSIBLE, Folded, first_state
from vnext.replay.reading.source import Log, contents, open_log
from vnext.replay.reading.strides import Folding, Run
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.replay.reading.verify import why_not_decided
from vnext.replay.reading.window import ALWAYS, add_window, asked_window
from vnext.state.state import State

FRAMES_MAX = 1 << 16


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """`clock` is "stamps", or "steps" if the log has no times; a step is then one millisecond. `lanes` is the largest
    number of requests alive at once. `ended` says how the log ended, or why folding stopped. `untimed` events at the
    end of a log with timestamps have no time and are not drawn. `left_out` steps, requests and phases of requests
    begin or end in a gap of the times and are not drawn either.
    """

    path: str
    trace_events: int
    steps: int
    requests: int
    lanes: int
    clock: str
    ended: str
    untimed: int
    left_out: int


class _Drawing:
    """One drawing of a log. Mutable, for one use. Events after the last known time are counted, not drawn."""

    def __init__(self, log: Log, file: IO[str], each_chunk: bool) -> None:
        self.writer, self._clock, self._log = Writer(file), Clock(timestamps_of(log)), log
        self._first = state = first_state(log)
        self.timeline = Timeline(self.writer, self._clock, state, each_chunk, why_not_decided(log))
        self._untimed, self._ended = 0, "complete"

    def draw(self) -> None:
        folding = Folding(self._first, lambda item, _: self._hear(item), lambda: self._room(folding.state))
        try:
            for _, item in folding.through((0, item) for item in read(contents(self._log.paths), steady=True)):
                if isinstance(item, Run):
                    self._run(item)
        except IMPOSSIBLE as error:
            self._ended = str(error)

    def _hear(self, item: Folded) -> None:
        if self._is_untimed(item.number):
            self._untimed += 1
        else:
            self.timeline.hear(item)

    def _is_untimed(self, number: int) -> bool:
        """Whether an event lies after the last known time."""
        return self._clock.timestamped and number >= self._clock.last_event

    def _room(self, state: State) -> int:
        """The most frames of the next run: those with known times, or all frames after them; 0 if their waits need
        reasons."""
        left = (self._clock.last_event - state.sequence) // 2 if self._clock.timestamped else FRAMES_MAX
        return FRAMES_MAX if left <= 0 else left if self.timeline.may_run(state) else 0

    def _run(self, run: Run) -> None:
        if self._is_untimed(run.first_event):
            self._untimed += 2 * run.frames
        else:
            self.timeline.meet_run(run)

    def traced(self, path: str) -> Traced:
        """The end of the file, and what was drawn."""
        finish = "alive where the times end" if self._untimed else "alive at the log's end"
        timeline, clock = self.timeline, self._clock
        timeline.close(finish)
        self.writer.close()
        return Traced(
            path=path, trace_events=self.writer.count, steps=timeline.steps, requests=timeline.requests, lanes=timeline.lanes,
            clock="stamps" if clock.timestamped else "steps", ended=self._ended, untimed=self._untimed,
            left_out=timeline.left_out,
        )  # fmt: skip


def trace(log: Log, file: IO[str], path: str, each_chunk: bool = True, more: Iterable[str] = ()) -> Traced:
    """Write the timeline of a log, as far as it can be folded, and `more` lines of others."""
    drawing = _Drawing(log, file, each_chunk)
    drawing.draw()
    for line in more:
        drawing.writer.put(line)
    return drawing.traced(path)


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    tracing = command(
        "trace", run, "write a timeline for ui.perfetto.dev or chrome://tracing",
        "It shows steps, a lane for each live request, counters of cache and batch, and why requests wait.",
    )  # fmt: skip
    add_window(tracing)
    tracing.add_argument("-o", "--out", type=Path, required=True, help="the JSON file to write")
    tracing.add_argument("--brief", action="store_true", help="omit the slices of chunks and tokens, for a smaller file")


def run(arguments: argparse.Namespace, console: Console) -> None:
    log = open_log(arguments.log)
    window = asked_window(log, arguments)
    asked = nullcontext(log) if window == ALWAYS else log_between(index_of(arguments.log), window)
    with asked as part, writing(arguments.out), arguments.out.open("w") as file:
        answer = trace(part, file, str(arguments.out), not arguments.brief)
    print_answer(arguments, console, answer, print_traced)


def print_traced(console: Console, answer: Traced) -> None:
    console.print(f"written: {answer.path}, {render.counted(answer.trace_events, 'trace event')}", style="bold", soft_wrap=True)
    steps, requests = render.counted(answer.steps, "step"), render.counted(answer.requests, "request")
    console.print(f"{steps} and {requests}, at most {answer.lanes} at once")
    if answer.clock == "steps":
        console.print("the log has no times: a step is drawn as a millisecond")
    if answer.untimed:
        console.print(f"{render.counted(answer.untimed, 'event')} at the log's end have no time, and are not drawn", style="yellow")
    if answer.left_out:
        console.print(
            f"the log's times have a hole: {render.counted(answer.left_out, 'slice')} that begin or end in it are not drawn",
            style="yellow", soft_wrap=True,
        )  # fmt: skip
