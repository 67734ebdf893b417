"""Packing of token ids in the log: two, three or four bytes a token instead of an event's four.

Owns the choice of the width and the rewriting of the event types that carry tokens. Every other event passes
through as the same object. A token too wide for the usual width widens its whole frame, so nothing is ever cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never, cast

import msgspec

from vnext.log import log_bytes
from vnext.log.log_plain import WIDTH_MAX, WIDTH_MIN
from vnext.state.events import (
    AdapterEvicted,
    AdapterLoaded,
    AnyEvent,
    BlocksHandedOver,
    BlocksPromoted,
    ClockTicked,
    EnginePaused,
    EngineRecovered,
    EngineStarted,
    PinsYielded,
    PrefixCacheReset,
    PromotionEnded,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    TierChanged,
    TierOpened,
    WeightsChanged,
    generated_by,
)


def width_bytes(token_bound: int) -> int:
    """Bytes that hold every token id below `token_bound`; 4 when the bound is unknown (0)."""
    if token_bound <= 0:
        return WIDTH_MAX
    return min(WIDTH_MAX, max(WIDTH_MIN, ((token_bound - 1).bit_length() + 7) // 8))


def tokens_of(event: AnyEvent) -> bytes:
    """The int32 bytes an event carries; empty for an event without tokens."""
    match event:
        case StepCommitted():
            return event.tokens
        case RequestArrived():
            return event.prompt + generated_by(event)
        case (
            EngineStarted() | RequestAborted() | StepPlanned() | PrefixCacheReset() | AdapterLoaded() | AdapterEvicted()
            | EngineRecovered() | EnginePaused() | WeightsChanged() | TierOpened() | TierChanged() | BlocksPromoted()
            | PromotionEnded() | ClockTicked() | PinsYielded() | BlocksHandedOver()
        ):  # fmt: skip
            return b""
        case _:
            assert_never(event)


def with_tokens(event: AnyEvent, tokens: bytes) -> AnyEvent:
    """The event with its token bytes replaced; the same object if it carries none."""
    match event:
        case StepCommitted():
            return StepCommitted(step=event.step, tokens=tokens, counts=event.counts, drafted=event.drafted)
        case RequestResumed():
            end = len(event.prompt) * len(tokens) // len(tokens_of(event))
            return msgspec.structs.replace(event, prompt=tokens[:end], generated=tokens[end:])
        case RequestArrived():
            return msgspec.structs.replace(event, prompt=tokens)
        case (
            EngineStarted() | RequestAborted() | StepPlanned() | PrefixCacheReset() | AdapterLoaded() | AdapterEvicted()
            | EngineRecovered() | EnginePaused() | WeightsChanged() | TierOpened() | TierChanged() | BlocksPromoted()
            | PromotionEnded() | ClockTicked() | PinsYielded() | BlocksHandedOver()
        ):  # fmt: skip
            return event
        case _:
            assert_never(event)


class PlainCommit(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A commit without drafts as it stands in a frame: it has the first two fields of StepCommitted."""

    step: int
    tokens: bytes


def narrow_events(events: Sequence[AnyEvent], width: int) -> tuple[tuple[AnyEvent, ...], int]:
    """The events as they stand in a frame, and the width of its tokens: `width` if every token fits it, else 4."""
    packed = tuple(_narrowed(event, width) for event in events)
    fitting = tuple(event for event in packed if event is not None)
    if len(fitting) < len(packed):
        fitting, width = tuple(events), WIDTH_MAX
    return tuple(map(_shortened, fitting)), width


def _shortened(event: AnyEvent) -> AnyEvent:
    """The event, or the PlainCommit that reads as it."""
    if type(event) is not StepCommitted or event.counts:
        return event
    return cast(AnyEvent, PlainCommit(event.step, event.tokens))


def _narrowed(event: AnyEvent, width: int) -> AnyEvent | None:
    """The event as it stands in a frame of this width; None if one of its tokens does not fit."""
    tokens = tokens_of(event)
    if not tokens or width == WIDTH_MAX:
        return event
    narrow = log_bytes.impl.narrow(tokens, width)
    return None if narrow is None else with_tokens(event, narrow)


def widen_events(events: tuple[AnyEvent, ...], width: int) -> tuple[AnyEvent, ...]:
    """The events of a frame of this width as they were. ValueError for no width, or bytes that are not whole tokens."""
    if not WIDTH_MIN <= width <= WIDTH_MAX:
        raise ValueError(f"{width} bytes a token")
    return tuple([event if type(event) is StepPlanned else _widened(event, width) for event in events])


def _widened(event: AnyEvent, width: int) -> AnyEvent:
    """The usual event first: a commit."""
    if type(event) is StepCommitted:
        tokens = log_bytes.impl.widen(event.tokens, width)
        return StepCommitted(step=event.step, tokens=tokens, counts=event.counts, drafted=event.drafted)
    tokens = tokens_of(event)
    return with_tokens(event, log_bytes.impl.widen(tokens, width)) if tokens else event
