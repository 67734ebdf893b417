"""The log's format: segment headers and frames, as bytes. Pure: files belong to `vnext.runtime.record.recorder`.

    segment = magic, record(header), record(frame), record(frame), ...
    record  = length u32, CRC32 of length and payload u32, payload            (little-endian)
    frame   = chained digest u64, body                                        (the payload of one engine iteration)

The chain: D_t = xxh3_64(D_{t-1} || digest of the state after the frame || body); it starts in each segment with the
xxh3_64 of that segment's header, which itself carries the last D of the segment before. More: docs/log-format.md.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Sequence
from functools import cache
from typing import Literal, cast

import msgspec
import xxhash

from vnext.log import log_bytes
from vnext.log.log_plain import FRAME_HEAD, WIDTH_MAX, WIDTH_MIN, checksum
from vnext.state.config import SchedulerConfig
from vnext.state.digest import DIGEST_VERSION
from vnext.state.events import AnyEvent, EngineStarted, StepCommitted, StepPlanned

# ---- widths of tokens --------------------------------------------------------------------------------------------
# A token has two, three or four bytes in the log instead of an event's four. An event without fields that are tokens passes
# through as the same object. A token too wide for the usual width widens its whole frame, so nothing is ever cut off.


def width_bytes(token_bound: int) -> int:
    """Bytes that hold every token id below `token_bound`; 4 when the bound is unknown (0)."""
    if token_bound <= 0:
        return WIDTH_MAX
    return min(WIDTH_MAX, max(WIDTH_MIN, ((token_bound - 1).bit_length() + 7) // 8))


class PlainCommit(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A commit without drafts as it stands in a frame: it has the first two fields of StepCommitted."""

    step: int
    tokens: bytes


def narrow_events(events: Sequence[AnyEvent], width: int) -> tuple[tuple[AnyEvent, ...], int]:
    """The events as they stand in a frame, and the width of its tokens: `width` if every token fits it, else 4."""
    packed: list[AnyEvent] = []
    for event in events:
        if (narrow := _narrowed(event, width)) is None:
            return narrow_events(events, WIDTH_MAX)
        packed.append(narrow)
    return tuple(packed), width


def _narrowed(event: AnyEvent, width: int) -> AnyEvent | None:
    """The event as it stands in a frame of this width; None if one of its tokens does not fit."""
    if type(event) is StepCommitted and not event.counts:
        tokens = event.tokens if width == WIDTH_MAX else log_bytes.impl.narrow(event.tokens, width)
        return None if tokens is None else cast(AnyEvent, PlainCommit(event.step, tokens))
    fields = event.traits.tokens
    if not fields or width == WIDTH_MAX:
        return event
    narrow = {field: log_bytes.impl.narrow(getattr(event, field), width) for field in fields}
    return None if None in narrow.values() else msgspec.structs.replace(event, **narrow)


def widen_events(events: tuple[AnyEvent, ...], width: int) -> tuple[AnyEvent, ...]:
    """The events of a frame of this width as they were. ValueError for no width, or bytes that are not whole tokens."""
    if not WIDTH_MIN <= width <= WIDTH_MAX:
        raise ValueError(f"{width} bytes a token")
    return tuple([_widened(event, width) if event.traits.tokens else event for event in events])


def _widened(event: AnyEvent, width: int) -> AnyEvent:
    """The usual event first: a commit."""
    if type(event) is StepCommitted:
        tokens = log_bytes.impl.widen(event.tokens, width)
        return StepCommitted(step=event.step, tokens=tokens, counts=event.counts, drafted=event.drafted)
    wide = {field: log_bytes.impl.widen(getattr(event, field), width) for field in event.traits.tokens}
    return msgspec.structs.replace(event, **wide)


MAGIC = b"vnextLOG"
FORMAT_VERSION = 1
SEGMENT_SIZE_BYTES = 64 * 2**20
SEGMENT_SUFFIX = ".vnextlog"
INDEX_SUFFIX = ".vnextcache"
GAP_NAME = "frames-lost"
"""An empty file in a log's folder while frames are lost that no later frame counts: a full disk has room for its name."""
FIRST_FRAME_EVENT = 1
"""EngineStarted is event 0 and is stored in the header; frames count from here."""

Privacy = Literal["full", "shape"]
SteadyPair = tuple[StepCommitted, StepPlanned]
EndKind = Literal["complete", "torn", "damaged", "unchained", "unusable"]

record_head = struct.Struct("<II")
digest_word = struct.Struct("<Q")
chain_words = struct.Struct("<QQ")
FRAME_LENGTH_MIN = digest_word.size + 1


