"""Why the prefix cache had less of a prompt than it could have had: each way to lose it, and what is no loss."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from asked import LONG, SIZE, Asked
from msgspec.structs import replace

from vnext.runtime.engine import misses as misses_module
from vnext.runtime.protocol.stats import CacheMiss
from vnext.state.events import EnginePaused, WeightsChanged


@pytest.mark.parametrize("place", [1, 2, 5, 7, 8, 13, 16, 19, 20, 23])
def test_a_prompt_that_departs_from_an_earlier_one_says_where(place: int) -> None:
    asked = Asked()
    assert asked.ask(LONG) is None
    miss = asked.ask([*LONG[:place], 77, *LONG[place + 1 :]])
    assert miss == CacheMiss(reason="changed", at_token=place, lost_tokens=32 - place // SIZE * SIZE)
    assert asked.misses.losses.changed == miss.lost_tokens


@pytest.mark.parametrize("common", [1, 2, 3, 4, 9, 16])
def test_another_text_behind_the_same_beginning_has_lost_nothing(common: int) -> None:
    """As of a BOS, a template or a system message."""
    asked = Asked()
    asked.ask(LONG)
    assert asked.ask([*LONG[:common], *range(50, 82 - common)]) is None
    assert asked.misses.losses.changed == 0


@pytest.mark.parametrize("place", [1, 2, 6, 9])
@pytest.mark.parametrize("shift", [-3, -1, 1, 2, 5])
def test_a_text_that_is_shifted_has_changed(place: int, shift: int) -> None:
    """A clock of other length, a tool more, a message less."""
    asked = Asked()
    asked.ask(LONG)
    rest = LONG[place - min(shift, 0) :] if shift < 0 else [*range(70, 70 + shift), *LONG[place:]]
    miss = asked.ask([*LONG[:place], *rest])
    assert miss is not None and (miss.reason, miss.at_token) == ("changed", place) and miss.lost_tokens >= SIZE


@pytest.mark.parametrize(("kept", "is_lost"), [(4, False), (22, True)])
def test_most_of_the_rest_decides(kept: int, is_lost: bool) -> None:
    asked = Asked()
    asked.ask(LONG)
    miss = asked.ask([*LONG[:4], 77, *LONG[5 : 5 + kept], *range(50, 77 - kept)])
    assert (miss is not None) == is_lost


@pytest.mark.parametrize("place", [1, 7, 20])
def test_where_a_prompt_departs_from_another_clients_is_not_said(place: int) -> None:
    """Token by token, the place would let a stranger guess the other's text."""
    asked = Asked()
    asked.ask(LONG, client=5)
    assert asked.ask([*LONG[:place], 77, *LONG[place + 1 :]], client=6) is None
    assert asked.misses.losses.changed == 0


