"""Rank: a replica of the state beside one shard of the model. All ranks run this same program.

It folds the same events as every other process, has each planned step computed, and samples by itself. It knows the tokens
of a commit from its own sampling, so no token is broadcast. Owns its replica and the reports of its steps; decides nothing.
A step's digest describes the state at its launch; its result exists once its tokens do. A commit may arrive before this
rank has its own tokens, because another rank was quicker: the rank then waits for its tokens. A rank that lacks memory for a step
says so, and computes, writes and hands over nothing until the engine core has ended the steps in flight; so does one that lacks the
file of an input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from vnext.log import snapshot
from vnext.models.errors import InputGone
from vnext.runtime.protocol.messages import (
    AdapterRead,
    BlocksPublished,
    BlocksRead,
    BlocksWritten,
    HandoverPlace,
    InputsRead,
    RankAnswer,
    StepResult,
)
from vnext.runtime.rank.steps import Steps, is_due
from vnext.runtime.rank.tier import RankTier
from vnext.runtime.rank.weights import RankWeights
from vnext.runtime.transport.collectives.errors import shortage_of
from vnext.runtime.transport.ring.broadcast import (
    BeginFrom,
    FetchBlocks,
    FetchInputs,
    RankRequest,
    ReadAdapter,
    StoreBlocks,
    decode_events,
)
from vnext.runtime.transport.ring.commands import AnyCommand
from vnext.state.digest import details, digest, histories
from vnext.state.events import (
    AdapterEvicted,
    AdapterLoaded,
    AnyEvent,
    BlocksHandedOver,
    EngineStarted,
    Event,
    MemoryRanShort,
    StepCommitted,
    WeightsChanged,
    plan_of,
)
from vnext.state.reduce import reduce, start
from vnext.state.state import State

replace = msgspec.structs.replace
READING_LOOK_S = 2e-3


class Beside(Protocol):
    """What moves data beside a rank's steps."""

    @property
    def is_busy(self) -> bool:
        """Whether `reports` has one to come."""

    def reports(self) -> Sequence[AdapterRead | BlocksRead | BlocksWritten | BlocksPublished | InputsRead]:
        """What has been done since the last call."""

    def fold(self, event: AnyEvent, state: State) -> None:
        """Do what an event asks for, which has led to `state`."""

    def close(self) -> None:
        """End, with what it has begun."""


class Looking(Beside, Protocol):
    """What looks for vectors of inputs, too."""

    def expect(self, request: FetchInputs) -> None:
        """Those of a request may be at another engine."""


class Offering(Beside, Protocol):
    """What lets other engines have something, from this place."""

    place: HandoverPlace


