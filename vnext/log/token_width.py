"""Packing of token ids in the log: two, three or four bytes a token instead of an event's four.

Owns the choice of the width and the rewriting of the fields that are tokens (vnext/state/traits.py). An event without such fields
passes through as the same object. A token too wide for the usual width widens its whole frame, so nothing is ever cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from vnext.log import log_bytes
from vnext.log.log_plain import WIDTH_MAX, WIDTH_MIN
from vnext.state.events import AnyEvent, StepCommitted


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
