"""What parts of an engine count: fields of EngineStats (messages.py), each None in an engine without the part."""

from __future__ import annotations

import msgspec


class Figures(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all."""


class AdapterStats(Figures, frozen=True):
    """The adapters of an engine: how many it may hold at once and holds, what was loaded and evicted since the start, how many
    waiting requests have an adapter that no slot holds, and the names of the adapters that running and waiting requests use."""

    slots: int
    resident: int
    loads: int
    evictions: int
    requests_waiting: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class TierStats(Figures, frozen=True):
    """The disk tier: its `blocks` of `capacity`, and counts since the start: blocks written (`stored`), read back (`promoted`),
    that left (`gone`), that were `damaged`, that left memory before they were written (`missed`) and that could not be written
    (`errors`), and transfers that were `given_up`. `received` blocks came from other engines, and `absent` ones that were to come
    could not be had."""

    blocks: int
    capacity: int
    stored: int
    promoted: int
    gone: int
    damaged: int
    missed: int
    errors: int
    given_up: int
    received: int = 0
    absent: int = 0


class PinStats(Figures, frozen=True):
    """Pins: `blocks` of at most `capacity`, and counts since the start: blocks that were `pinned`, and pins that have `expired`,
    were `displaced` by others, have `yielded` to a request, and were `dropped` with the cache."""

    blocks: int
    capacity: int
    pinned: int
    expired: int
    displaced: int
    yielded: int
    dropped: int


class StateStats(Figures, frozen=True):
    """The `pages` for states of recurrent layers: those that requests have `held`, those that are `snapshots`, held or not."""

    pages: int
    held: int
    snapshots: int
