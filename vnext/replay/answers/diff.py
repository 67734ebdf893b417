"""diff: finds the first place where two logs differ, field by field.

Owns the comparison of two recordings. It folds nothing and does not judge which is right (`verify` does). It skips
equal parts as fast as possible: equal files, then equal bytes after equal chained digests, then equal frame bodies
where two chains began differently. It decodes only frames that differ. Two runs with the same events are the same,
regardless of the clock and of the frame in which a rank reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from vnext.log import codec
from vnext.log.codec import Frame, LogEnd
from vnext.log.compression import Content
from vnext.log.log_plain import FRAME_HEAD, RECORD_HEAD
from vnext.log.reading import BAD_FORM, read_frames
from vnext.replay.reading.source import Log, UnusableLog, open_log, part_of
from vnext.state.digest import hexadecimal
from vnext.state.events import AnyEvent, RequestArrived, StepCommitted, plan_of, unpack_tokens
from vnext.state.traits import line_of

CHUNK = 1 << 20
OF_THE_START = ("started_ns",)
"""Header fields that differ between any two runs and change nothing."""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field, with its value in both logs."""

    name: str
    one: str
    other: str


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """The first divergence: its `step` (-1: before the first, or unknown), the number of its `event`, and every field
    that differs. Empty `fields`: the events are the same.

    `headers` are settings that differ. `segments_equal` counts equal files; `frames_equal` counts equal frames skipped
    after them.
    """

    same: bool
    headers: list[Field]
    segments_equal: int
    frames_equal: int
    step: int
    event: int
    what: str
    fields: list[Field]


def diff(one: Log, other: Log, exact: bool = False) -> Diff:
    """Compare two logs from the first event that both have. Raises UnusableLog if they cannot be aligned.

    Arrival times differ between any two runs; they count only if `exact`.
    """
    sides = _Side(one), _Side(other)
    if one.header.first_event != other.header.first_event:
        began = f"{one.header.first_event} and {other.header.first_event}"
        raise UnusableLog(f"the logs begin at different events ({began}): cut them to the same step first")
    headers = header_fields(one, other)
    segments_equal = _skip_segments(*sides)
    found = _first_divergence(*sides, _equal if exact else _equal_but_for_time)
    step, event, what, fields = found or (-1, -1, "", [])
    return Diff(
        same=not fields and not headers, headers=headers, segments_equal=segments_equal, frames_equal=sides[0].frames,
        step=step, event=event, what=what, fields=fields,
    )  # fmt: skip


def header_fields(one: Log, other: Log) -> list[Field]:
    """The settings in which two engines differ."""
    pairs = [
        ("digest_version", one.header.digest_version, other.header.digest_version),
        *((f"config.{name}", *both) for name, both in _fields(one.header.started.config, other.header.started.config)),
        *(
            (name, *both) for name, both in _fields(one.header.started, other.header.started)
            if name not in ("config", "environment", *OF_THE_START)
        ),
        *_of_environment(one.header.started.environment, other.header.started.environment),
    ]  # fmt: skip
    return [Field(name=name, one=str(a), other=str(b)) for name, a, b in pairs if a != b]


def short(name: str) -> str:
    """A header field's name, as people know a setting."""
    return name.removeprefix("config.").removeprefix("environment.")


