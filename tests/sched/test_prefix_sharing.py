"""Prefix hits: rounded to blocks, at most the prompt but one token, shared within a step, evicted oldest tail first."""

from __future__ import annotations

import pytest
from core_drive import Engine


def served(engine: Engine, prompt: list[int], **changes) -> int:
    """A request that came and went; its hit tokens."""
    before = engine.state.counters.prefix_hit_tokens
    engine.arrive(prompt, max_tokens=1, **changes)
    engine.run_out()
    return engine.state.counters.prefix_hit_tokens - before


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_hit_is_whole_blocks_and_leaves_one_token(length: int, hit: int) -> None:
    engine = Engine()
    prompt = list(range(1, length + 1))
    assert served(engine, prompt) == 0
    assert served(engine, prompt) == hit


def test_a_hit_need_not_be_computed_again() -> None:
    engine = Engine()
    served(engine, [1] * 9)
    id_ = engine.arrive([1] * 8 + [2, 3])
    assert engine.plan() == {id_: 2}
    assert engine.state.in_flight[-1].starts.tolist() == [8]
    assert engine.commit(7)[0].cached_tokens == 8


def test_a_hit_ends_where_the_content_differs() -> None:
    engine = Engine()
    served(engine, [1] * 12)
    assert served(engine, [1] * 5 + [2] * 7) == 4
    assert served(engine, [2] + [1] * 11) == 0


def test_a_later_block_counts_only_behind_its_own_beginning() -> None:
    """Equal tokens in the second block, but another first block: another chain."""
    engine = Engine()
    served(engine, [1] * 4 + [5] * 4 + [9])
    assert served(engine, [2] * 4 + [5] * 4 + [9]) == 0


def test_requests_admitted_in_one_step_share() -> None:
    engine = Engine()
    engine.arrive([1] * 9)
    engine.arrive([1] * 8 + [2])
    assert engine.plan() == {0: 9, 1: 1}
    assert engine.blocks(0)[:2] == engine.blocks(1)[:2] and engine.blocks(0)[2] != engine.blocks(1)[2]
    assert engine.free == 16 - 4


def test_a_chunk_shares_only_what_it_completes() -> None:
    engine = Engine(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    engine.arrive([1] * 9)
    engine.arrive([1] * 9)
    assert engine.plan() == {0: 6, 1: 2}
    assert engine.state.counters.prefix_hit_tokens == 4


def test_generated_tokens_are_shared_too() -> None:
    """A second turn of a conversation finds the first answer's blocks; its last token was never computed."""
    engine = Engine()
    engine.arrive([1] * 6, max_tokens=7)
    engine.run_out(token=9)
    assert served(engine, [1] * 6 + [9] * 7 + [5]) == 12


def test_a_running_request_s_prefix_is_shared_while_it_runs() -> None:
    engine = Engine()
    engine.arrive([1] * 9, max_tokens=20)
    engine.step()
    held = engine.free
    engine.arrive([1] * 9, max_tokens=20)
    engine.step()
    assert engine.blocks(0)[:2] == engine.blocks(1)[:2] and engine.free == held - 1


def test_salts_keep_requests_apart() -> None:
    engine = Engine()
    assert served(engine, [1] * 9, cache_salt="a") == 0
    assert served(engine, [1] * 9, cache_salt="b") == 0
    assert served(engine, [1] * 9) == 0
    assert served(engine, [1] * 9, cache_salt="a") == 8


def test_a_reset_forgets_kept_and_held_content() -> None:
    engine = Engine()
    served(engine, [1] * 9)
    engine.reset()
    assert served(engine, [1] * 9) == 0
    running = engine.arrive([1] * 9, max_tokens=9)
    engine.step()
    engine.reset()
    assert served_beside(engine, [1] * 9) == 0
    assert engine.running == [running] and engine.free == 16 - len(engine.blocks(running))


def served_beside(engine: Engine, prompt: list[int]) -> int:
    before = engine.state.counters.prefix_hit_tokens
    engine.arrive(prompt, max_tokens=1)
    engine.step()
    return engine.state.counters.prefix_hit_tokens - before


def test_without_the_cache_nothing_is_shared() -> None:
    engine = Engine(prefix_caching=False)
    served(engine, [1] * 9)
    assert served(engine, [1] * 9) == 0
    assert engine.state.counters.prefix_queried_tokens == 0 and len(engine.state.pool.prefix_index) == 0


def test_tails_are_evicted_before_beginnings() -> None:
    engine = Engine(page_count=4)
    served(engine, [1] * 13)  # blocks 0 1 2 full, 3 begun
    engine.arrive([2] * 5, max_tokens=1)  # needs two: the begun one, then the tail of the chain
    engine.run_out()
    assert served(engine, [1] * 13) == 8


def test_the_least_recently_used_chain_leaves_first() -> None:
    engine = Engine(page_count=6)
    served(engine, [1] * 5)
    served(engine, [2] * 5)
    assert served(engine, [1] * 5) == 4  # used again: now the younger one
    engine.arrive([3] * 13, max_tokens=1)  # four blocks: the two that are empty and two kept ones
    engine.run_out()
    assert served(engine, [2] * 5) == 0


def test_a_kept_block_that_is_hit_leaves_the_queue() -> None:
    engine = Engine(page_count=4)
    served(engine, [1] * 9)
    free = engine.free
    engine.arrive([1] * 9, max_tokens=6)
    engine.plan()
    assert engine.free == free - 3 and engine.blocks(0 + 1)[:2] == [0, 1]


def test_hits_are_counted_as_free_blocks_once() -> None:
    """A kept block that is hit is not free for the same request's other tokens: the request must wait."""
    engine = Engine(page_count=4, max_num_batched_tokens=16)
    served(engine, [1] * 5)
    engine.arrive([2] * 5, max_tokens=3)
    assert engine.plan() == {1: 5}
    engine.arrive([1] * 4 + [3] * 6, max_tokens=1)  # one hit on a kept block, two blocks more: three of two
    engine.commit(9)
    assert engine.plan() == {1: 1} and engine.waiting == [2]
    engine.commit(9)
    engine.run_out()
    assert engine.state.counters.finished == 3


@pytest.mark.parametrize("windows", [(0, 0), (0, 5), (5, 0, 3)])
def test_every_group_of_layers_finds_its_own_pages_again(windows: tuple[int, ...]) -> None:
    """A prompt that was computed at once is named page by page: without the names of one group there is no hit."""
    engine = Engine(windows=windows, page_count=48)
    assert served(engine, [1] * 9) == 0
    assert served(engine, [1] * 9) == 8
