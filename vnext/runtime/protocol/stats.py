"""What parts of an engine count: fields of EngineStats (messages.py), each None in an engine without the part."""

from __future__ import annotations

from typing import Literal

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
    could not be had. `snapshots` of `snapshots_max` are there too, `snapshots_promoted` were read back."""

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
    snapshots: int = 0
    snapshots_max: int = 0
    snapshots_promoted: int = 0


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


class LayerLoad(Figures, frozen=True):
    """The experts that a layer's tokens went to since the start: the choices of `all`, and of these what the busiest expert and the
    busiest rank had in each of some intervals."""

    layer: int
    all: int
    busiest: int
    busiest_rank: int


class ExpertStats(Figures, frozen=True):
    """The load of `experts`, of which `ranks` have shares. An even one has busiest * experts = busiest_rank * ranks = all."""

    experts: int
    ranks: int
    layers: tuple[LayerLoad, ...]


MissReason = Literal["evicted", "computing", "incomplete", "salt", "adapter", "weights", "changed"]
"""Blocks have left the cache, are being computed still, or stand there without what goes with them (a snapshot of a state, pages of
other windows); the client's earlier prompt had another salt, adapter or version of the weights; or the prompt departs from an
earlier one."""


class CacheMiss(msgspec.Struct, frozen=True, array_like=True):
    """Why `lost_tokens` of a prompt, in whole blocks, are computed again. `at_token` is the first of them or, of a prompt that has
    `changed`, where it departs from the earlier one, which may lie inside a block. Behind another `salt` all blocks count."""

    reason: MissReason
    at_token: int
    lost_tokens: int


class CacheLosses(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Lost tokens since the start, for each reason."""

    evicted: int = 0
    computing: int = 0
    incomplete: int = 0
    salt: int = 0
    adapter: int = 0
    weights: int = 0
    changed: int = 0