def _of_environment(one: dict[str, str], other: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    return ((f"environment.{name}", one.get(name, "-"), other.get(name, "-")) for name in sorted({*one, *other}))


def _fields(one: msgspec.Struct, other: msgspec.Struct) -> Iterator[tuple[str, tuple[object, object]]]:
    return ((name, (getattr(one, name), getattr(other, name))) for name in one.__struct_fields__)


# ---- two logs side by side -----------------------------------------------------------------------------------------


class _Side:
    """One log being read: `data` of the segment, `offset` of its next frame, `chain` of the frame before."""

    def __init__(self, log: Log) -> None:
        self.paths = log.paths
        self.place = -1
        self.data: bytes = b""
        self.offset = self.chain = self.frames = 0
        self.next_event = log.header.first_event
        self.end = ""
        self.last: Frame | None = None

    @property
    def at_end(self) -> bool:
        return self.offset >= len(self.data)

    def open_next(self) -> bool:
        """Go on to the next segment; False if there is none."""
        if self.place + 1 >= len(self.paths) or self.end:
            return False
        self.open(self.place + 1)
        return True

    def open(self, place: int) -> None:
        self.place = place
        self.data = part_of(self.paths[place])
        self.chain = open_log(self.paths[place]).chain
        self.offset = self.header_size()

    def header_size(self) -> int:
        return len(codec.MAGIC) + RECORD_HEAD + int.from_bytes(self.data[len(codec.MAGIC) : len(codec.MAGIC) + 4], "little")

    def record_end(self, offset: int) -> int:
        """The end of the record at `offset` by its length field; beyond the data if the record is cut off."""
        return offset + RECORD_HEAD + int.from_bytes(self.data[offset : offset + 4], "little")

    def next_frame(self) -> Frame | None:
        """The next frame, decoded; None at the end, with the reason in `end`."""
        while self.at_end:
            if not self.open_next():
                return None
        try:
            first = codec.frame_decoder.decode(self.data[self.offset + FRAME_HEAD : self.record_end(self.offset)]).first_event
        except BAD_FORM:
            first = self.next_event
        for _, item in read_frames(memoryview(self.data)[self.offset : self.record_end(self.offset)], first):
            if isinstance(item, LogEnd):
                self.end, self.offset = f"{item.kind}: {item.message}", len(self.data)
                return None
            assert isinstance(item, Frame), "frames that are not read in steady runs come one by one"
            self.offset, self.chain = self.record_end(self.offset), item.digest
            self.next_event = item.first_event + len(item.events)
            self.last = item
            return item
        return None


def _skip_segments(one: _Side, other: _Side) -> int:
    """Skip segments that are equal as files; returns their number."""
    count = min(len(one.paths), len(other.paths))
    equal = next((place for place in range(count) if not _equal_files(one.paths[place], other.paths[place])), count)
    for side in (one, other):
        if equal < count:
            side.open(equal)
        else:
            side.place = count - 1
    return equal


def _equal_files(one: Path, other: Path) -> bool:
    with one.open("rb") as a, other.open("rb") as b:
        mine, theirs = Content(a), Content(b)
        parts = range(0, mine.size, CHUNK)
        return mine.size == theirs.size and all(mine.read(at, CHUNK) == theirs.read(at, CHUNK) for at in parts)


def _skip_equal(one: _Side, other: _Side) -> None:
    """Skip all frames that are equal without decoding them."""
    if one.chain == other.chain:
        _skip_bytes(one, other)
    else:
        _skip_bodies(one, other)


def _skip_bytes(one: _Side, other: _Side) -> None:
    """Skip equal bytes: after equal chains, equal bytes are equal frames."""
    common = _common_bytes(one.data, one.offset, other.data, other.offset)
    until, frames, at, data = one.offset + common, 0, one.offset, one.data
    size, start = len(data), one.offset
    while at + RECORD_HEAD <= size:
        end = at + RECORD_HEAD + int.from_bytes(data[at : at + 4], "little")
        if end > until:
            break
        at, last = end, at
        frames += 1
    if frames:
        chain = codec.digest_word.unpack_from(data, last + RECORD_HEAD)[0] if at - last >= FRAME_HEAD else one.chain
        for side in (one, other):
            side.chain, side.offset, side.frames = chain, side.offset + at - start, side.frames + frames


def _common_bytes(one: bytes, at: int, other: bytes, there: int) -> int:
    """How many bytes are equal from two offsets on."""
    size = min(len(one) - at, len(other) - there)
    a, b = np.frombuffer(one, np.uint8, size, at), np.frombuffer(other, np.uint8, size, there)
    for begin in range(0, size, CHUNK):
        differ = np.flatnonzero(a[begin : begin + CHUNK] != b[begin : begin + CHUNK])
        if len(differ):
            return begin + int(differ[0])
    return size


def _skip_bodies(one: _Side, other: _Side) -> None:
    """Skip frames with equal bodies, for chains that began differently."""
    a, b, at, there, frames = one.data, other.data, one.offset, other.offset, 0
    ends = len(a), len(b)
    while at < ends[0] and there < ends[1]:
        size = int.from_bytes(a[at : at + 4], "little") + RECORD_HEAD
        if a[at : at + 4] != b[there : there + 4] or at + size > ends[0] or there + size > ends[1]:
            break
        if a[at + FRAME_HEAD : at + size] != b[there + FRAME_HEAD : there + size]:
            break
        at, there, frames = at + size, there + size, frames + 1
    one.offset, other.offset = at, there
    for side in (one, other):
        side.frames += frames


# ---- the first divergence ------------------------------------------------------------------------------------------

Found = tuple[int, int, str, list[Field]]
Events = deque[tuple[int, AnyEvent]]


def _equal(one: AnyEvent, other: AnyEvent) -> bool:
    return one == other


def _equal_but_for_time(one: AnyEvent, other: AnyEvent) -> bool:
    if one == other or not (isinstance(one, RequestArrived) and isinstance(other, RequestArrived)):
        return one == other
    return msgspec.structs.replace(other, arrival_ns=one.arrival_ns) == one


def _first_divergence(one: _Side, other: _Side, equal: Callable[[AnyEvent, AnyEvent], bool]) -> Found | None:
    while True:
        if not one.at_end and not other.at_end:
            _skip_equal(one, other)
        equal_chains, places = one.chain == other.chain, (one.place, other.place)
        queues: tuple[Events, Events] = (_next_events(one), _next_events(other))
        if not queues[0] and not queues[1]:
            return None if one.end == other.end else _ends(one, other, queues)
        found = _compare(one, other, queues, equal)
        if found is not None:
            return found
        if one.last is None or other.last is None:
            continue
        if equal_chains and places == (one.place, other.place) and one.last.body == other.last.body:
            return _other_state(one, one.last, other.last)


def _next_events(side: _Side) -> Events:
    """The numbered events of the next frame that has any; empty at the end."""
    while (frame := side.next_frame()) is not None:
        if frame.events:
            return deque(enumerate(frame.events, frame.first_event))
    return deque()


def _compare(
    one: _Side, other: _Side, queues: tuple[Events, Events], equal: Callable[[AnyEvent, AnyEvent], bool]
) -> Found | None:
    """Compare events until one log has none left in its current frame."""
    mine, theirs = queues
    while mine or theirs:
        if not mine:
            mine = _next_events(one)
        if not theirs:
            theirs = _next_events(other)
        if not mine or not theirs:
            return _ends(one, other, (mine, theirs))
        (number, a), (at, b) = mine.popleft(), theirs.popleft()
        if number != at or not equal(a, b):
            return _step_of(a, one), number, _what(a, b), _different_fields(a, b)
    return None


def _other_state(one: _Side, frame: Frame, same: Frame) -> Found:
    """Report equal bytes after equal history with another chained digest: one engine had another state."""
    step = next((plan.step for event in reversed(frame.events) if (plan := plan_of(event)) is not None), -1)
    fields = [Field(name="chained digest", one=hexadecimal(frame.digest), other=hexadecimal(same.digest))]
    return step, one.next_event - 1, "the events are the same, the states are not: verify says which is right", fields


def _ends(one: _Side, other: _Side, queues: tuple[Events, Events]) -> Found:
    """Report that one log continues where the other ends."""
    reported = [
        f"goes on with {type(queue[0][1]).__name__}" if queue else f"ends ({side.end or 'complete'})"
        for side, queue in zip((one, other), queues)
    ]
    number = queues[0][0][0] if queues[0] else queues[1][0][0] if queues[1] else one.next_event
    going = [(side, queue) for side, queue in zip((one, other), queues) if queue]
    step = _step_of(going[0][1][0][1], going[0][0]) if going else -1
    return step, number, "one log is longer than the other", [Field(name="end", one=reported[0], other=reported[1])]


def _step_of(event: AnyEvent, side: _Side) -> int:
    """The step of an event: its own, or the last one planned before the next plan; -1 if no plan follows."""
    if isinstance(event, StepCommitted):
        return event.step
    if (own := plan_of(event)) is not None:
        return own.step
    frame: Frame | None = side.last
    while frame is not None:
        for later in frame.events:
            if (plan := plan_of(later)) is not None:
                return plan.step - 1
        frame = side.next_frame()
    return -1


def _what(one: AnyEvent, other: AnyEvent) -> str:
    names = [type(event).__name__ for event in (one, other)]
    return names[0] if names[0] == names[1] else f"{names[0]} where the other has {names[1]}"


def _different_fields(one: AnyEvent, other: AnyEvent) -> list[Field]:
    """Every field that differs; for tokens, the first differing one."""
    if type(one) is not type(other):
        return [Field(name="event", one=line_of(one), other=line_of(other))]
    found = []
    for name, (a, b) in _fields(one, other):
        if a == b:
            continue
        if isinstance(a, bytes) and isinstance(b, bytes):
            found += _different_tokens(name, unpack_tokens(a), unpack_tokens(b))
        elif isinstance(a, msgspec.Struct) and isinstance(b, msgspec.Struct):
            found += [Field(name=f"{name}.{inner}", one=str(x), other=str(y)) for inner, (x, y) in _fields(a, b) if x != y]
        else:
            shown = "{:016x}" if name == "client" else "{}"
            found.append(Field(name=name, one=shown.format(a), other=shown.format(b)))
    return found


def _different_tokens(name: str, one: np.ndarray, other: np.ndarray) -> list[Field]:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    found = []
    if len(one) != len(other):
        found.append(Field(name=f"{name} in number", one=str(len(one)), other=str(len(other))))
    if len(differ):
        at = int(differ[0])
        found.append(Field(name=f"{name}[{at}]", one=str(int(one[at])), other=str(int(other[at]))))
    return found