@pytest.mark.parametrize("place", [1, 9, 17, 20])
@pytest.mark.parametrize("others", [1, 2])
def test_what_other_clients_asked_meanwhile_hides_nothing(place: int, others: int) -> None:
    """Everyone's prompt begins with the same sixteen tokens."""
    asked = Asked(page_count=64)
    asked.ask(LONG, client=5)
    for other in range(others):
        asked.ask([*LONG[:16], *range(60 + other, 76 + other)], client=6 + other)
    changed = [*LONG[:place], 77, *LONG[place + 1 :]]
    miss = asked.ask(changed, client=5)
    assert miss == CacheMiss(reason="changed", at_token=place, lost_tokens=32 - place // SIZE * SIZE)
    assert asked.ask([*LONG[:place], 78, *LONG[place + 1 :]], client=9) is None, "a stranger learns nothing"


@pytest.mark.parametrize("place", [16, 18, 19])
def test_of_a_clients_talks_the_one_that_goes_on_alike_is_compared(place: int) -> None:
    """Two talks behind one instruction, in turns, and one of them changes where they part."""
    asked = Asked(page_count=64)
    talks = [[*LONG[:16], *range(50 + 20 * each, 66 + 20 * each)] for each in range(3)]
    for talk in talks:
        assert asked.ask(talk, client=5) is None
    for talk in talks:
        miss = asked.ask([*talk[:place], 99, *talk[place + 1 :]], client=5)
        assert miss is not None and (miss.reason, miss.at_token, miss.lost_tokens) == ("changed", place, 16)


@pytest.mark.parametrize("place", [5, 9, 17, 30])
def test_another_salts_text_is_never_compared(place: int) -> None:
    """One client may ask for several users, each with a salt: the same is said however much of the text is guessed."""
    asked = Asked(page_count=64)
    asked.ask(LONG, client=5, cache_salt="a")
    guess = [*LONG[:place], *range(60, 92 - place)]
    assert asked.ask(guess, client=5, cache_salt="b") == CacheMiss(reason="salt", at_token=0, lost_tokens=32)
    assert asked.ask([*LONG[:place], 99, *LONG[place + 1 :]], client=5, cache_salt="b") is None, "of its own salt, another text"


@pytest.mark.parametrize("gone", [2, 3, 4, 6, 8])
def test_blocks_that_have_left_are_evicted(gone: int) -> None:
    """The end of a prefix leaves before its beginning."""
    asked = Asked()
    asked.ask(LONG)
    asked.ask([90] * (4 * (8 + gone) - 2), client=99)
    left = 4 * (8 - gone)
    assert asked.ask(LONG) == CacheMiss(reason="evicted", at_token=left, lost_tokens=28 - left), "the last token is computed anyway"


def test_a_reset_of_the_cache_evicts_too() -> None:
    asked = Asked()
    asked.ask(LONG)
    asked.engine.reset()
    assert asked.ask(LONG) == CacheMiss(reason="evicted", at_token=0, lost_tokens=28)
    assert asked.ask(LONG) is None, "now it is there again"


@pytest.mark.parametrize("answer", [1, 6, 12])
def test_a_talk_that_goes_on_loses_nothing_and_its_answer_may_be_evicted(answer: int) -> None:
    asked = Asked(page_count=24)
    asked.ask(LONG[:16], max_tokens=answer)
    next_turn = [*LONG[:16], *[9] * answer, 50, 51, 52, 53]
    assert asked.ask(next_turn) is None
    asked.engine.reset()
    miss = asked.ask(next_turn)
    assert miss is not None and (miss.reason, miss.at_token) == ("evicted", 0)
    assert miss.lost_tokens == (len(next_turn) - 1) // SIZE * SIZE


@pytest.mark.parametrize("place", [16, 18, 21, 24])
def test_an_answer_that_comes_back_otherwise_is_found(place: int) -> None:
    """As where a client strips reasoning, or a tokenizer splits an answer in another way."""
    asked = Asked(page_count=24)
    asked.ask(LONG[:16], max_tokens=14)
    text = [*LONG[:16], *[9] * 13, 50, 51, 52]
    text[place] = 77
    miss = asked.ask(text)
    assert miss is not None and (miss.reason, miss.at_token) == ("changed", place)
    assert miss.lost_tokens == 28 - place // SIZE * SIZE


def test_a_prompt_that_is_being_computed_is_no_eviction() -> None:
    asked = Asked(max_num_batched_tokens=8, page_count=32)
    asked.engine.arrive(LONG, 1)
    asked.plan()
    asked.engine.arrive(LONG, 1)
    asked.engine.commit()
    asked.engine.fold(asked.engine.decide() or pytest.fail("no plan"))
    found: dict[int, CacheMiss] = {}
    while not found and asked.engine.state.requests:
        while asked.engine.state.in_flight:
            asked.engine.commit(*[9] * int(asked.engine.state.in_flight[0].samples.sum()))
        found = asked.plan() if asked.engine.state.requests else {}
    assert {each.reason for each in found.values()} <= {"computing"}


@pytest.mark.parametrize(("changes", "reason"), [({"cache_salt": "b"}, "salt"), ({"adapter": ""}, None)])
def test_a_wall_that_the_same_client_put_up(changes: dict[str, str], reason: str | None) -> None:
    asked = Asked()
    asked.ask(LONG, client=5, cache_salt="a")
    miss = asked.ask(LONG, client=5, **{"cache_salt": "a"} | changes)
    assert (miss and miss.reason) == reason
    assert miss is None or miss == CacheMiss(reason="salt", at_token=0, lost_tokens=32)


@pytest.mark.parametrize("client", [0, 6])
def test_nothing_is_said_of_another_clients_prompts(client: int) -> None:
    asked = Asked()
    asked.ask(LONG, client=5, cache_salt="a")
    assert asked.ask(LONG, client=client, cache_salt="b") is None
    assert asked.ask([*LONG[:9], 77, *LONG[10:]], client=client + 1, cache_salt="c") is None


def test_other_weights_have_nothing_of_the_earlier_ones() -> None:
    asked = Asked()
    asked.ask(LONG, client=5)
    asked.engine.fold(EnginePaused(mode="keep"))
    asked.engine.fold(WeightsChanged(version=1, digest="d", path="p"))
    asked.engine.fold(EnginePaused(mode=""))
    miss = asked.ask(LONG, client=5)
    assert miss == CacheMiss(reason="weights", at_token=0, lost_tokens=32)


@pytest.mark.parametrize(
    ("first", "second"),
    [(LONG, LONG), (LONG, LONG[:16]), (LONG[:16], LONG), (LONG, [77, *LONG]), (LONG[:3], LONG[:3]), (LONG, [10, 77, 78])],
)
def test_what_is_no_loss(first: list[int], second: list[int]) -> None:
    """The same prompt, a part of it, one that goes on, one that is new, and those without a block."""
    asked = Asked()
    assert asked.ask(first) is None and asked.ask(second) is None
    assert sum(getattr(asked.misses.losses, name) for name in asked.misses.losses.__struct_fields__) == 0


def test_no_cache_no_loss() -> None:
    asked = Asked(prefix_caching=False)
    assert asked.ask(LONG) is None and asked.ask([77, *LONG[1:]]) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses_module, "BLOCKS_REMEMBERED_MIN", 8)
    monkeypatch.setattr(misses_module, "SEEN_BYTES_MAX", 9_000)
    asked, rng = Asked(), np.random.default_rng(1)
    for _ in range(100):
        asked.ask(rng.integers(10, 90, 32).tolist(), max_tokens=3, client=int(rng.integers(1, 10)))
    misses = asked.misses
    assert max(misses._asked.size, misses._asked_before.size) <= 4 * 16 + 9 and len(misses._firsts) <= 8 and misses._seen_bytes <= 9_000
    assert misses._asked_before.size > 4 * 16
    assert len(misses._recent) <= 10 and max(map(len, misses._recent.values())) <= 3
    assert misses._seen_bytes == sum(each.size_bytes for each in misses._seen.values())


