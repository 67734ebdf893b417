"""Keyframes: a loaded state goes on as the one it was made of, in the log's tokens too; other bytes are no state."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_drive import drawn_config, engine, started

from vnext.sched.schedule import schedule
from vnext.sched.sim.contents import contents, differences
from vnext.state import keyframe as keyframes
from vnext.state.digest import digest
from vnext.state.events import StepPlanned
from vnext.state.keyframe import BadKeyframe, keyframe
from vnext.state.reduce import reduce, start
from vnext.state.shape import Shaper

KEY = bytes(range(16))


def again(frame: keyframes.Keyframe, config, width: int = 2):
    return keyframes.load(keyframes.decode(keyframes.encode(frame, width)), config)


@pytest.mark.parametrize("seed", range(120))
def test_a_loaded_state_goes_on_as_the_one_it_was_made_of(seed):
    """At any moment of any engine: the same contents and digest, and the same after every event that follows."""
    chance, config = random.Random(seed), drawn_config(random.Random(seed))
    loaded, made = start(started(config)), 0
    for events, befores, after, _ in engine(config, seed, arrivals=50):
        if befores and chance.random() < 0.2:
            loaded, made = again(keyframe(befores[0]), config), made + 1
            assert differences(contents(loaded), contents(befores[0])) == [] and digest(loaded) == digest(befores[0])
        for event in events:
            if isinstance(event, StepPlanned):
                assert schedule(loaded) == event
            loaded = reduce(loaded, event)
        assert digest(loaded) == digest(after)
    assert made > 3 and differences(contents(loaded), contents(after)) == []


@pytest.mark.parametrize("seed", range(120))
def test_a_shaped_keyframe_is_that_of_the_folded_shapes(seed):
    """What the engine derives from its own state is what the log's events lead to."""
    chance, config = random.Random(seed), drawn_config(random.Random(seed))
    shaper, shaped_state, made = Shaper(started(config), KEY), start(started(config)), 0
    for events, befores, _, _ in engine(config, seed, arrivals=50):
        if befores and chance.random() < 0.2:
            due = msgspec.structs.replace(keyframe(shaped_state), token_digest=0)
            found = shaper.keyframe(befores[0])
            assert [name for name in due.__struct_fields__ if getattr(due, name) != getattr(found, name)] == []
            shaped_state, made = again(found, config), made + 1
        for before, event in zip(befores, events, strict=True):
            shaped_state = reduce(shaped_state, shaper.shape(before, event))
    assert made > 3
