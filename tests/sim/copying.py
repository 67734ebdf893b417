"""Copies of a simulation: a run that goes on from one place in several ways, without a fork of the process or a second beginning.

Owns what is copied and what may be shared. Frozen structs, states and what has been read of them are values: the copies share
them, as replicas and histories do, so that a state has several futures, and law Y2 notices one that writes into another's. What
changes is copied once, however many hold it: ranks and engine that draw from one stream still do. Anything else is an error, so
that nothing is shared by oversight; so are the encoders of a log.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any, TypeVar

import msgspec
import numpy as np

from tests.sim.deciding import DecidingCore, TurnBook
from tests.sim.fleet import Fleet
from tests.sim.shortages import Shortages
from tests.sim.simulator import Simulation
from tests.sim.streams import Streams
from tests.sim.tier import SimClock, SimSearches, SimTier
from tests.sim.weight_changes import WeightChanges
from vnext.sampling.constraint import Matcher
from vnext.sched.engine import Engine
from vnext.sim.checks.accounting import Accounting, Entry
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.checks.run_laws import ClientBook, EncodingBook, PinBook
from vnext.sim.core import History
from vnext.sim.rank import Rank
from vnext.sim.rank_values import Contents
from vnext.sim.rng import Rng
from vnext.sim.states import ShadowStates
from vnext.sim.story import Story
from vnext.sim.toy import ToyMatcher, ToyVocabulary

Copied = TypeVar("Copied")
VALUES = {int, str, bytes, bool, float, frozenset, FunctionType, NoneType, type, PlainState, History, ToyVocabulary, Path}
ENTITIES = {
    Accounting, ClientBook, Contents, DecidingCore, EncodingBook, Engine, Entry, Fleet, Matcher, PinBook, Rank, Rng, ShadowStates, Shortages, SimClock, SimSearches, SimTier, Story,
    Streams, ToyMatcher, TurnBook, WeightChanges,
}  # fmt: skip


def copy_of(simulation: Copied) -> Copied:
    """A simulation that goes on as this one does, and neither touches the other. Raises TypeError where it holds anything of which
    that is not known."""
    found: Copied = _copy(simulation, {})
    return found


def _copy(value: Any, known: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in VALUES or (issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen):
        return value
    if (found := known.get(id(value))) is None:
        found = known[id(value)] = _new(kind, value, known)
    return found


def _new(kind: type, value: Any, known: dict[int, Any]) -> Any:
    if kind is list or kind is deque:
        if value and type(value[0]) is int:
            return value.copy()  # of numbers, all of it
        return kind(_copy(each, known) for each in value)
    if kind is dict:
        return {key: _copy(each, known) for key, each in value.items()}
    if kind is set or kind is np.ndarray:
        return value.copy()
    if issubclass(kind, tuple):
        return value if all(_copy(each, known) is each for each in value) else _refuse(kind)
    if kind not in ENTITIES and not issubclass(kind, Simulation):
        _refuse(kind)
    new = known[id(value)] = object.__new__(kind)
    for name in _names(kind, value):
        object.__setattr__(new, name, _copy(getattr(value, name), known))
    return new


def _names(kind: type, value: Any) -> list[str]:
    """The attributes of an entity, in its slots or not."""
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", ())]


def _refuse(kind: type) -> Any:
    raise TypeError(f"a simulation that holds a {kind.__name__} cannot be copied")
