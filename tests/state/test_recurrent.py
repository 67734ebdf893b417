"""States of recurrent layers: where snapshots are taken, which are hits, and who holds which page."""

from __future__ import annotations

import msgspec
import pytest
from core_drive import Engine

from vnext.state.config import Speculation
from vnext.state.errors import IllegalEvent
from vnext.state.events import ClockTicked, StepPlanned
from vnext.state.pool import pinned_count
from vnext.state.store.fields import LIVE, NEWEST, SPARE

PROMPT = list(range(1, 42))


def engine(**changes: object) -> Engine:
    return Engine(**{"page_count": 128, "max_model_len": 128, "state_pages": 24, "snapshot_interval": 16} | changes)


def start_of(engine: Engine, prompt: list[int]) -> int:
    """The first position that is computed for a request with this prompt."""
    id_ = engine.arrive(prompt, 1)
    count = engine.plan()[id_]
    start = engine.field(id_, "computed") - count
    engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
    engine.run_out()
    return start


def snapshots(engine: Engine) -> int:
    return len(engine.state.pool.states.prefix_index)


def test_a_prompt_is_cut_where_snapshots_are_taken() -> None:
    alone = engine()
    alone.arrive(PROMPT, 2)
    chunks = [alone.step()[0] for _ in range(5)]
    assert chunks == [16, 16, 8, 1, 1], "each 16 tokens, and the last edge of the prompt"


def test_a_repeated_prompt_starts_at_its_last_edge() -> None:
    twice = engine()
    twice.arrive(PROMPT, 3)
    twice.run_out()
    assert start_of(twice, PROMPT) == 40
    assert start_of(twice, PROMPT[:40]) == 32, "at least one token is computed, and 36 has no snapshot"


def test_a_next_turn_starts_at_the_last_edge_of_the_answer() -> None:
    talk = engine()
    talk.arrive(PROMPT, 12)
    talk.run_out()
    assert start_of(talk, [*PROMPT, *[9] * 12, 5, 6]) == 52, "53 tokens, of which the last one ended the answer"


def test_an_answer_keeps_its_newest_snapshot_only() -> None:
    long = engine(snapshot_interval=64)
    long.arrive(PROMPT, 50)
    long.run_out()
    assert snapshots(long) == 3, "the prompt's, that of 64 tokens, the answer's"


def test_without_an_interval_nothing_is_a_hit_and_a_row_holds_a_page() -> None:
    off = engine(snapshot_interval=0)
    off.arrive(PROMPT, 3)
    off.plan()
    assert off.state.rows.recurrent[[NEWEST, SPARE], 0].tolist() == [-1, -1]
    off.commit(), off.run_out()
    assert start_of(off, PROMPT) == 0 and snapshots(off) == 0


def test_a_hit_is_copied_before_the_step_and_a_snapshot_behind_it() -> None:
    cached = engine()
    cached.arrive(PROMPT, 1)
    cached.run_out()
    cached.arrive(PROMPT, 9)
    cached.plan()
    copies, (live, *_) = cached.state.in_flight[-1].copies, cached.state.rows.recurrent[:, 0].tolist()
    ((source, target),) = copies.before.tolist()
    assert target == live != source and copies.after.tolist() == []
    cached.commit(9)
    cached.step(), cached.step()
    cached.plan()
    ((source, _),) = cached.state.in_flight[-1].copies.after.tolist()
    assert source == live and cached.field(1, "computed") == 44


def test_a_preempted_request_goes_on_from_its_newest_snapshot() -> None:
    full = engine(max_num_batched_tokens=64)
    for first in (1, 2):
        full.arrive([first] * 40, 40)
    while full.field(1, "known") < 55 if full.running == [0, 1] else True:
        full.step()
    full.fold(StepPlanned(step=full.state.planned, preempted=(1,)))
    full.commit(9)
    assert full.plan() == {0: 1, 1: 3} and full.field(1, "computed") == 55, "52 tokens are in its snapshot"
    full.commit(9, 9), full.run_out()
    assert full.state.pool.states.free == 24


def test_kept_snapshots_leave_first_used_first() -> None:
    few = engine(state_pages=5, max_num_seqs=1)
    for first in (1, 2, 3):
        few.arrive([first] * 9, 1)
        few.run_out()
    assert start_of(few, [3] * 9) == 8
    assert start_of(few, [1] * 9) == 0, "five pages, three of which a request holds"