def test_a_request_that_is_remembered_takes_what_it_counts_as() -> None:
    """However short its prompt is."""
    asked, rng = Asked(), np.random.default_rng(1)

    def ask(count: int) -> None:
        for _ in range(count):
            asked.ask(rng.integers(10, 90, 8).tolist(), max_tokens=3, client=int(rng.integers(1, 10)))

    ask(100)
    before = asked.misses._seen_bytes
    tracemalloc.start()
    ask(300)
    counted, held = asked.misses._seen_bytes - before, tracemalloc.get_traced_memory()[0]
    asked.misses._seen.clear()
    taken = held - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * taken < counted < 1.5 * taken


def plain_common(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def plain_goes_on_alike(one: list[int], other: list[int], common: int) -> bool:
    """Half of the rest is the same at the same place, or half of eight samples are anywhere."""
    rest = list(zip(one, other))[common:]
    if not common or 2 * sum(a == b for a, b in rest) >= len(rest):
        return bool(common)
    first, last = common + 1, len(other) - 8
    places = [first + (last - first) * each // 7 for each in range(8)] if last >= first else []
    there = {tuple(one[at : at + 8]) for at in range(common, len(one))}
    return sum(tuple(other[at : at + 8]) in there for at in places) >= 4


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_compared_as_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(150):
        one = rng.integers(0, 50, rng.integers(0, 300)).tolist()
        at, cut = sorted(rng.integers(0, len(one) + 1, 2).tolist())
        size = cut - at if rng.random() < 0.5 else int(rng.integers(0, 60))
        other = [*one[:at], *rng.integers(0, 50, size).tolist(), *one[cut if rng.random() < 0.7 else len(one) :]]
        both = [np.array(each, np.int32).tobytes() for each in (one, other)]
        common = plain_common(one, other)
        assert misses_module._goes_on_alike(*both, common) == plain_goes_on_alike(one, other, common)


@pytest.mark.parametrize("seed", range(4))
def test_the_request_with_most_in_common_is_looked_at_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        asked, text = Asked(), rng.integers(10, 40, 40).tolist()
        for _ in range(4):
            asked.ask([*text[: int(rng.integers(1, 40))], *rng.integers(50, 60, 6).tolist()], client=5)
        misses, request = asked.misses, next(iter(asked.misses._seen.values())).request
        new = np.array([*text, 7], np.int32).tobytes()
        root = next(iter(misses._seen.values())).root
        alike, earlier = misses._alike(replace(request, prompt=new), root, None, misses_module.NOWHERE)
        common = [each for each, _ in alike]
        assert common == sorted(common, reverse=True) and sorted(place for _, place in alike) == [0, 1, 2] and len(earlier) == 3
        assert common == [plain_common(np.frombuffer(earlier[place].tokens, np.int32).tolist(), [*text, 7]) for _, place in alike]
