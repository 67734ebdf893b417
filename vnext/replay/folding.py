"""Folding a log: every event with its number, the state before it and the state after it.

Owns the walk that `verify`, `show` and `req` share. A gap or an event that the reducer refuses ends it as a Broken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from vnext.replay.source import Log, UnusableLog
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, StepPlanned
from vnext.state.keyframe import BadKeyframe, decode, load
from vnext.state.log import Frame, LogEnd, SegmentStart
from vnext.state.log_read import Item
from vnext.state.reduce import reduce, start
from vnext.state.state import State

BLOCK_COUNT_MAX = 1 << 24
IMPOSSIBLE = (IllegalEvent, ArithmeticError, ValueError, TypeError, LookupError, MemoryError, struct.error)
"""What folding an event may raise that no engine has ever folded: numbers of a file that nobody has checked."""


class Folded(msgspec.Struct, frozen=True, gc=False):
    """One event at its place."""

    number: int
    event: AnyEvent
    before: State
    after: State


class FrameFolded(msgspec.Struct, frozen=True, gc=False):
    """All events of a frame are folded; `state` is the state that its digest covers."""

    frame: Frame
    state: State


class Planning(msgspec.Struct, frozen=True, gc=False):
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


class SegmentFolded(msgspec.Struct, frozen=True):
    """All segments before this one are folded; `state` is where that has led."""

    start: SegmentStart
    state: State


Fold = SegmentFolded | Planning | Folded | FrameFolded | Broken | LogEnd


def fold(log: Log) -> Iterator[Fold]:
    """The whole log, ending with a LogEnd or a Broken. UnusableLog if it begins with neither start nor keyframe."""
    return fold_items(first_state(log), log.items())


def fold_items(state: State, items: Iterable[Item]) -> Iterator[Fold]:
    """What of a log comes after `state`."""
    for item in items:
        if not isinstance(item, Frame):
            yield SegmentFolded(item, state) if isinstance(item, SegmentStart) else item
            continue
        if item.first_event != state.sequence:
            yield _gap(item, state)
            return
        for number, event in enumerate(item.events, item.first_event):
            if type(event) is StepPlanned:
                yield Planning(number, event, state)
            try:
                after = reduce(state, event)
            except IMPOSSIBLE as error:
                yield Broken(number, "event", f"the reducer refuses {type(event).__name__}: {error}", state)
                return
            yield Folded(number, event, state, after)
            state = after
        yield FrameFolded(item, state)


def first_state(log: Log) -> State:
    """The state in which the log begins: after event 0, or its first segment's keyframe. UnusableLog if it has none."""
    header, path = log.header, log.paths[0]
    if header.index and not header.keyframe:
        raise UnusableLog(
            f"{path} starts at event {header.first_event}, without a keyframe and not at the engine's start: "
            "give the directory that holds all its segments"
        )
    try:
        _require_modest(header.started.config, path)
        return load(decode(header.keyframe), header.started.config) if header.index else start(header.started)
    except IMPOSSIBLE as error:
        raise UnusableLog(f"{path} cannot be folded: its configuration cannot work ({error})") from error
    except BadKeyframe as error:
        raise UnusableLog(f"{path} cannot be folded: its keyframe is of no use ({error})") from error


def _require_modest(config: SchedulerConfig, path: Path) -> None:
    """A number in a file must not make us reserve all memory."""
    if config.block_count > BLOCK_COUNT_MAX:
        raise UnusableLog(
            f"{path} cannot be folded: it tells of {config.block_count:,} blocks, and no engine has more than {BLOCK_COUNT_MAX:,}"
        )


def _gap(frame: Frame, state: State) -> Broken:
    message = (
        f"{frame.lost} frames are missing before event {frame.first_event}, dropped by a failing disk: "
        "nothing after them can be replayed"
    )
    return Broken(state.sequence, "gap", message, state)
