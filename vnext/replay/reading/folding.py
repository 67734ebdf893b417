"""Folds a log: yields every event with its number and the states before and after it.

Owns the walk that `verify`, `show` and `req` share. A gap, or an event that the reducer rejects, ends the walk with a
Broken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from vnext.log.codec import Frame, LogEnd, SegmentStart
from vnext.log.reading import Item
from vnext.log.snapshot import BadSnapshot, decode, load
from vnext.replay.reading.source import Log, UnusableLog
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, StepPlanned, plan_of
from vnext.state.reduce import reduce, start
from vnext.state.state import State

PAGE_COUNT_MAX = 1 << 24
IMPOSSIBLE = (IllegalEvent, ArithmeticError, ValueError, TypeError, LookupError, MemoryError, struct.error)
"""Errors that folding an unchecked event may raise: a file may hold numbers that no engine has folded."""


class Folded(msgspec.Struct, frozen=True, gc=False):
    """One folded event; `frame_end` is the number of the event after its frame."""

    number: int
    event: AnyEvent
    before: State
    after: State
    frame_end: int

    @property
    def plan(self) -> StepPlanned | None:
        return plan_of(self.event)


class FrameFolded(msgspec.Struct, frozen=True, gc=False):
    """All events of a frame are folded; `state` is the state that the frame's digest covers."""

    frame: Frame
    state: State


class Planning(msgspec.Struct, frozen=True, gc=False):
    """A plan is about to be folded. A reader can decide the step again at this point."""

    number: int
    event: StepPlanned
    before: State


class Broken(msgspec.Struct, frozen=True):
    """Folding cannot continue. `field` is "gap" or "event"."""

    number: int
    field: str
    message: str
    state: State


class SegmentFolded(msgspec.Struct, frozen=True):
    """All segments before this one are folded; `state` is the result."""

    start: SegmentStart
    state: State


Fold = SegmentFolded | Planning | Folded | FrameFolded | Broken | LogEnd


def fold(log: Log) -> Iterator[Fold]:
    """Fold the whole log, ending with a LogEnd or a Broken. Raises UnusableLog if it begins with neither a start nor a
    snapshot."""
    return fold_items(first_state(log), log.items())


def fold_items(state: State, items: Iterable[Item]) -> Iterator[Fold]:
    """Fold the items that follow `state`."""
    for item in items:
        if not isinstance(item, Frame):
            assert isinstance(item, (SegmentStart, LogEnd)), "a log that is read frame by frame has no runs"
            yield SegmentFolded(item, state) if isinstance(item, SegmentStart) else item
            continue
        if item.first_event != state.sequence:
            yield Broken(state.sequence, "gap", missing(item), state)
            return
        for number, event in enumerate(item.events, item.first_event):
            if type(event) is StepPlanned:
                yield Planning(number, event, state)
            try:
                after = reduce(state, event)
            except IMPOSSIBLE as error:
                yield Broken(number, "event", refused(event, error), state)
                return
            yield Folded(number, event, state, after, item.first_event + len(item.events))
            state = after
        yield FrameFolded(item, state)


def first_state(log: Log) -> State:
    """The state in which the log begins: after event 0, or its first segment's snapshot. Raises UnusableLog if it has
    neither."""
    header, path = log.header, log.paths[0]
    if header.index and not header.snapshot:
        raise UnusableLog(
            f"{path} starts at event {header.first_event}, without a snapshot and not at the engine's start: "
            "give the directory that holds all its segments"
        )
    try:
        _require_modest(header.started.config, path)
        return load(decode(header.snapshot), header.started.config) if header.index else start(header.started)
    except IMPOSSIBLE as error:
        raise UnusableLog(f"{path} cannot be folded: its configuration cannot work ({error})") from error
    except BadSnapshot as error:
        raise UnusableLog(f"{path} cannot be folded: its snapshot is of no use ({error})") from error


def _require_modest(config: SchedulerConfig, path: Path) -> None:
    """Reject numbers in a file that would make us reserve all memory."""
    if config.page_count > PAGE_COUNT_MAX:
        raise UnusableLog(
            f"{path} cannot be folded: it tells of {config.page_count:,} blocks, and no engine has more than {PAGE_COUNT_MAX:,}"
        )


def missing(frame: Frame) -> str:
    """Describe a gap before a frame."""
    return (
        f"{frame.lost} frames are missing before event {frame.first_event}, dropped by a failing disk: "
        "nothing after them can be replayed"
    )


def refused(event: AnyEvent, error: Exception) -> str:
    return f"the reducer refuses {type(event).__name__}: {error}"
