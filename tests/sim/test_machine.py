"""The same engine under Hypothesis: it finds less deep bugs than the walk, and the smallest example of each."""

from __future__ import annotations

from collections import deque

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core_drive import Engine, arrival_of, started_with
from vnext.sched.sim.rank import Rank
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, PrefixCacheReset, RequestAborted, StepCommitted
from vnext.state.refusal import refusal


class EngineMachine(RuleBasedStateMachine):
    """An engine core with one rank that holds a shadow cache; every law after every event."""

    @initialize(
        block_size=st.integers(1, 3), block_count=st.integers(2, 8), budget=st.integers(1, 9), depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]), caching=st.booleans(), running_max=st.integers(1, 3),
    )  # fmt: skip
    def begin(self, block_size, block_count, budget, depth, policy, caching, running_max) -> None:
        self.engine = Engine(
            block_size=block_size, block_count=block_count, batch_tokens_max=budget, pipeline_depth=depth, policy=policy,
            prefix_caching=caching, running_max=running_max, vocab_size=5, eos_token_ids=(0,),
        )  # fmt: skip
        self.rank = Rank(started_with(self.engine.state.config))
        self.results: deque = deque()

    def fold(self, event: AnyEvent) -> None:
        self.engine.fold(event)
        result = self.rank.fold(event)
        if result is not None:
            self.results.append(result)

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=7), max_tokens=st.integers(1, 5), priority=st.integers(0, 1))
    def arrive(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        arrival = arrival_of(self.engine.state.next_id, prompt, max_tokens, priority=priority)
        if refusal(self.engine.state.config, arrival) is None:
            self.fold(arrival)

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        if self.engine.state.next_id:
            self.fold(RequestAborted(ids=(which % self.engine.state.next_id,), reason="client"))

    @rule()
    def reset(self) -> None:
        self.fold(PrefixCacheReset())

    @rule()
    def plan(self) -> None:
        plan = self.engine.decide()
        if plan is not None:
            self.fold(plan)

    @precondition(lambda self: self.results)
    @rule()
    def commit(self) -> None:
        result = self.results.popleft()
        self.fold(StepCommitted(step=result.step, tokens=result.tokens))

    @invariant()
    def replicas_agree(self) -> None:
        if hasattr(self, "engine"):
            assert digest(self.engine.state) == digest(self.rank.state)

    def teardown(self) -> None:
        """Once nobody arrives any more, everything ends and the engine is idle and clean."""
        if not hasattr(self, "engine"):
            return
        for _ in range(2_000):
            self.plan()
            if self.results:
                self.commit()
            elif not self.engine.state.requests:
                break
        assert not self.engine.state.requests and not self.engine.state.flights
        assert self.engine.free == self.engine.state.config.block_count


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
