"""Broadcast: events as the bytes of one ring message, and back. Typed msgpack, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.state.events import AnyEvent, StepCommitted

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[AnyEvent, ...])


def encode_events(events: Sequence[AnyEvent]) -> bytes:
    """One ring message. Sampled tokens stay out: every rank has its own, and they are equal."""
    return _encoder.encode(
        [msgspec.structs.replace(event, tokens=b"") if isinstance(event, StepCommitted) else event for event in events]
    )


def decode_events(message: bytes) -> tuple[AnyEvent, ...]:
    """The events of a ring message, in order."""
    return _decoder.decode(message)
