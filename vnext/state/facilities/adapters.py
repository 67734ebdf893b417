"""Adapters: which LoRA adapter each slot holds, and which requests may run with it.

A request names the digest of its adapter's files, "" for none. It is admitted only while a slot holds that digest, and no
slot changes while a running request uses it. The digest is part of the root of the request's block hashes, so the cache
never mixes adapters. Who loads and evicts is a decision (vnext/sched/residency.py); here the two events are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import msgspec

from vnext.state.errors import require
from vnext.state.events import AdapterEvicted, AdapterLoaded, AnyEvent
from vnext.state.state import Slot, State

replace = msgspec.structs.replace


def slot_of(state: State, digest: str) -> int | None:
    return next((place for place, slot in enumerate(state.slots) if slot is not None and slot.digest == digest), None)


def may_run(state: State, request_id: int) -> bool:
    """Whether a waiting request needs no adapter, or one that a slot holds."""
    adapter = state.requests[request_id].sampling.adapter
    return not adapter or slot_of(state, adapter) is not None


def held(state: State) -> frozenset[str]:
    """The digests that running requests use."""
    if not state.slots:
        return frozenset()
    return frozenset(state.requests[id_].sampling.adapter for id_ in state.rows.id.tolist()) - {""}


def fold_adapter_loaded(state: State, event: AdapterLoaded) -> State:
    """The state with the adapter in its slot, which must be empty."""
    require(0 <= event.slot < len(state.slots), f"there is no slot {event.slot}")
    require(state.slots[event.slot] is None, f"slot {event.slot} holds another adapter")
    require(bool(event.digest) and slot_of(state, event.digest) is None, f"adapter {event.digest!r} has a slot already")
    return _with_slot(state, event.slot, Slot(event.name, event.digest, state.planned))


def fold_adapter_evicted(state: State, event: AdapterEvicted) -> State:
    """The state with an empty slot, which no running request may use."""
    slot = state.slots[event.slot] if 0 <= event.slot < len(state.slots) else None
    require(slot is not None, f"slot {event.slot} holds no adapter")
    require(slot is None or slot.digest not in held(state), f"running requests use the adapter in slot {event.slot}")
    return _with_slot(state, event.slot, None)


def used(state: State, digests: Set[str]) -> State:
    """The state in which these adapters were used last by the step that is planned."""
    slots = [
        replace(slot, used=state.planned) if slot is not None and slot.digest in digests else slot for slot in state.slots
    ]
    return replace(state, slots=tuple(slots))


def _with_slot(state: State, place: int, slot: Slot | None) -> State:
    return replace(state, slots=(*state.slots[:place], slot, *state.slots[place + 1 :]))


def illegal(state: State) -> Iterator[AnyEvent]:
    """Nobody loads an adapter into a slot that is taken, nor twice, nor evicts one that running requests use."""
    users = held(state)
    for place, slot in enumerate(state.slots):
        if slot is None:
            yield AdapterEvicted(slot=place)
            continue
        yield AdapterLoaded(name="", digest="another", slot=place)
        yield AdapterLoaded(name="", digest=slot.digest, slot=(place + 1) % len(state.slots))
        if slot.digest in users:
            yield AdapterEvicted(slot=place)


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {AdapterLoaded: fold_adapter_loaded, AdapterEvicted: fold_adapter_evicted}
