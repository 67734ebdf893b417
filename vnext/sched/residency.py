"""Residency: which adapter to load next, and which one to evict for it. Pure; the runtime loads, then the events happen.

Waiting requests get their adapters in the order in which they will be admitted. An adapter is evicted only if no running
request uses it and no request further ahead needs it, the least recently used one first.
"""

from __future__ import annotations

from typing import NamedTuple

from vnext.sched.ranking import places_best_first
from vnext.state.events import AdapterEvicted, AdapterLoaded
from vnext.state.facilities.adapters import held
from vnext.state.state import Slot, State

LOOKAHEAD = 4
"""Requests looked at for each slot."""


class Load(NamedTuple):
    """The adapter to load, and the empty slot or the one whose adapter is to be evicted."""

    digest: str
    slot: int
    evicts: bool

    def events(self, name: str, path: str = "") -> tuple[AdapterEvicted | AdapterLoaded, ...]:
        """What happens once the ranks have read the adapter."""
        loaded = AdapterLoaded(name=name, digest=self.digest, slot=self.slot, path=path)
        return (AdapterEvicted(slot=self.slot), loaded) if self.evicts else (loaded,)


def next_load(state: State) -> Load | None:
    """The load that lets the best waiting request go on for which there is a slot; None where nothing is to be loaded."""
    if not state.slots or not state.waiting:
        return None
    needed = _needed(state)
    resident = {slot.digest for slot in state.slots if slot is not None}
    missing = next((digest for digest in needed if digest not in resident), None)
    if missing is None:
        return None
    ahead = needed[: needed.index(missing)]
    kept = held(state).union(ahead)
    places = [(slot.used if slot else -1, at) for at, slot in enumerate(state.slots) if not _is_kept(slot, kept)]
    if not places:
        return None
    place = min(places)[1]
    return Load(missing, place, state.slots[place] is not None)


def _needed(state: State) -> list[str]:
    """The adapters of the best waiting requests, best first."""
    places = places_best_first(state, LOOKAHEAD * len(state.slots))
    adapters = [state.requests[state.waiting[place].id].sampling.adapter for place in places]
    return [digest for digest in dict.fromkeys(adapters) if digest]


def _is_kept(slot: Slot | None, kept: frozenset[str]) -> bool:
    return slot is not None and slot.digest in kept
