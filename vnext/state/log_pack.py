"""Packing of token ids in the log: two, three or four bytes a token instead of an event's four.

Owns the choice of the width and the rewriting of the two event types that carry tokens. Every other event passes
through as the same object. A token too wide for the usual width widens its whole frame, so nothing is ever cut off.
Strided byte slices beat numpy at the size of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from vnext.state.events import AnyEvent, EngineStarted, PrefixCacheReset, RequestAborted, RequestArrived
from vnext.state.events import StepCommitted, StepPlanned

WIDTH_MIN = 2
WIDTH_MAX = 4


def width_bytes(token_bound: int) -> int:
    """Bytes that hold every token id below `token_bound`; 4 when the bound is unknown (0)."""
    if token_bound <= 0:
        return WIDTH_MAX
    return min(WIDTH_MAX, max(WIDTH_MIN, ((token_bound - 1).bit_length() + 7) // 8))


def fits(tokens: bytes, width: int) -> bool:
    """True if every int32 of `tokens` is a non-negative number of at most `width` bytes."""
    count = len(tokens) // 4
    return all(tokens[place::4].count(0) == count for place in range(width, WIDTH_MAX))


def narrow(tokens: bytes, width: int) -> bytes:
    """int32 bytes to `width` bytes a token; lossless exactly when `fits` says so."""
    if width >= WIDTH_MAX:
        return tokens
    packed = bytearray(len(tokens) // 4 * width)
    for place in range(width):
        packed[place::width] = tokens[place::4]
    return bytes(packed)


def widen(packed: bytes, width: int) -> bytes:
    """The inverse of `narrow`. ValueError if `packed` is not a whole number of tokens."""
    if len(packed) % width:
        raise ValueError(f"{len(packed)} bytes are not a whole number of tokens of {width} bytes")
    if width >= WIDTH_MAX:
        return packed
    wide = bytearray(len(packed) // width * 4)
    for place in range(width):
        wide[place::4] = packed[place::width]
    return bytes(wide)


def frame_width(events: Sequence[AnyEvent], width: int) -> int:
    """`width` if every token of the events fits it, else 4."""
    for event in events:
        tokens = tokens_of(event)
        if tokens and not fits(tokens, width):
            return WIDTH_MAX
    return width


def tokens_of(event: AnyEvent) -> bytes:
    """The int32 bytes an event carries; empty for an event without tokens."""
    match event:
        case StepCommitted():
            return event.tokens
        case RequestArrived():
            return event.prompt
        case EngineStarted() | RequestAborted() | StepPlanned() | PrefixCacheReset():
            return b""
        case _:
            assert_never(event)


def with_tokens(event: AnyEvent, tokens: bytes) -> AnyEvent:
    """The event with its token bytes replaced; the same object if it carries none."""
    match event:
        case StepCommitted():
            return StepCommitted(step=event.step, tokens=tokens)
        case RequestArrived():
            return msgspec.structs.replace(event, prompt=tokens)
        case EngineStarted() | RequestAborted() | StepPlanned() | PrefixCacheReset():
            return event
        case _:
            assert_never(event)


def pack(event: AnyEvent, width: int) -> AnyEvent:
    """The event as it stands in a frame of this width."""
    tokens = tokens_of(event)
    return with_tokens(event, narrow(tokens, width)) if tokens and width < WIDTH_MAX else event


def unpack(event: AnyEvent, width: int) -> AnyEvent:
    """The inverse of `pack`. ValueError if the bytes are not a whole number of tokens."""
    tokens = tokens_of(event)
    return with_tokens(event, widen(tokens, width)) if tokens else event
