"""Keyframes: a loaded state goes on as the one it was made of, in the log's tokens too; other bytes are no state."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from log_drive import drawn_config, engine, small_config, started

from vnext.sched.schedule import schedule
from vnext.sched.sim.contents import contents, differences
from vnext.sched.sim.snapshot import Snapshot
from vnext.state import keyframe as keyframes, shape_names
from vnext.state.digest import digest
from vnext.state.events import StepPlanned
from vnext.state.keyframe import BadKeyframe, keyframe
from vnext.state.laws import check
from vnext.state.reduce import reduce, start
from vnext.state.shape import Shaper
from vnext.state.state import State

KEY = bytes(range(16))


def again(frame: keyframes.Keyframe, config, width: int = 2):
    return keyframes.load(keyframes.decode(keyframes.encode(frame, width)), config)


def differing(one: State, other: State) -> list[str]:
    """Parts in which two states say different things."""
    return differences(contents(Snapshot(one)), contents(Snapshot(other)))


@pytest.mark.parametrize("seed", range(50))
def test_a_loaded_state_goes_on_as_the_one_it_was_made_of(seed):
    """At any moment of any engine: the same contents and digest, and the same after every event that follows."""
    chance, config = random.Random(seed), drawn_config(random.Random(seed))
    loaded, made = start(started(config)), 0
    for events, befores, after, _ in engine(config, seed, arrivals=50):
        if befores and chance.random() < 0.2:
            loaded, made = again(keyframe(befores[0]), config), made + 1
            assert differing(loaded, befores[0]) == [] and digest(loaded) == digest(befores[0])
        for event in events:
            if isinstance(event, StepPlanned):
                assert schedule(loaded) == event
            loaded = reduce(loaded, event)
        assert digest(loaded) == digest(after)
    assert made > 3 and differing(loaded, after) == []


@pytest.mark.parametrize("left_tokens_max", [shape_names.LEFT_TOKENS_MAX, 30])
@pytest.mark.parametrize("seed", range(60))
def test_a_shaped_keyframe_is_that_of_the_folded_shapes(seed, left_tokens_max, monkeypatch):
    """What the engine derives from its own state is what the log's events lead to, also if it has to remember little."""
    monkeypatch.setattr(shape_names, "LEFT_TOKENS_MAX", left_tokens_max)
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


def busy_state(seed: int = 5):
    """A state with rows, a queue, steps in flight and kept blocks, and its configuration."""
    config = small_config()
    states = (befores[0] for _, befores, _, _ in engine(config, seed, arrivals=80) if befores)
    return next(s for s in states if len(s.rows) > 3 and s.waiting and len(s.flights) > 1 and s.pool.kept > 2), config


def test_tokens_are_packed_and_a_wide_one_widens_the_keyframe():
    state, config = busy_state()
    frame = keyframe(state)
    narrow, wide = keyframes.encode(frame, 2), keyframes.encode(frame, 4)
    life = frame.lives[0]
    odd = msgspec.structs.replace(life, tokens=life.tokens[:-4] + b"\0\0\1\0")
    widened = msgspec.structs.replace(frame, lives=(odd, *frame.lives[1:]))
    assert len(narrow) < len(wide) and keyframes.decode(narrow) == keyframes.decode(wide) == frame
    assert keyframes.decode(keyframes.encode(widened, 2)) == widened


@pytest.mark.parametrize(
    "change",
    [
        {"fields": ("id",)}, {"cells": b""}, {"tables": b""}, {"queue": b""}, {"named": b"", "keys": b"k" * 16},
        {"planned": 2**60}, {"head": -1}, {"queue_capacity": 2**60}, {"lives": ()}, {"flights": ()}, {"waits": ()},
        {"tables": np.full(999, 5, dtype=np.int32).tobytes()}, {"keys": b"short", "named": b"\0\0\0\0"},
    ],
)  # fmt: skip
def test_a_keyframe_that_cannot_be_is_refused(change):
    state, config = busy_state()
    with pytest.raises(BadKeyframe):
        keyframes.load(msgspec.structs.replace(keyframe(state), **change), config)
    with pytest.raises(BadKeyframe):
        keyframes.load(keyframe(state), small_config(block_count=5))


STATE, CONFIG = busy_state()
DATA = keyframes.encode(keyframe(STATE), 2)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_other_bytes_are_a_state_with_all_laws_or_refused(data):
    changed = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        check(keyframes.load(keyframes.decode(bytes(changed)), CONFIG))
    except BadKeyframe as error:
        assert str(error)