class Rank:
    """One rank. `handle` takes one message of the ring; `collect` returns the results in the order of the steps."""

    def __init__(
        self, rank: int, steps: Steps, weights: RankWeights | None = None, tier: RankTier | None = None,
        publisher: Offering | None = None, shelf: Looking | None = None,
    ) -> None:
        """`weights`: None for a rank that is asked for no operations; `tier`: for one without a disk tier that gets no blocks of
        other engines; `publisher`: for one that hands none over; `shelf`: that keeps no vectors of inputs."""
        self._rank = rank
        self.steps, self._weights, self.tier, self.publisher, self.shelf = steps, weights, tier, publisher, shelf
        self._beside = [each for each in (tier, publisher, shelf) if each is not None]
        self._state: State | None = None
        self._asked: deque[StepResult] = deque()  # without the fields that only a computed step can fill
        self._completed: list[StepResult] = []
        self._own: dict[int, StepCommitted] = {}
        self._short, self._gone = "", b""  # why memory lacks for the steps in flight, and the input that does

    @property
    def poll_timeout_s(self) -> float | None:
        """How long to wait for the next message; None, for ever, while no result is pending."""
        if self._completed or (self._asked and self.steps.look_s is not None):
            return self.steps.look_s
        is_reading = self.steps.adapters and self.steps.adapters.is_reading
        is_moving = any(each.is_busy for each in self._beside)
        return READING_LOOK_S if is_reading or is_moving or (self._weights and self._weights.is_busy) else None

    def handle(self, message: bytes) -> None:
        """Fold the message's events in order. At most one of them plans a step, and it comes last."""
        for event in decode_events(message, 0 if self._state is None else self._state.next_id):
            self._apply(event)

    def collect(self) -> list[StepResult | AdapterRead | RankAnswer | BlocksRead | BlocksWritten | BlocksPublished | InputsRead]:
        """Results that are complete by now, reports of what has been read and written, and answers, without waiting."""
        while self._asked and self.steps.is_there():
            self._wait_for_step()
        if self._asked and self._asked[0].short:
            self._completed += self._asked
            self._asked.clear()
        completed, self._completed = self._completed, []
        read = self.steps.adapters.done() if self.steps.adapters else ()
        moved = [report for each in self._beside for report in each.reports()]
        answers = self._weights.answers() if self._weights and self._weights.is_busy else ()
        return [*completed, *read, *moved, *answers]

    def close(self) -> None:
        """Write, read and hand over no block any more: others may use the folders."""
        for each in (*self._beside, self._weights):
            if each is not None:
                each.close()

    def _apply(self, event: AnyEvent | RankRequest | AnyCommand) -> None:
        if not isinstance(event, Event):
            self._do(event)
            return
        if isinstance(event, EngineStarted):
            self._state = start(event)
            self.steps.start(self._state)
            return
        if isinstance(event, StepCommitted):
            while event.step not in self._own:
                self._wait_for_step()
            event = self._own.pop(event.step)
        assert self._state is not None, "EngineStarted comes first"
        self._state = state = reduce(self._state, event)
        if isinstance(event, AdapterLoaded | AdapterEvicted):
            assert self.steps.adapters is not None
            self.steps.adapters.fold(event)
        if isinstance(event, WeightsChanged):
            assert self._weights is not None
            self._weights.fold(event)
        for each in self._beside:
            if not (self._short and isinstance(event, BlocksHandedOver)):
                each.fold(event, state)
        if isinstance(event, MemoryRanShort):
            self._short, self._gone = "", b""
            self._asked.clear()
            self._own.clear()
            self.steps.drop()
        if (plan := plan_of(event)) is not None:
            self._launch(state, plan.step)

    def _launch(self, state: State, step: int) -> None:
        """Have the newest step of `state` computed, unless memory lacks for it, its report, or a step before it."""
        if not self._short:
            try:
                report = self._report(step, state if is_due(state, step) else None)
                self.steps.launch(state)
                self._asked.append(report)
                return
            except Exception as error:  # torch has several for one thing
                gone = error.digest if isinstance(error, InputGone) else b""
                if not (why := str(error) if gone else shortage_of(error, self._rank)):
                    raise
                self.steps.give_up(error)
                self._short, self._gone = why, gone
        self._asked.append(replace(self._report(step, None), short=self._short, gone=self._gone))

    def _do(self, request: RankRequest | AnyCommand) -> None:
        """What the engine core asks for beside the events."""
        if isinstance(request, ReadAdapter):
            assert self.steps.adapters is not None
            self.steps.adapters.read(request)
        elif isinstance(request, StoreBlocks):
            if not self._short:
                assert self.tier is not None
                self.tier.store(request)
        elif isinstance(request, FetchBlocks):
            assert self.tier is not None
            self.tier.expect(request)
        elif isinstance(request, FetchInputs):
            if self.shelf is not None:  # a stage behind the first has none
                self.shelf.expect(request)
        elif isinstance(request, BeginFrom):
            assert self._state is not None, "EngineStarted comes first"
            self._state = state = snapshot.load(snapshot.decode(request.snapshot), self._state.config)
            if state.weights:
                assert self._weights is not None
                self._weights.load(state.weights.path, state.weights.digest)
        else:
            assert self._weights is not None
            self._weights.obey(request)

    def _wait_for_step(self) -> None:
        """Wait for the oldest step; keep its tokens and queue its result."""
        report, computed = self._asked.popleft(), self.steps.wait()
        self._own[report.step] = StepCommitted(
            step=report.step, tokens=computed.tokens, counts=computed.counts, drafted=computed.drafted
        )
        names = ("tokens", "logprobs", "failed", "prompts", "counts", "drafted", "drafts", "experts") if self._rank == 0 else ()
        reported = {name: getattr(computed, name) for name in names}
        self._completed.append(replace(report, seconds=computed.seconds, fed=computed.fed, **reported))

    def _report(self, step: int, seen: State | None) -> StepResult:
        """Of a step that is not computed so far; with the digests of the state that it is planned in, where they are due."""
        return StepResult(
            rank=self._rank,
            step=step,
            digest=digest(seen) if seen else 0,
            token_digest=seen.token_digest if seen else 0,
            seconds=0.0,
            tokens=b"",
            logprobs=(),
            details=details(seen) if seen else (),
            histories=histories(seen) if seen else (),
        )
