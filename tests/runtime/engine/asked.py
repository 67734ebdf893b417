"""An engine that is asked for one answer after another, with what its misses say of each."""

from __future__ import annotations

from collections import deque

from core_drive import Engine

from vnext.runtime.engine.misses import CacheMisses
from vnext.runtime.protocol.stats import CacheMiss
from vnext.sched.residency import next_load
from vnext.state.events import StepPlanned

SIZE = 4
"""Tokens of a block in core_drive."""
LONG = list(range(10, 42))
"""A prompt of eight blocks."""


class Asked:
    """An engine whose requests are asked one after another, and what its misses say of each."""

    def __init__(self, **changes: object) -> None:
        self.engine, self.misses = Engine(**{"max_model_len": 64, "max_num_batched_tokens": 64} | changes), CacheMisses()

    def begin(self, prompt: list[int], max_tokens: int = 1, **changes: object) -> CacheMiss | None:
        id_ = self.engine.arrive(prompt, max_tokens, **changes)
        return self.plan().get(id_)

    def plan(self) -> dict[int, CacheMiss]:
        while (load := next_load(self.engine.state)) is not None:
            for event in load.events("adapter"):
                self.engine.fold(event)
        before, plan = self.engine.state, self.engine.decide()
        assert isinstance(plan, StepPlanned)
        after = self.engine.fold(plan)
        ids = after.rows.id[-len(plan.admitted) :].tolist() if plan.admitted else []
        return dict(self.misses.admitted(before, after, ids))

    def run_out(self, *tokens: int) -> None:
        """Run until nobody lives; each step samples the next of these tokens, the last one again and again."""
        ahead = deque(tokens or [9])
        while self.engine.state.requests:
            if not self.engine.state.in_flight:
                self.plan()
            before = self.engine.state
            token = ahead.popleft() if len(ahead) > 1 and before.in_flight[0].samples.any() else ahead[0]
            ended = [each.id for each in self.engine.commit(*[token] * int(before.in_flight[0].samples.sum())) if each.finish]
            if ended:
                self.misses.ended(before, ended)

    def ask(self, prompt: list[int], max_tokens: int = 1, **changes: object) -> CacheMiss | None:
        found = self.begin(prompt, max_tokens, **changes)
        self.run_out()
        return found
