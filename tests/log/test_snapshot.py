"""Snapshots: a loaded state goes on as the one it was made of, in the log's tokens too; other bytes are no state."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from log_drive import drawn_config, engine, small_config, started

from vnext.log import redacted_blocks, snapshot as snapshots
from vnext.log.redaction import Redactor
from vnext.log.snapshot import BadSnapshot, snapshot
from vnext.sched.schedule import schedule
from vnext.sim.checks.plain_state import PlainState, contents, differences
from vnext.state.digest import digest
from vnext.state.events import RequestArrived, StepPlanned, pack_tokens
from vnext.state.laws import check
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

KEY = bytes(range(16))


def again(frame: snapshots.Snapshot, config, width: int = 2):
    return snapshots.load(snapshots.decode(snapshots.encode(frame, width)), config)


def differing(one: State, other: State) -> list[str]:
    """Parts in which two states say different things."""
    return differences(contents(PlainState(one)), contents(PlainState(other)))


@pytest.mark.parametrize("seed", range(50))
def test_a_loaded_state_goes_on_as_the_one_it_was_made_of(seed):
    """At any moment of any engine: the same contents and digest, and the same after every event that follows."""
    rng, config = random.Random(seed), drawn_config(random.Random(seed))
    loaded, made = start(started(config)), 0
    for events, befores, after, _ in engine(config, seed, arrivals=50):
        if befores and rng.random() < 0.2:
            loaded, made = again(snapshot(befores[0]), config), made + 1
            assert differing(loaded, befores[0]) == [] and digest(loaded) == digest(befores[0])
        for event in events:
            if isinstance(event, StepPlanned):
                assert schedule(loaded) == event
            loaded = reduce(loaded, event)
        assert digest(loaded) == digest(after)
    assert made > 3 and differing(loaded, after) == []


@pytest.mark.parametrize("left_tokens_max", [redacted_blocks.LEFT_TOKENS_MAX, 30])
@pytest.mark.parametrize("seed", range(60))
def test_a_shaped_snapshot_is_that_of_the_folded_shapes(seed, left_tokens_max, monkeypatch):
    """What the engine derives from its own state is what the log's events lead to, also if it has to remember little."""
    monkeypatch.setattr(redacted_blocks, "LEFT_TOKENS_MAX", left_tokens_max)
    rng, config = random.Random(seed), drawn_config(random.Random(seed))
    redactor, shaped_state, made = Redactor(started(config), KEY), start(started(config)), 0
    for events, befores, _, _ in engine(config, seed, arrivals=50):
        if befores and rng.random() < 0.2:
            due = msgspec.structs.replace(snapshot(shaped_state), token_digest=0)
            found = redactor.snapshot(befores[0])
            assert [name for name in due.__struct_fields__ if getattr(due, name) != getattr(found, name)] == []
            shaped_state, made = again(found, config), made + 1
        for before, event in zip(befores, events, strict=True):
            shaped_state = reduce(shaped_state, redactor.redact(before, event))
    assert made > 3


def test_short_requests_that_left_are_forgotten_in_time(monkeypatch):
    """What is remembered is bounded by the memory it takes, not by the tokens alone."""
    monkeypatch.setattr(redacted_blocks, "LEFT_TOKENS_MAX", 10 * redacted_blocks.LEFT_OVERHEAD_TOKENS)
    config, remembered = small_config(), []
    redactor = Redactor(started(config), KEY)
    for events, befores, _, _ in engine(config, 5, arrivals=80):
        for before, event in zip(befores, events, strict=True):
            redactor.redact(before, event)
            remembered.append(len(redactor._redacted_blocks._left))
    assert 5 <= max(remembered) <= 10


