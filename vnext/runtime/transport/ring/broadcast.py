"""Broadcast: events as the bytes of one ring message, and back. Typed msgpack, no torch.

A rank receives only what its replica needs. A commit carries no tokens: every rank has its own, and they are equal. An arrival
carries neither the client's name nor a time, which only the engine core uses, and only the low bits of its id, which counts
arrivals. So a steady decode step takes some 20 bytes whatever the batch, and an admitted request at most 16 bytes beside its
prompt's tokens and its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Any, get_args

import msgspec

from vnext.runtime.transport.ring.commands import AnyCommand
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepCommitted
from vnext.state.params import Sampling

_ID_BITS = 7  # one byte of msgpack
_ID_MASK = (1 << _ID_BITS) - 1


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """Base of the types that replace an event in a message."""


class _Arrived(_Wire, tag=1, frozen=True):
    id_low: int
    prompt: bytes
    sampling: Sampling
    priority: int
    cache_salt: str
    client: int
    weight: int


class _Committed(_Wire, tag=4, frozen=True):
    step: int


class ReadAdapter(_Wire, tag=100, frozen=True):
    """No event: asks a rank to read an adapter beside its steps, so that AdapterLoaded takes no time. Answered by AdapterRead."""

    digest: str
    path: str


class BeginFrom(_Wire, tag=101, frozen=True):
    """No event: a rank that has just started begins from this state (log/snapshot.py) in place of an engine's first."""

    snapshot: bytes


class StoreBlocks(_Wire, tag=102, frozen=True):
    """No event: asks a rank to write these `pages` to disk under the names `blocks` (16 bytes each), and these `state_pages` as the
    `snapshots` behind such blocks. Answered by BlocksWritten."""

    blocks: bytes
    pages: tuple[int, ...]
    snapshots: bytes = b""
    state_pages: tuple[int, ...] = ()


class FetchBlocks(_Wire, tag=103, frozen=True):
    """No event: the blocks of a transfer that begins are those of another engine, whose `ticket` says where they are."""

    transfer: int
    ticket: str


class FetchInputs(_Wire, tag=104, frozen=True):
    """No event: vectors of the inputs of the request `id`, which are looked for next, are those of another engine, whose `ticket`
    says where they are."""

    id: int
    ticket: str


RankRequest = ReadAdapter | BeginFrom | StoreBlocks | FetchBlocks | FetchInputs
_as_they_are = [event for event in get_args(AnyEvent) if event not in (RequestArrived, StepCommitted)]
_encoder = msgspec.msgpack.Encoder()
_wires = (_Arrived, _Committed, *get_args(RankRequest), *get_args(AnyCommand), *_as_they_are)
_decoder: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(GenericAlias(tuple, (reduce(or_, _wires), ...)))


def encode_events(events: Sequence[AnyEvent]) -> bytes:
    return _encoder.encode([_to_wire(event) for event in events])


def encode_read(request: ReadAdapter) -> bytes:
    """One ring message without events."""
    return _encoder.encode([request])


def encode_store(request: StoreBlocks) -> bytes:
    """One ring message without events."""
    return _encoder.encode([request])


def encode_fetch(request: FetchBlocks | FetchInputs) -> bytes:
    """One ring message without events."""
    return _encoder.encode([request])


def encode_begin(started: EngineStarted, snapshot: bytes) -> bytes:
    """The first ring message to ranks that are to go on from a state."""
    return _encoder.encode([started, BeginFrom(snapshot=snapshot)])


def encode_command(command: AnyCommand) -> bytes:
    """One ring message without events."""
    return _encoder.encode([command])


def decode_events(message: bytes, next_id: int = 0) -> tuple[AnyEvent | RankRequest | AnyCommand, ...]:
    """The events of a ring message, in order, or what a rank is asked to do; `next_id` is the id that the replica gives to the
    next arrival.

    An arrival gets the id nearest to `next_id`; the reducer checks that it is exactly that one. A commit's tokens are empty,
    as are an arrival's name and time.
    """
    events = []
    for wire in _decoder.decode(message):
        if type(wire) is _Committed:  # isinstance would ask the metaclass of structs
            events.append(StepCommitted(wire.step, b""))
            continue
        if type(wire) is _Arrived:
            wire = _arrival(wire, next_id)
        events.append(wire)
        next_id += isinstance(wire, RequestArrived)
    return tuple(events)


def _to_wire(event: AnyEvent) -> AnyEvent | _Wire:
    if type(event) is StepCommitted:
        return _Committed(event.step)
    if type(event) is RequestArrived:
        id_low, salt = event.id & _ID_MASK, event.cache_salt
        return _Arrived(id_low, event.prompt, event.sampling, event.priority, salt, event.client, event.weight)
    return event


def _arrival(wire: _Arrived, due: int) -> RequestArrived:
    half = 1 << _ID_BITS - 1
    ahead = (wire.id_low - due + half & _ID_MASK) - half  # 0, unless an arrival was lost or came twice
    return RequestArrived(
        id=RequestId(due + ahead),
        name="",
        prompt=wire.prompt,
        sampling=wire.sampling,
        priority=wire.priority,
        arrival_ns=0,
        cache_salt=wire.cache_salt,
        client=wire.client,
        weight=wire.weight,
    )
