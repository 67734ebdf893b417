"""Adapter slots: each takes the adapter that its event names, whatever was read before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vnext.runtime.rank import adapters
from vnext.runtime.rank.adapters import AdapterSlots
from vnext.runtime.transport.ring.broadcast import ReadAdapter
from vnext.state.events import AdapterEvicted, AdapterLoaded


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> AdapterSlots:
    """What is read of an adapter is its name."""
    monkeypatch.setattr(adapters, "load_adapter", lambda path, digest, *_: f"{Path(path).name} {digest}")
    base: Any = None
    return AdapterSlots(0, base, rank_max=8)


def load(slots: AdapterSlots, slot: int, name: str) -> None:
    slots.fold(AdapterLoaded(slot=slot, name=name, digest=f"of {name}", path=f"/{name}"))


def test_a_slot_takes_what_its_event_names_and_not_what_was_read_last(slots: AdapterSlots) -> None:
    slots.read(ReadAdapter(path="/first", digest="of first"))
    slots.read(ReadAdapter(path="/last", digest="of last"))
    load(slots, 1, "first")
    assert (slots[1], slots.digests) == ("first of first", {1: "of first"})
    load(slots, 0, "last")
    assert (slots[0], slots[1]) == ("last of last", "first of first")


def test_a_slot_takes_what_was_read_for_it(slots: AdapterSlots) -> None:
    slots.read(ReadAdapter(path="/only", digest="of only"))
    load(slots, 0, "only")
    assert slots[0] == "only of only"
    slots.fold(AdapterEvicted(slot=0))
    load(slots, 0, "other")
    assert slots[0] == "other of other", "what was read is taken once"
