"""The facilities, joined: how their events fold, and events that a state must refuse for them. A facility more is a name here."""

from __future__ import annotations

from collections.abc import Iterator

from vnext.state.events import AnyEvent
from vnext.state.facilities import adapters, draft_costs, encoding, handover, pins, shortage, sought, tier, weights
from vnext.state.state import State

FACILITIES = (adapters, tier, handover, pins, weights, draft_costs, shortage, encoding, sought)
FOLDS = {event: fold for facility in FACILITIES for event, fold in facility.FOLDS.items()}
"""How the events of the facilities fold."""


def illegal(state: State) -> Iterator[AnyEvent]:
    """Events that may not happen in this state, of every facility: each must be refused, with nothing changed."""
    for facility in FACILITIES:
        yield from facility.illegal(state)
