"""The simulator itself: its parts by hand, one seed one run, other interleavings and settings, one answer."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from core_drive import check_decision

from tests.sim.scenario import NEVER, Faults, Scenario
from tests.sim.scenario_draw import scenario
from tests.sim.simulator import Outcome, simulate
from vnext.sim import laws as sim_laws
from vnext.sim.checks.plain_state import Divergence, PlainState
from vnext.sim.rank import Rank, Story, rebuilt
from vnext.sim.rng import Rng
from vnext.sim.toy import Answer, answer, next_token
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.errors import LawBroken
from vnext.state.events import StepCommitted, StepPlanned, pack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import DIGEST_SIZE, input_tokens

replace = msgspec.structs.replace
PLACES = (1, 40, 160, 640, 2560)
"""Of a run's events: a rank is rebuilt behind so many."""


def test_the_toy_model_by_hand() -> None:
    assert next_token([2, 3], seed=1, vocab_size=7) == (1 + 1 * 2 + 2 * 3) % 7
    assert next_token([], seed=9, vocab_size=7) == 2


def config_of(**changes: object) -> SchedulerConfig:
    fields = dict(block_size=2, page_count=8, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=32, vocab_size=7)
    return SchedulerConfig(**(fields | changes))


def test_the_oracle_by_hand() -> None:
    """[3] -> 3; [3, 3] -> 9 mod 7 = 2; [3, 3, 2] -> 15 mod 7 = 1."""
    config = config_of(eos_token_ids=(2,))
    assert answer(config, [3], Sampling(seed=0, max_tokens=3)) == Answer((3, 2), "stop")
    assert answer(config, [3], Sampling(seed=0, max_tokens=1)) == Answer((3,), "length")
    assert answer(config, [3], Sampling(seed=0, max_tokens=3, ignore_eos=True)) == Answer((3, 2, 1), "length")
    assert answer(config, [3], Sampling(seed=0, max_tokens=9, min_tokens=2, stop_token_ids=(1,))) == Answer((3, 2, 1), "stop")