@pytest.mark.parametrize("windows", [(), (8,)])
def test_a_request_that_leaves_has_about_one_other_forgotten(monkeypatch, windows):
    """No event has the work of the many that left before it."""
    monkeypatch.setattr(redacted_blocks, "LEFT_TOKENS_MAX", 60 * redacted_blocks.LEFT_OVERHEAD_TOKENS)
    config = small_config(windows=windows, page_count=4000)
    redactor, named, works = Redactor(started(config), KEY), [], []
    blocks = redactor._redacted_blocks
    chain = blocks.chain
    monkeypatch.setattr(blocks, "chain", lambda *history: named.append(history) or chain(*history))
    for events, befores, _, _ in engine(config, 5, arrivals=250):
        for before, event in zip(befores, events, strict=True):
            redactor.redact(before, event)
            works.append((blocks._left_count, blocks._left_count - len(blocks._left), len(named)))
    assert works[-1][1] > 100 and works[-1][2] > 20, "many were forgotten, and some of them named"
    for (left, forgotten, made), (left_then, forgotten_then, made_then) in pairwise(works):
        most = 2 * (left_then - left)
        assert forgotten_then - forgotten <= most and made_then - made <= most


def busy_state(seed: int = 5):
    """A state with rows, a queue, steps in flight and kept blocks, and its configuration."""
    config = small_config()
    states = (befores[0] for _, befores, _, _ in engine(config, seed, arrivals=80) if befores)
    return next(s for s in states if len(s.rows) > 3 and s.waiting and len(s.in_flight) > 1 and s.pool.kept > 2), config


def test_tokens_are_packed_and_a_wide_one_widens_the_snapshot():
    state, config = busy_state()
    frame = snapshot(state)
    narrow, wide = snapshots.encode(frame, 2), snapshots.encode(frame, 4)
    life = frame.lives[0]
    odd = msgspec.structs.replace(life, tokens=life.tokens[:-4] + b"\0\0\1\0")
    widened = msgspec.structs.replace(frame, lives=(odd, *frame.lives[1:]))
    assert len(narrow) < len(wide) and snapshots.decode(narrow) == snapshots.decode(wide) == frame
    assert snapshots.decode(snapshots.encode(widened, 2)) == widened


@pytest.mark.parametrize(
    "change",
    [
        {"fields": ("id",)}, {"cells": b""}, {"tables": b""}, {"queue": b""}, {"named": b"", "keys": b"k" * 16},
        {"planned": 2**60}, {"head": -1}, {"queue_capacity": 2**60}, {"lives": ()}, {"in_flight": ()}, {"waits": ()},
        {"tables": np.full(999, 5, dtype=np.int32).tobytes()}, {"keys": b"short", "named": b"\0\0\0\0"},
    ],
)  # fmt: skip
def test_a_snapshot_that_cannot_be_is_refused(change):
    state, config = busy_state()
    with pytest.raises(BadSnapshot):
        snapshots.load(msgspec.structs.replace(snapshot(state), **change), config)
    with pytest.raises(BadSnapshot):
        snapshots.load(snapshot(state), small_config(page_count=5))


STATE, CONFIG = busy_state()
DATA = snapshots.encode(snapshot(STATE), 2)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_other_bytes_are_a_state_with_all_laws_or_refused(data):
    changed = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        check(snapshots.load(snapshots.decode(bytes(changed)), CONFIG))
    except BadSnapshot as error:
        assert str(error)


def test_a_state_larger_than_the_smallest_arena_is_loaded_whole():
    """Histories of 6,000 places and tables of as many blocks: arenas are as large as what is in them."""
    config = small_config(block_size=1, page_count=7_000, max_model_len=4_000, max_num_batched_tokens=8_000, max_num_seqs=4)
    state = start(started(config))
    for id_ in range(2):
        prompt = pack_tokens([1 + id_] * 3_000)
        state = reduce(
            state,
            RequestArrived(
                id=id_, name="", prompt=prompt, sampling=Sampling(seed=1, max_tokens=9), priority=0, arrival_ns=0
            ),
        )
    state = reduce(state, schedule(state))
    loaded = again(snapshot(state), config)
    check(loaded)
    assert differing(loaded, state) == []


@pytest.mark.parametrize("data", [b"", b"no snapshot", DATA[:-1], DATA + b"x"], ids=["none", "text", "cut", "longer"])
def test_other_bytes_are_refused_by_name(data):
    with pytest.raises(BadSnapshot, match="another form"):
        snapshots.decode(data)
