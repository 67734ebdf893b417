"""The same engine under Hypothesis: it finds less deep bugs than the walk, and the smallest example of each."""

from __future__ import annotations

from collections import deque

from core_drive import arrival_of, config_of, started_with
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sim.deciding import DecidingCore
from tests.sim.illegal_events import illegal_event, strange_plan
from vnext.sim.checks.plain_state import PlainState, contents
from vnext.sim.rank import Rank
from vnext.sim.rng import Rng
from vnext.sim.sample_policies import POLICIES
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, PrefixCacheReset, RequestAborted
from vnext.state.feasibility import refusal

SEEDS = st.integers(0, 2**32)


class EngineMachine(RuleBasedStateMachine):
    """An engine core with one rank that folds for itself and holds a shadow cache; every law after every event."""

    @initialize(
        block_size=st.integers(1, 3), page_count=st.integers(1, 8), budget=st.integers(1, 9), depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority", *POLICIES]), caching=st.booleans(), max_num_seqs=st.integers(1, 3),
        threshold=st.sampled_from([0, 0, 1, 2]), chunked=st.booleans(),
    )  # fmt: skip
    def begin(self, block_size, page_count, budget, depth, policy, caching, max_num_seqs, threshold, chunked) -> None:
        config = config_of(
            block_size=block_size, page_count=page_count, max_num_batched_tokens=budget, pipeline_depth=depth, policy=policy,
            prefix_caching=caching, max_num_seqs=max_num_seqs, long_prefill_token_threshold=threshold if chunked else 0,
            chunked_prefill=chunked, vocab_size=5, eos_token_ids=(0,),
        )  # fmt: skip
        self.core = DecidingCore(started_with(config), whole_check_events=8)
        self.rank = Rank(started_with(config))
        self.results: deque = deque()
        self.whims = chunked and policy != "fcfs"

    def fold(self, event: AnyEvent) -> None:
        self.core.fold(event)
        self.show_rank()

    def show_rank(self) -> None:
        result = self.rank.fold(self.core.events[-1])
        if result is not None:
            self.results.append(result)

    @rule(
        prompt=st.lists(st.integers(1, 2), max_size=7), max_tokens=st.integers(0, 5), priority=st.integers(0, 1),
        salt=st.sampled_from(["", "a"]), min_tokens=st.integers(0, 2), stops=st.sampled_from([(), (3,)]),
    )  # fmt: skip
    def arrive(self, prompt, max_tokens, priority, salt, min_tokens, stops) -> None:
        wishes = dict(cache_salt=salt, priority=priority, min_tokens=min_tokens, stop_token_ids=stops)
        arrival = arrival_of(self.core.state.next_id, prompt, max_tokens, **wishes)
        if refusal(self.core.state.config, arrival) is None:
            self.fold(arrival)
        else:
            self.core.require_refused(arrival)

    @rule(which=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def abort(self, which: list[int]) -> None:
        if self.core.state.next_id:
            ids = tuple(each % self.core.state.next_id for each in which)
            self.fold(RequestAborted(ids=ids, reason="client"))

    @rule()
    def reset(self) -> None:
        self.fold(PrefixCacheReset())

    @rule()
    def plan(self) -> None:
        if self.core.decide() is not None:
            self.show_rank()

    @rule(seed=SEEDS)
    def plan_on_a_whim(self, seed: int) -> None:
        plan = strange_plan(Rng(seed), self.core.seen) if self.whims else None
        if plan is not None and self.core.try_to_fold(plan):
            self.show_rank()

    @rule(seed=SEEDS)
    def do_what_may_not_be_done(self, seed: int) -> None:
        self.core.require_refused(illegal_event(Rng(seed), self.core.seen))

    @precondition(lambda self: self.results)
    @rule()
    def commit(self) -> None:
        result = self.results.popleft()
        self.fold(result.event)

    @invariant()
    def replicas_agree(self) -> None:
        if hasattr(self, "core"):
            assert digest(self.core.state) == digest(self.rank.state)
            assert contents(self.core.seen) == contents(PlainState(self.rank.state))

    def teardown(self) -> None:
        """Once nobody arrives any more, everything ends and the engine is idle and clean."""
        if not hasattr(self, "core"):
            return
        for _ in range(2_000):
            self.plan()
            if self.results:
                self.commit()
            elif not self.core.state.requests:
                break
        state = self.core.state
        assert not state.requests and not state.in_flight and state.pool.free == state.config.page_count


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