def test_chance_is_splitmix64() -> None:
    """Known answers of SplitMix64 for the seed 1234567."""
    rng = Rng(1234567)
    assert [rng.word() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_fork_does_not_move_its_source() -> None:
    left, right = Rng(5), Rng(5)
    fork = left.fork()
    right.fork()
    fork.word()
    assert left.word() == right.word()


def test_one_seed_is_one_run() -> None:
    for seed in (0, 1, 2, 4):
        first, second = simulate(scenario(seed)), simulate(scenario(seed))
        assert first.events == second.events and first.answers == second.answers
        assert first.duration_us == second.duration_us and digest(first.state) == digest(second.state)
    assert scenario(1) != scenario(2)


def nobody_leaves(drawn: Scenario) -> Scenario:
    clients = tuple(replace(client, abort_us=NEVER, stop=()) for client in drawn.clients)
    return replace(drawn, clients=clients, shutdown_us=NEVER)


def test_faults_of_ranks_and_transport_change_no_stream() -> None:
    """Other interleavings, crashes and clocks, other plans; the answers of those that nobody aborted are the same."""
    for seed in range(100, 112):
        rough = nobody_leaves(scenario(seed))
        calm = replace(rough, faults=Faults(), rank_count=1)
        wild = replace(
            rough, rank_count=2,
            faults=Faults(duplicate_result=30, late_result=40, lost_result=20, slow_step=30, slow_rank=60, crash=5,
                          logged=True, hesitation=50, illegal=5, clock_jump_us=10**9),
        )  # fmt: skip
        assert simulate(calm).answers == simulate(wild).answers


@pytest.mark.parametrize("seed", range(200, 206))
def test_settings_that_may_change_no_stream(seed: int) -> None:
    """Pipeline depth, chunk sizes and the prefix cache decide when a token comes, never which."""
    base = replace(nobody_leaves(scenario(seed)), disk=None)  # a disk needs a prefix cache
    config = replace(base.config, chunked_prefill=True, long_prefill_token_threshold=0, max_num_batched_tokens=64)
    if config.windows:  # there the length of a chunk decides who fits alone: let everybody fit
        config = replace(config, page_count=config.group_count * config.max_model_len)
    expected = simulate(replace(base, config=config)).answers
    for changes in (
        dict(pipeline_depth=1), dict(pipeline_depth=4), dict(prefix_caching=False), dict(prefix_caching=True),
        dict(long_prefill_token_threshold=1), dict(max_num_batched_tokens=1), dict(max_num_seqs=1), dict(policy="priority"),
        *[dict(windows=windows) for windows in ((), (1,), (5, 0)) if config.windows],
    ):  # fmt: skip
        assert simulate(replace(base, config=replace(config, **changes))).answers == expected, changes


@cache
def long_run() -> tuple[Scenario, Outcome]:
    drawn = map(scenario, range(1000))
    chosen = next(s for s in drawn if s.config.prefix_caching and s.config.pipeline_depth > 1 and not s.faults.whim)
    return chosen, simulate(chosen)


def test_a_rank_rebuilt_from_the_log_is_the_rank() -> None:
    _, outcome = long_run()
    first, *rest = outcome.events
    assert len(rest) >= PLACES[-1]
    rank = Rank(first)
    for place, event in enumerate(rest, start=1):
        rank.fold(event)
        if place in PLACES:
            again = rebuilt(list(outcome.events[: place + 1]))
            assert digest(again.state) == digest(rank.state) and again.cache == rank.cache


def test_a_torn_log_is_a_shorter_run() -> None:
    """Any prefix of the log folds, and to the state that the engine had then."""
    _, outcome = long_run()
    first, *rest = outcome.events
    rank, digests = Rank(first), []
    for event in rest:
        rank.fold(event)
        digests.append(digest(rank.state))
    for length in (1, 7, len(rest) // 2, len(rest) - 1):
        assert digest(rebuilt(list(outcome.events[: length + 1])).state) == digests[length - 1]


def test_a_rank_that_sampled_otherwise_is_noticed() -> None:
    _, outcome = long_run()
    rank = Rank(outcome.events[0])
    with pytest.raises(Divergence, match="did not sample"):
        for event in outcome.events[1:]:
            wrong = isinstance(event, StepCommitted) and event.tokens
            rank.fold(replace(event, tokens=bytes(len(event.tokens) - 1) + b"\x01") if wrong else event)


def test_a_story_never_changes() -> None:
    story = Story("salt")
    for tokens in ([1, 2, 3], [1, 2], [1, 2, 3, 4], list(range(1, 200))):
        story.agree(pack_tokens(tokens))
    assert story.data == pack_tokens(list(range(1, 200))) and story.length == 199
    assert len(set(story.chains)) == 199
    assert story.weights[3] == 1 * 1 + 2 * 2 + 3 * 3
    with pytest.raises(Divergence, match="history changed"):
        story.agree(pack_tokens([1, 9]))
    other = Story("another salt")
    other.agree(pack_tokens([1, 2]))
    assert other.chains[0] != story.chains[0]


def test_two_equal_inputs_are_not_one_long_input() -> None:
    """Two of four tokens each and one of eight, as their block names tell them apart."""
    twice, once = Story(""), Story("")
    image = bytes(range(DIGEST_SIZE))
    twice.agree(np.tile(input_tokens(image, 4), 2).tobytes())
    once.agree(input_tokens(image, 8).tobytes())
    assert [a == b for a, b in zip(twice.chains, once.chains)] == [True] * 4 + [False] * 4


# ---- laws of a decision -----------------------------------------------------------------------------------------


def test_a_range_that_starts_elsewhere_is_found() -> None:
    """`ranges_continue` by hand: one recorded decision, its range moved by one."""
    _, outcome = long_run()
    rank = Rank(outcome.events[0])
    for event in outcome.events[1:]:
        before = rank.state
        rank.fold(event)
        if isinstance(event, StepPlanned):
            check_decision(before, event, rank.state)
            entries = rank.state.in_flight[-1].entries + np.array([[0], [0], [1], [0]])
            scheduled = replace(rank.state.in_flight[-1], entries=entries)
            with pytest.raises(LawBroken, match="law S2"):
                sim_laws.ranges_continue(
                    PlainState(before), PlainState(replace(rank.state, in_flight=(*rank.state.in_flight[:-1], scheduled)))
                )
