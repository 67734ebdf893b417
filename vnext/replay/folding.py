"""Folding a log: every event with its number, the state before it and the state after it.

Owns the walk that `verify`, `show` and `req` share. A gap or an event that the reducer refuses ends it as a Broken.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vnext.replay.source import Log, UnusableLog, require_whole
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, StepPlanned
from vnext.state.log import Frame, LogEnd, SegmentStart
from vnext.state.reduce import reduce, start
from vnext.state.state import State


class Folded(msgspec.Struct, frozen=True):
    """One event at its place."""

    number: int
    event: AnyEvent
    before: State
    after: State


class FrameFolded(msgspec.Struct, frozen=True):
    """All events of a frame are folded; `state` is the state that its digest covers."""

    frame: Frame
    state: State


class Planning(msgspec.Struct, frozen=True):
    """A plan is about to be folded: the moment to decide it anew."""

    number: int
    event: StepPlanned
    before: State


class Broken(msgspec.Struct, frozen=True):
    """Folding cannot go on. `field` is "gap" or "event"."""

    number: int
    field: str
    message: str
    state: State


Fold = SegmentStart | Planning | Folded | FrameFolded | Broken | LogEnd


def fold(log: Log) -> Iterator[Fold]:
    """The whole log, ending with a LogEnd or a Broken. UnusableLog if it does not begin at the start."""
    state = first_state(log)
    for item in log.items():
        if not isinstance(item, Frame):
            yield item
            continue
        if item.lost:
            yield _gap(item, state)
            return
        for number, event in enumerate(item.events, item.first_event):
            if isinstance(event, StepPlanned):
                yield Planning(number, event, state)
            try:
                after = reduce(state, event)
            except IllegalEvent as error:
                yield Broken(number, "event", f"the reducer refuses {type(event).__name__}: {error}", state)
                return
            yield Folded(number, event, state, after)
            state = after
        yield FrameFolded(item, state)


def first_state(log: Log) -> State:
    """The state after event 0. UnusableLog if the log does not begin with it or its configuration cannot work."""
    require_whole(log)
    try:
        return start(log.header.started)
    except IllegalEvent as error:
        raise UnusableLog(f"{log.paths[0]} cannot be folded: its configuration cannot work ({error})") from error


def _gap(frame: Frame, state: State) -> Broken:
    message = (
        f"{frame.lost} frames are missing before event {frame.first_event}, dropped by a failing disk: "
        "nothing after them can be replayed"
    )
    return Broken(state.sequence, "gap", message, state)
