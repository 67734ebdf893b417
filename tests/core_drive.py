"""An engine that a test drives by hand: the real reducer and scheduler, and the test's own tokens."""

from __future__ import annotations

from vnext.sched.encoding import next_encoding
from vnext.sched.schedule import schedule
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.laws import decision_laws
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AnyEvent,
    EngineRecovered,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.laws import check
from vnext.state.outputs import Output, outputs
from vnext.state.params import Sampling
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.store import fields
from vnext.state.windows import row_blocks


def config_of(**changes: object) -> SchedulerConfig:
    """Blocks of 4 tokens, 16 of them; 32 tokens a step; 8 requests; synchronous."""
    fields = dict(
        block_size=4, page_count=16, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=64, pipeline_depth=1,
        eos_token_ids=(0,), vocab_size=100,
    )  # fmt: skip
    return SchedulerConfig(**(fields | changes))


def started_with(config: SchedulerConfig) -> EngineStarted:
    return EngineStarted(config=config, model="toy", model_digest="", world_size=1, environment={}, started_ns=0)


def arrival_of(id_: int, prompt: list[int], max_tokens: int = 4, **changes) -> RequestArrived:
    """`changes` that are fields of Sampling go there, the rest into the event."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in Sampling.__struct_fields__}
    fields = dict(id=id_, name=f"r{id_}", prompt=pack_tokens(prompt), priority=0, arrival_ns=0)
    return RequestArrived(sampling=Sampling(seed=1, max_tokens=max_tokens, **sampling), **(fields | changes))


def resumed_of(id_: int, prompt: list[int], generated: list[int], max_tokens: int = 4, **changes) -> RequestResumed:
    """`arrival_of` a request that has these tokens from another engine."""
    arrival = arrival_of(id_, prompt, max_tokens, **changes)
    fields = {name: getattr(arrival, name) for name in arrival.__struct_fields__}
    return RequestResumed(**fields | {"generated": pack_tokens(generated)})


class Engine:
    """An engine core in memory; every law is checked after every event."""

    def __init__(self, **changes: object) -> None:
        self.state: State = start(started_with(config_of(**changes)))
        self.news: list[Output] = []

    def fold(self, event: AnyEvent) -> State:
        before = self.state
        self.state = reduce(before, event)
        check(self.state)
        self.news = list(outputs(before, event, self.state))
        return self.state

    def arrive(self, prompt: list[int], max_tokens: int = 4, **changes: object) -> int:
        """The new request's id."""
        id_ = self.state.next_id
        self.fold(arrival_of(id_, prompt, max_tokens, **changes))
        return id_

    def plan(self) -> dict[int, int]:
        """Decide and fold: {request id: new tokens} of the step, empty if there is none."""
        while self.state.config.input_units and (event := next_encoding(self.state)) is not None:
            self.fold(event)
        plan = schedule(self.state)
        if plan is None:
            return {}
        self.fold(plan)
        scheduled = self.state.in_flight[-1]
        return dict(zip(scheduled.ids.tolist(), scheduled.counts.tolist()))

    def decide(self) -> StepPlanned | None:
        return schedule(self.state)

    def commit(self, *tokens: int) -> list[Output]:
        """Commit the oldest step with these samples."""
        self.fold(StepCommitted(step=self.state.committed, tokens=pack_tokens(tokens)))
        return self.news

    def step(self, token: int = 9) -> dict[int, int]:
        """Plan and commit one step in which everybody samples `token`."""
        planned = self.plan()
        if self.state.in_flight:
            self.commit(*[token] * int(self.state.in_flight[0].samples.sum()))
        return planned

    def abort(self, *ids: int) -> list[Output]:
        self.fold(RequestAborted(ids=ids, reason="client"))
        return self.news

    def reset(self) -> None:
        self.fold(PrefixCacheReset())

    def recover(self, cautious: int = 0, log: str = "") -> None:
        self.fold(EngineRecovered(cause="rank 0 was killed", log=log, cautious=cautious))

    def run_out(self, token: int = 9, steps_max: int = 500) -> None:
        """Step until nobody lives."""
        for _ in range(steps_max):
            if not self.state.requests and not self.state.in_flight:
                return
            self.step(token)
        raise AssertionError(f"{len(self.state.requests)} requests still live after {steps_max} steps")

    # ---- looking -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        return self.state.rows.id.tolist()

    @property
    def waiting(self) -> list[int]:
        return [entry.id for entry in self.state.waiting]

    @property
    def free(self) -> int:
        return self.state.pool.free

    def field(self, id_: int, name: str) -> int:
        """One cell of a running request's row."""
        return int(self.state.rows.cells[fields.FIELD_NAMES.index(name), self.running.index(id_)])

    def blocks(self, id_: int) -> list[int]:
        return row_blocks(self.state, self.running.index(id_)).tolist()

    def tokens(self, id_: int) -> list[int]:
        return row_tokens(self.state, self.running.index(id_)).tolist()


def check_decision(before: State, plan: StepPlanned | None, after: State) -> None:
    """All laws of one decision. Raises LawBroken."""
    decision_laws(PlainState(before), plan, PlainState(after))