def test_a_request_waits_for_state_pages() -> None:
    tight = engine(state_pages=6, max_num_seqs=8)
    for first in (1, 2, 3):
        tight.arrive([first] * 9, 3)
    tight.step()
    assert tight.running == [0, 1] and tight.waiting == [2]
    tight.run_out()


def test_a_reset_and_a_recovery_forget_snapshots() -> None:
    for forget in (Engine.reset, Engine.recover):
        cached = engine()
        cached.arrive(PROMPT, 3)
        cached.run_out()
        forget(cached)
        assert snapshots(cached) == 0 and start_of(cached, PROMPT) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_pages": 3}, "one request may need 4"),
        ({"snapshot_interval": 18}, "must be a multiple of 4"),
        ({"chunked_prefill": False}, "no prompts in one piece"),
    ],
)
def test_what_does_not_go_with_recurrent_layers(changes: dict[str, object], words: str) -> None:
    with pytest.raises(IllegalEvent, match=words):
        engine(**changes)


def test_each_row_writes_a_page_of_its_own() -> None:
    many = engine()
    for _ in range(4):
        many.arrive(PROMPT[:9], 9)
    many.step()
    assert len(set(many.state.rows.recurrent[LIVE].tolist())) == len(many.running) == 4


def test_a_step_has_no_more_drafts_than_ranks_have_pages_for() -> None:
    """Drafts end at a block's edge, and a quarter of the state pages is the most of a step."""
    many = engine(speculation=Speculation(num_speculative_tokens=3))
    for first in range(1, 5):
        many.arrive([first] * 9, 20)
    while many.decide().admitted or many.field(3, "known") < 10:
        many.step()
    plan = many.decide()
    with pytest.raises(IllegalEvent, match="a step of more than 6 drafts"):
        many.fold(msgspec.structs.replace(plan, changed=((2, 4), (3, 2))))
    assert many.plan() == {0: 3, 1: 3, 2: 1, 3: 1}


def flood(engine: Engine) -> None:
    """Requests that pass through every page of states and of the cache which nobody holds."""
    for first in range(40, 90):
        engine.arrive([first] * 13, 1)
        engine.run_out()


def test_a_pinned_prefix_keeps_its_snapshot() -> None:
    """Up to its last one; and where its time is over, nothing stays."""
    pinned = engine(pinned_kv_fraction=0.5)
    pinned.arrive(PROMPT, 1, retention=((100, 300),))
    pinned.run_out()
    assert pinned.news[-1].retained == (40, 0)
    flood(pinned)
    assert start_of(pinned, PROMPT) == 40
    pinned.fold(ClockTicked(seconds=300))
    assert not pinned_count(pinned.state.pool) + pinned_count(pinned.state.pool.states)
    flood(pinned)
    assert start_of(pinned, PROMPT) == 0


def test_a_beginning_is_pinned_up_to_its_last_snapshot() -> None:
    pinned = engine(pinned_kv_fraction=0.5)
    pinned.arrive(PROMPT, 1, retention=((25, 300),))
    pinned.run_out()
    assert pinned.news[-1].retained == (16, 8)
    flood(pinned)
    assert start_of(pinned, PROMPT) == 16


def test_pins_leave_the_state_pages_that_one_request_needs() -> None:
    tight = engine(state_pages=6, pinned_kv_fraction=0.9, max_num_seqs=1)
    for first in range(1, 7):
        tight.arrive([first] * 9, 1, retention=((9, 300 * first),))
        tight.run_out()
    assert pinned_count(tight.state.pool.states) == 2 and start_of(tight, [6] * 9) == 8 and start_of(tight, [1] * 9) == 0


def test_a_request_whose_newest_snapshot_another_pins_writes_another_page() -> None:
    pinned, longer = engine(snapshot_interval=64, pinned_kv_fraction=0.5), [*PROMPT, *[9] * 4]
    first = pinned.arrive(PROMPT, 30)
    pinned.step()
    while pinned.field(first, "known") < 46:
        pinned.step()
    pinned.arrive(longer, 1, retention=((100, 300),))
    while len(pinned.running) + len(pinned.waiting) > 1:
        pinned.step()
    assert pinned_count(pinned.state.pool.states) == 1 and pinned.running == [first]
    pinned.run_out()
    flood(pinned)
    assert start_of(pinned, longer) == 44
