"""Shape keeps every decision and no text: equal prefixes stay equal, ends stay ends, tokens and names are gone."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from log_drive import engine, small_config, started

from vnext.log import pseudonyms
from vnext.log.codec import pseudonym_base, token_bound
from vnext.log.redaction import Redactor, redact_sampling
from vnext.log.snapshot import load, snapshot
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Constraint, Sampling
from vnext.state.reduce import reduce, start

KEY = bytes(range(16))


def named(tokens: list[int], block_size: int, base: int, salt: str = "", key: bytes = KEY) -> list[int]:
    """Pseudonyms of a history by the vectorised path."""
    data = pack_tokens(tokens)
    secrets = pseudonyms.words(pseudonyms.block_secrets(key, pseudonyms.root_secret(key, salt), data, block_size))
    return pseudonyms.pseudonyms(secrets, np.asarray(tokens, dtype=np.int32), block_size, base)[0].tolist()


def common(one: list[int], two: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def test_a_block_of_unknown_content_has_a_label_of_its_own():
    labels = {pseudonyms.block_label(key, name) for key in (KEY, bytes(16)) for name in (b"", b"one", b"two")}
    assert len(labels) == 6 and {len(label) for label in labels} == {16}


@pytest.mark.parametrize("base", [2**8, 2**18, 2**30])
def test_every_position_permutes_its_tokens(base):
    tokens = np.arange(base - 256, base, dtype=np.int64).astype(np.int32)
    secrets = np.full((256, 2), 12345678901234567, dtype=np.uint64)
    for place in range(20):
        places, sums = np.full(256, place, dtype=np.uint64), np.full(256, 99 * place, dtype=np.uint64)
        found = pseudonyms.permuted(secrets, places, sums, tokens, base)
        assert len(set(found.tolist())) == 256 and found.min() >= base and int(found.max()) < 2 * base


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_two_histories_are_equal_exactly_as_far_as_before(one, two, block_size):
    one_named, two_named = named(one, block_size, 256), named(two, block_size, 256)
    for end in range(block_size, min(len(one), len(two)) + 1, block_size):
        assert (one[:end] == two[:end]) == (one_named[:end] == two_named[:end])
    assert common(one, two) == common(one_named, two_named) or common(one, two) < min(len(one), len(two))
    assert one_named[: common(one, two)] == two_named[: common(one, two)]


def test_the_key_the_salt_and_the_past_change_a_pseudonym():
    tokens = [7] * 32
    plain = named(tokens, 16, 2**18)
    assert common(plain, named(tokens, 16, 2**18, salt="a")) == 0
    assert common(plain, named(tokens, 16, 2**18, key=bytes(16))) == 0
    assert len(set(plain)) == 32
    assert named([8, *tokens[1:]], 16, 2**18)[1:] != plain[1:]


def test_pseudonyms_of_a_common_token_are_spread_over_the_whole_range():
    values = np.array(named([5] * 40_000, 16, 2**18)) - 2**18
    counts = np.bincount(values >> 12, minlength=64)
    assert abs(counts - 625).max() < 150


def test_pseudonyms_never_meet_the_vocabulary_and_fit_the_width():
    for vocab_size in (6, 256, 257, 50_257, 128_256, 262_144, 0):
        config = small_config(vocab_size=vocab_size)
        base = pseudonym_base(config)
        assert base >= vocab_size and (not vocab_size or token_bound(config, "shape") == 2 * base)
        assert 2 * base <= 2**31
    assert token_bound(small_config(vocab_size=128_256), "shape") <= 2**24
    assert pseudonym_base(small_config(vocab_size=256, eos_token_ids=(2, 300))) > 300
    smallest = {vocab_size: pseudonym_base(small_config(vocab_size=vocab_size)) for vocab_size in (256, 257, 1024, 1025)}
    assert smallest == {256: 256, 257: 1024, 1024: 1024, 1025: 4096}, "a power of four that is large enough is enough"


def test_nothing_of_the_client_is_left():
    redactor, config = Redactor(started(small_config()), KEY), small_config()
    event = RequestArrived(
        id=0, name="secret name", prompt=pack_tokens([1, 2, 3]), priority=4, arrival_ns=9, cache_salt="secret salt",
        sampling=Sampling(seed=77, max_tokens=5, logit_bias=((9, 2.0), (11, -1.0)), stop_token_ids=(3,)),
    )  # fmt: skip
    shaped = redactor.redact(start(started(config)), event)
    assert (shaped.name, shaped.priority, shaped.arrival_ns) == ("0", 4, 9)
    assert "secret" not in shaped.cache_salt and shaped.cache_salt
    assert not set(unpack_tokens(shaped.prompt).tolist()) & {1, 2, 3} and len(shaped.prompt) == 12
    assert shaped.sampling == Sampling(seed=0, max_tokens=5, logit_bias=((0, 0.0), (1, 0.0)), stop_token_ids=(3,))
    assert redact_sampling(Sampling(seed=1, max_tokens=1), 256).logit_bias == ()
    assert redact_sampling(Sampling(seed=1, max_tokens=1, stop_token_ids=(9, 256)), 256).stop_token_ids == (9, -1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline_depth": 1, "policy": "priority"},
        {"pipeline_depth": 3, "block_size": 1, "page_count": 90},
        {"pipeline_depth": 2, "block_size": 2, "page_count": 32},
        {"prefix_caching": False},
        {"windows": (6,)},
        {"windows": (0, 5, 1), "page_count": 60},
    ],
)
def test_every_decision_and_digest_replays_from_the_shape(seed, changes):
    config = small_config(**changes)
    redactor, state, kept, text = Redactor(started(config), KEY), start(started(config)), set(), 0
    for events, befores, after, _ in engine(config, seed, arrivals=40):
        for event, before in zip(events, befores, strict=True):
            shaped = redactor.redact(before, event)
            if isinstance(shaped, StepPlanned):
                assert schedule(state) == shaped
            reported = outputs(state, shaped, folded := reduce(state, shaped))
            true = outputs(before, event, reduce(before, event))
            assert [(o.id, o.sample, o.finish, o.stop_token) for o in reported] == [
                (o.id, o.sample, o.finish, o.stop_token) for o in true
            ]
            state = folded
            if isinstance(shaped, StepCommitted):
                stops = {o.sample for o in reported if o.finish == "stop"}
                values = unpack_tokens(shaped.tokens).tolist()
                kept |= {value for place, value in enumerate(values) if place in stops}
                text += sum(0 < value < 256 for place, value in enumerate(values) if place not in stops)
        assert digest(state) == digest(after)
    assert text == 0 and kept <= {0, 3} and state.counters.finished > 20
    assert state.counters.prefix_hit_tokens > 0 or not config.prefix_caching


def test_the_tails_of_ended_requests_are_forgotten():
    config = small_config()
    redactor = Redactor(started(config), KEY)
    for events, befores, _, _ in engine(config, 3, arrivals=300):
        for event, before in zip(events, befores, strict=True):
            redactor.redact(before, event)
    assert len(redactor._open_blocks) < 100


def test_a_constraint_is_not_in_a_redacted_log() -> None:
    constrained = Sampling(seed=1, max_tokens=1, constraint=Constraint(grammar="the client's words"))
    assert redact_sampling(constrained, 256).constraint is None


def test_a_log_without_texts_tells_clients_apart_and_names_none():
    config = small_config(policy="fair")
    redactor, state, shown = Redactor(started(config), KEY), start(started(config)), []
    for id_, client in enumerate((5, 6, 5, 0)):
        sampling = Sampling(seed=1, max_tokens=2, temperature=0.0)
        event = RequestArrived(
            id=id_, name="n", prompt=pack_tokens([1, 2]), sampling=sampling, priority=0, arrival_ns=1, client=client
        )
        shown.append(redactor.redact(state, event).client)
        state = reduce(state, event)
    assert shown[0] == shown[2] and shown[3] == 0 and len({*shown, 5, 6}) == 5
    found = redactor.snapshot(state)
    assert [life.client for life in found.lives] == shown
    assert {number for _, number, _ in found.clients.live} == set(shown)
    assert {label: charged for _, label, charged in found.clients.live} == {
        dict(zip((5, 6, 0), (shown[0], shown[1], 0)))[number]: charged for _, number, charged in snapshot(state).clients.live
    }


def test_who_is_alone_is_so_in_a_snapshot_too() -> None:
    config = small_config(policy="fair", counts_alone=False)
    redactor, real = Redactor(started(config), KEY), start(started(config))
    arrivals = [
        RequestArrived(
            id=id_, name="n", prompt=pack_tokens([1, 2]), sampling=Sampling(seed=1, max_tokens=2), priority=3, arrival_ns=1, client=client
        )
        for id_, client in enumerate((5, 5, 6))
    ]
    for event in arrivals[:2]:
        redactor.redact(real, event)
        real = reduce(real, event)
    found, shown = load(snapshot(real), config), redactor.snapshot(real).clients
    assert real.clients.alone == found.clients.alone == (3, 5) and shown.alone not in (None, (3, 5)) and shown.live == ()
    after, again = reduce(real, arrivals[2]), reduce(found, arrivals[2])
    assert digest(found) == digest(real) and digest(again) == digest(after)
    assert after.clients.alone is None and dict(after.clients.live.items())[3, 5].queue == (0, 1)


def test_no_private_text_is_left_in_any_event() -> None:
    """By their traits: a text is empty, of a folder its last name remains, and names of blocks are others."""
    state = start(started(small_config()))
    redactor = Redactor(started(small_config()), bytes(16))
    for kind in get_args(AnyEvent):
        if kind.traits.transfer in ("begins", "ends") or kind.traits.keyed or kind.traits.tokens:
            continue  # these depend on what came before; the tests above and the simulator's tape have them
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        samples = {"str": "/secret/last", "bytes": b"secret secret 16"}
        texts = {name: samples[fields[name].__name__] for name in (*kind.traits.private, *kind.traits.folders, *kind.traits.hashes)}
        needed = {"digest": "d", "slot": 0, "cause": "c", "version": 1, "capacity": 9}
        event = kind(**{name: value for name, value in (needed | texts).items() if name in fields}) if texts else None
        if event is not None:
            shown = redactor.redact(state, event)
            assert [getattr(shown, name) for name in kind.traits.private] == [""] * len(kind.traits.private)
            assert [getattr(shown, name) for name in kind.traits.folders] == ["last"] * len(kind.traits.folders)
            assert all(getattr(shown, name) != getattr(event, name) and len(getattr(shown, name)) == 16 for name in kind.traits.hashes)