class RankDigest(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report: its digest of the state right after StepPlanned(`step`) was folded."""

    rank: int
    step: int
    digest: int


class RankDetail(msgspec.Struct, frozen=True, array_like=True):
    """A rank's report on a step in which its digest differed from the engine's.

    `words`: those of digest.DETAIL_NAMES, and its chain of committed tokens. `requests`: live requests of which only the
    tokens differed. `fed`: if the states were equal, the names of the model inputs that differed from the state.
    """

    rank: int
    step: int
    words: tuple[int, ...]
    token_digest: int
    requests: tuple[int, ...] = ()
    fed: tuple[str, ...] = ()


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`previous` is the last chained digest of the segment before (0 in the first). `first_event` is the number of the
    first event in this segment's frames. `token_width` is the number of bytes of a stored token. `snapshot` is the
    state in which the segment begins (snapshot.py), empty in the first. `digest_version` is that of the states' digests
    (digest.py). `closes`: the engine ends its log with a frame without events (is_closing), so a log without that frame
    was cut short. `frames_before` counts the frames of all segments before, -1 in later segments of older logs.
    """

    format_version: int
    schema: int
    code_version: str
    started: EngineStarted
    privacy: Privacy
    token_width: int
    index: int
    previous: int
    first_event: int
    snapshot: bytes = b""
    digest_version: int = 1
    closes: bool = False
    frames_before: int = -1


class SegmentStart(msgspec.Struct, frozen=True, kw_only=True):
    """A segment's header as read, and the chained digest with which its frames start."""

    header: SegmentHeader
    chain: int


class FrameBody(msgspec.Struct, frozen=True, array_like=True):
    """A frame as encoded: `lost` frames are missing before it, tokens take `width` bytes.

    The last two fields are omitted together when empty, as in nearly every frame. `details` are those of ranks whose
    state differed. `unused` held a time in logs of earlier versions; frames no longer store one (timestamps.py).
    """

    first_event: int
    events: tuple[AnyEvent, ...]
    rank_digests: tuple[RankDigest, ...]
    lost: int
    width: int
    unused: int = 0
    details: tuple[RankDetail, ...] = ()


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One engine iteration as read: `events` with full tokens, `body` the bytes that the chained `digest` covers."""

    first_event: int
    events: tuple[AnyEvent, ...]
    rank_digests: tuple[RankDigest, ...]
    lost: int
    digest: int
    body: bytes
    details: tuple[RankDetail, ...] = ()


def is_closing(frame: Frame) -> bool:
    """Whether this frame, if it is the last, shows that the engine closed its log."""
    return not (frame.events or frame.rank_digests or frame.details)


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Where reading ended and why. `message` is empty only if the log is complete."""

    kind: EndKind
    message: str
    segment: int
    offset_bytes: int
    ignored_bytes: int

    def __str__(self) -> str:
        if self.kind == "complete":
            return "complete"
        ignored = f"; the {self.ignored_bytes} bytes from there on are ignored" if self.ignored_bytes else ""
        return f"{self.kind} in segment {self.segment}, byte {self.offset_bytes}: {self.message}{ignored}"


frame_encoder = msgspec.msgpack.Encoder()
frame_decoder = msgspec.msgpack.Decoder(FrameBody)
header_decoder = msgspec.msgpack.Decoder(SegmentHeader)


def first_header(started: EngineStarted, privacy: Privacy, code_version: str) -> SegmentHeader:
    return SegmentHeader(
        format_version=FORMAT_VERSION,
        schema=schema_digest(),
        code_version=code_version,
        started=started,
        privacy=privacy,
        token_width=width_bytes(token_bound(started.config, privacy)),
        index=0,
        previous=0,
        first_event=FIRST_FRAME_EVENT,
        digest_version=DIGEST_VERSION,
        frames_before=0,
    )


def segment_name(index: int) -> str:
    """The file name of a segment. Names sort in the order of the segments."""
    return f"segment-{index:06d}{SEGMENT_SUFFIX}"


def next_header(
    header: SegmentHeader, chain: int, first_event: int, snapshot: bytes = b"", frames_before: int = -1
) -> SegmentHeader:
    """The header of the segment that follows one that ended with this chained digest."""
    return msgspec.structs.replace(
        header,
        index=header.index + 1,
        previous=chain,
        first_event=first_event,
        snapshot=snapshot,
        frames_before=frames_before,
    )


def token_bound(config: SchedulerConfig, privacy: Privacy) -> int:
    """Token ids in the log are below this; 0 if unknown. Pseudonyms lie directly above the vocabulary."""
    if privacy == "full" or not config.vocab_size:
        return config.vocab_size
    return 2 * pseudonym_base(config)


def pseudonym_base(config: SchedulerConfig) -> int:
    """The smallest power of four above every token id (2^30 if unknown): pseudonyms are base + [0, base)."""
    bound = max(config.vocab_size, *(end + 1 for end in config.eos_token_ids), 1)
    bits = (bound - 1).bit_length() if config.vocab_size else 30
    return 1 << min(30, max(8, bits + bits % 2))


def open_segment(header: SegmentHeader) -> tuple[bytes, int]:
    """The first bytes of a segment, and the chained digest with which it starts."""
    payload = frame_encoder.encode(header)
    return MAGIC + seal(payload), header_chain(payload)


def header_chain(payload: bytes | memoryview) -> int:
    """The chained digest with which a segment starts (uint64), from its encoded header."""
    return xxhash.xxh3_64_intdigest(payload)


def encode_body(
    first_event: int,
    events: Sequence[AnyEvent],
    rank_digests: Sequence[RankDigest],
    lost: int,
    width: int,
    details: Sequence[RankDetail] = (),
) -> bytes:
    """The part of a frame that its chained digest covers. `width` is the header's; the frame may need a larger one."""
    packed, width = narrow_events(events, width)
    if details:
        body = FrameBody(first_event, packed, tuple(rank_digests), lost, width, details=tuple(details))
        return frame_encoder.encode(body)
    return frame_encoder.encode((first_event, packed, tuple(rank_digests), lost, width))


def chained(previous: int, state_digest: int, body: bytes) -> int:
    """The chained digest of a frame (uint64)."""
    return xxhash.xxh3_64_intdigest(chain_words.pack(previous, state_digest) + body)


def encode_frame(digest: int, body: bytes) -> bytes:
    return seal(digest_word.pack(digest) + body)


def put_frame(frame: bytearray, body: bytes) -> None:
    """Turn `frame` into the record of this body (`encode_body`), except its first FRAME_HEAD bytes, which `seal_frame` writes."""
    frame[:] = bytes(FRAME_HEAD) + body


def steady_pair(events: Sequence[AnyEvent]) -> SteadyPair | None:
    """A commit followed by the expected plan, the usual events of a frame (log_plain.put_steady). None for any others."""
    if len(events) != 2:
        return None
    committed, plan = events
    if type(committed) is not StepCommitted or type(plan) is not StepPlanned:
        return None
    return None if plan.changed or plan.admitted or plan.preempted or committed.counts else (committed, plan)


def seal_frame(frame: bytearray, previous: int, state_digest: int) -> int:
    """Chain and complete a frame of `put_frame`. Returns its chained digest, equal to `chained` over its body."""
    return log_bytes.impl.seal_frame(frame, previous, state_digest, xxhash.xxh3_64_intdigest)


def seal(payload: bytes) -> bytes:
    """A record: length, CRC32 of length and payload, payload."""
    return record_head.pack(len(payload), checksum(payload)) + payload


# ---- the schema digest -------------------------------------------------------------------------------------------
# One number that changes when the types in the log change: the event types by name, tag, fields, types and defaults; words in
# docstrings do not count. A log of another schema is not refused for it: records only grow at the end.


@cache
def schema_digest() -> int:
    """xxh3_64 of `describe()` (uint64); types do not change in a process."""
    return xxhash.xxh3_64_intdigest(describe().encode())


def describe() -> str:
    """One line for each struct that an event can hold, in order of first mention."""
    found: dict[type[msgspec.Struct], str] = {}
    for event_type in typing.get_args(AnyEvent):
        _collect(event_type, found)
    return "\n".join(found.values())


def _collect(struct_type: type[msgspec.Struct], found: dict[type[msgspec.Struct], str]) -> None:
    if struct_type in found:
        return
    fields = msgspec.structs.fields(struct_type)
    parts = ", ".join(f"{field.encode_name}: {_type_name(field.type)}{_default(field)}" for field in fields)
    found[struct_type] = f"{struct_type.__name__}[{struct_type.__struct_config__.tag}]({parts})"
    for field in fields:
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            _collect(field.type, found)


def _type_name(annotation: object) -> str:
    """A name that does not depend on the Python version's way of printing types."""
    arguments = typing.get_args(annotation)
    if arguments:
        origin = typing.get_origin(annotation)
        return f"{getattr(origin, '__name__', origin)}[{', '.join(map(_type_name, arguments))}]"
    return annotation.__name__ if hasattr(annotation, "__name__") else repr(annotation)


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "" if field.default is msgspec.NODEFAULT else f" = {field.default!r}"
