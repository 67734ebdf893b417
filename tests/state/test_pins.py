"""Pins: the blocks that a request wants to stay are evicted by nobody until their time is over, within their share of the pages."""

from __future__ import annotations

import pytest

from tests.core_drive import Engine
from vnext.log.log_plain import WIDTH_MAX
from vnext.log.snapshot import decode, encode, load, snapshot
from vnext.sched.pinning import TICK_S, next_tick, next_yield, tick_due_s
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import ClockTicked, EnginePaused, PinsYielded, WeightsChanged
from vnext.state.outputs import Retained
from vnext.state.pool import pinned_count, pinned_pages

PROMPT = list(range(1, 14))
"""Three full blocks and a token."""


def served(engine: Engine, prompt: list[int], *retention: tuple[int, int], max_tokens: int = 1, **fields: object) -> int:
    """A request that runs to its end; how many of its tokens were hits."""
    id_ = engine.arrive(prompt, max_tokens=max_tokens, retention=retention, **fields)
    engine.plan()
    hit = engine.field(id_, "cached")
    engine.run_out()
    return hit


def flood(engine: Engine) -> None:
    """Requests that pass through every page which nobody holds."""
    for start in range(14, 14 + 4 * engine.state.config.page_count, 8):
        served(engine, [start % 90 + 1, start // 90 + 1, 3, 4, start % 90 + 1, 6, 7, 8])


def with_pins(**config: object) -> Engine:
    return Engine(**{"pinned_kv_fraction": 0.5} | config)


def test_a_pin_outlives_a_flood_until_its_time_is_over():
    engine = with_pins()
    served(engine, PROMPT, (13, 300))
    flood(engine)
    assert pinned_count(engine.state.pool) == 3 and served(engine, PROMPT) == 12
    engine.fold(ClockTicked(seconds=299))
    flood(engine)
    assert served(engine, PROMPT) == 12
    engine.fold(ClockTicked(seconds=300))
    assert pinned_count(engine.state.pool) == 0 and engine.free == 16
    flood(engine)
    assert served(engine, PROMPT) == 0 and engine.state.pool.pins.expired == 3


def test_without_a_pin_a_flood_takes_everything():
    engine = with_pins()
    served(engine, PROMPT)
    flood(engine)
    assert served(engine, PROMPT) == 0 and engine.state.pool.pins is None


def test_a_beginning_stays_and_its_end_goes():
    engine = with_pins()
    served(engine, PROMPT, (9, 300))
    flood(engine)
    assert served(engine, PROMPT) == 8, "two full blocks of nine tokens"


def test_an_answer_stays_with_its_prompt():
    engine = with_pins()
    engine.arrive(PROMPT, max_tokens=5, retention=((100, 300),))
    engine.run_out()
    flood(engine)
    assert served(engine, [*PROMPT, 9, 9, 9, 9, 9]) == 16, "all but the last token, which nobody has computed"


def test_an_answers_last_token_pins_nothing():
    """Nothing has computed it for this request. A block that ends with it is another request's, in whose log it has another name."""
    engine = with_pins()
    asked = engine.arrive(PROMPT[:6], max_tokens=2, retention=((8, 300),))
    engine.step(PROMPT[6])
    engine.arrive(PROMPT[:9])
    engine.plan()
    engine.commit(PROMPT[7], 9)
    assert asked not in engine.running and pinned_count(engine.state.pool) == 1, "of its eight tokens seven are computed"


def test_of_two_beginnings_each_has_its_time_and_a_later_use_prolongs_it():
    engine = with_pins()
    served(engine, PROMPT, (12, 300), (4, 3600))
    engine.fold(ClockTicked(seconds=200))
    served(engine, PROMPT, (8, 300))
    engine.fold(ClockTicked(seconds=300))
    assert pinned_count(engine.state.pool) == 2
    engine.fold(ClockTicked(seconds=500))
    assert pinned_count(engine.state.pool) == 1, "the first block has an hour"
    engine.fold(ClockTicked(seconds=3600))
    assert pinned_count(engine.state.pool) == 0


def test_pins_never_hold_more_than_their_share_and_those_that_end_first_give_way():
    engine = with_pins(pinned_kv_fraction=0.25)
    served(engine, PROMPT, (12, 300))
    other = [50 + token for token in PROMPT]
    served(engine, other, (12, 3600))
    assert (pinned_count(engine.state.pool), engine.state.pool.pins.displaced) == (4, 2)
    flood(engine)
    assert served(engine, other) == 12 and served(engine, PROMPT) == 4, "the end of a prefix goes before its beginning"
    served(engine, [9] * 13, (12, 60))
    assert pinned_count(engine.state.pool) == 4 and engine.state.pool.pins.displaced == 5, "and at once where it ends first"


def last_news(engine: Engine, prompt: list[int], *retention: tuple[int, int], **fields: object) -> Retained | None:
    """What a request's last output says of its pins."""
    engine.arrive(prompt, retention=retention, **{"max_tokens": 1} | fields)
    engine.run_out()
    return engine.news[-1].retained


@pytest.mark.parametrize("windows", [(), (0, 4)])
def test_the_last_output_says_how_much_stays_and_how_much_gave_way(windows: tuple[int, ...]):
    engine = with_pins(windows=windows, page_count=16 * max(1, len(windows)), pinned_kv_fraction=0.25)
    assert last_news(engine, PROMPT) is None
    assert last_news(engine, PROMPT, (9, 300)) == (8, 0), "whole blocks"
    assert last_news(engine, [50 + token for token in PROMPT], (6, 3600), (5, 60), max_tokens=5) == (4, 0)
    engine = with_pins(windows=windows, page_count=16 * max(1, len(windows)), pinned_kv_fraction=0.125)
    assert last_news(engine, PROMPT, (100, 300), max_tokens=5)[0] < 16 == sum(engine.news[-1].retained)
    assert last_news(engine, [9] * 13, (12, 60)) == (0, 12), "others last longer"
    assert last_news(with_pins(pinned_kv_fraction=0.0), PROMPT, (13, 300)) == (0, 12)


def test_an_engine_without_a_share_pins_nothing():
    for engine in (Engine(), with_pins(prefix_caching=False), with_pins(page_count=1, max_model_len=4)):
        engine.arrive([1, 2], max_tokens=1, retention=((2, 300),))
        engine.run_out()
        assert engine.state.pool.pins is None


def test_groups_with_windows_are_pinned_as_far_as_a_hit_needs_them():
    engine = with_pins(windows=(0, 4), page_count=24)
    served(engine, PROMPT, (12, 300))
    assert pinned_count(engine.state.pool) == 4, "three blocks in the first group, the last one in the second"
    flood(engine)
    assert served(engine, PROMPT) == 12


def test_an_aborted_request_pins_what_it_has_computed():
    engine = with_pins(max_num_batched_tokens=8)
    id_ = engine.arrive(PROMPT, max_tokens=4, retention=((13, 300),))
    engine.step()
    engine.abort(id_)
    assert pinned_count(engine.state.pool) == 2


def test_nothing_stays_pinned_that_is_never_a_hit_again():
    for spoil in (
        lambda engine: engine.reset(),
        lambda engine: engine.recover(),
        lambda engine: engine.fold(EnginePaused(mode="sleep")),
        lambda engine: [engine.fold(event) for event in (EnginePaused(mode="keep"), WeightsChanged(version=1, digest="d"))],
    ):
        engine = with_pins()
        served(engine, PROMPT, (13, 300))
        spoil(engine)
        assert pinned_count(engine.state.pool) == 0 and engine.free == 16 and engine.state.pool.pins.dropped == 3


def test_pins_yield_to_a_request_that_has_the_engine_to_itself_and_to_nobody_else():
    engine = with_pins(page_count=8, max_model_len=32)
    served(engine, PROMPT, (13, 300))
    small = engine.arrive([50] * 9, max_tokens=12)
    large = engine.arrive([60] * 23, max_tokens=2)
    assert next_yield(engine.state) is None, "the first one fits"
    engine.plan()
    assert engine.running == [small] and next_yield(engine.state) is None, "a step is in flight"
    engine.commit(9)
    assert next_yield(engine.state) is None, "the second one waits for the first"
    engine.abort(small)
    event = next_yield(engine.state)
    assert event == PinsYielded(count=1) and engine.plan() == {}
    engine.fold(event)
    assert engine.plan() == {large: 23} and engine.state.pool.pins.yielded == 1


def test_pins_yield_to_a_row_that_runs_alone():
    engine = with_pins(page_count=8, max_model_len=32)
    served(engine, PROMPT, (13, 300))
    alone = engine.arrive([50] * 19, max_tokens=8)
    for _ in range(2):
        engine.step()
    assert engine.plan() == {} and engine.running == [alone]
    engine.fold(next_yield(engine.state))
    assert engine.plan() == {alone: 1} and pinned_count(engine.state.pool) == 2


def test_hits_that_yield_are_counted_as_no_gain():
    engine = with_pins(page_count=8, max_model_len=32, pinned_kv_fraction=0.8)
    served(engine, PROMPT, (13, 300))
    served(engine, [40] * 13, (13, 3600))
    engine.arrive([*PROMPT, *[7] * 13], max_tokens=2)
    event = next_yield(engine.state)
    assert event == PinsYielded(count=5), "three are hits of the request itself"
    engine.fold(event)
    assert engine.plan() and engine.field(engine.running[0], "cached") == 12


def test_the_clock_ticks_only_while_something_depends_on_it():
    engine = with_pins()
    assert tick_due_s(engine.state, False) is None and next_tick(engine.state, 10**6, False) is None
    assert next_tick(engine.state, TICK_S - 1, True) is None and next_tick(engine.state, TICK_S, True) == ClockTicked(seconds=TICK_S)
    served(engine, PROMPT, (13, 300))
    assert tick_due_s(engine.state, False) == 300 and next_tick(engine.state, 299, False) is None
    engine.fold(next_tick(engine.state, 305, False))
    assert tick_due_s(engine.state, False) is None and engine.state.clock == 305


def test_a_clock_never_goes_back_and_no_more_pins_yield_than_there_are():
    engine = with_pins()
    served(engine, PROMPT, (13, 300))
    engine.fold(ClockTicked(seconds=5))
    before = digest(engine.state)
    for event, why in (
        (ClockTicked(seconds=5), "never goes back"), (ClockTicked(seconds=-1), "never goes back"), (ClockTicked(seconds=2**41), "more than"),
        (PinsYielded(count=0), "0 pins of 3"), (PinsYielded(count=4), "4 pins of 3"),
    ):  # fmt: skip
        with pytest.raises(IllegalEvent, match=why):
            engine.fold(event)
    assert digest(engine.state) == before and next_tick(engine.state, 4, True) is None, "a clock that jumps back waits"
    for retention in (((-1, 5),), ((4, 0),), ((4, -5),), ((4, 2**31),)):
        with pytest.raises(IllegalEvent, match="ask for 0 or more tokens and 1 to"):
            engine.arrive(PROMPT, retention=retention)
    with pytest.raises(IllegalEvent, match="at least 0 and below 1"):
        Engine(pinned_kv_fraction=1.0)


def test_a_snapshot_has_the_clock_and_the_pins():
    engine = with_pins()
    served(engine, PROMPT, (13, 300), (4, 3600))
    engine.fold(ClockTicked(seconds=7))
    loaded = load(decode(encode(snapshot(engine.state), WIDTH_MAX)), engine.state.config)
    assert digest(loaded) == digest(engine.state) and loaded.clock == 7
    assert pinned_pages(loaded.pool).tolist() == pinned_pages(engine.state.pool).tolist()
