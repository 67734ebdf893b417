"""Rank: a replica of the state beside one shard of the model. All ranks run this same program.

It folds the same events as everybody else, runs each planned step and samples by itself; what a commit holds it knows
from its own sampling, so no token is broadcast. Owns its replica; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from vnext.runtime.batch import PersistentBatch
from vnext.runtime.broadcast import decode_events
from vnext.runtime.group import require_whole_group
from vnext.runtime.messages import StepResult, TokenLogprobs
from vnext.runtime.runner import ModelRunner
from vnext.state.digest import details, digest, histories
from vnext.state.events import AnyEvent, EngineStarted, StepCommitted, StepPlanned, pack_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State

Logprobs = tuple[TokenLogprobs | None, ...]


class Rank:
    """One rank. `handle` takes one message of the ring and returns the result of the step it planned, if it has it already.

    Others come from `collect`; while there are some to come, `patience_s` says how long to wait for the next message.
    """

    patience_s: float | None = None

    def __init__(self, rank: int, runner: ModelRunner) -> None:
        self._rank = rank
        self._runner = runner
        self._state: State | None = None
        self._batch: PersistentBatch | None = None
        self._own_tokens: dict[int, bytes] = {}

    def handle(self, message: bytes) -> StepResult | None:
        """Fold the message's events in order; at most one of them plans a step, the last."""
        result, next_id = None, 0 if self._state is None else self._state.next_id
        for event in decode_events(message, next_id):
            result = self._apply(event)
        return result

    def collect(self) -> Sequence[StepResult]:
        """Results that have come since, without waiting. Here every step is done when it was handled."""
        return ()

    def _own(self, step: int) -> bytes:
        """What this rank sampled in a step that is committed now."""
        return self._own_tokens.pop(step)

    def _apply(self, event: AnyEvent) -> StepResult | None:
        if isinstance(event, EngineStarted):
            self._start(event)
        elif isinstance(event, StepPlanned):
            self._state = reduce(self._state, event)
            return self._run_step()
        elif isinstance(event, StepCommitted):
            own = self._own(event.step)
            self._state = reduce(self._state, msgspec.structs.replace(event, tokens=own))
        else:
            self._state = reduce(self._state, event)
        return None

    def _start(self, event: EngineStarted) -> None:
        self._state = start(event)
        self._batch = PersistentBatch(event.config, self._runner.config.vocab_size, self._runner.device)
        self._runner.make_cache(event.config.block_count, event.config.block_size)

    def _run_step(self) -> StepResult:
        began = time.perf_counter()
        flight = self._state.flights[-1]
        outputs = self._runner.run(self._batch.step_inputs(self._state))
        require_whole_group()
        self._batch.take_sampled(flight, outputs.tokens)
        tokens = self._own_tokens[flight.step] = pack_tokens(outputs.tokens)
        return self._result(flight.step, tokens, outputs.logprobs, time.perf_counter() - began)

    def _result(self, step: int, tokens: bytes, logprobs: Logprobs, seconds: float) -> StepResult:
        speaks = self._rank == 0
        due = step % self._state.config.digest_interval == 0
        return StepResult(
            rank=self._rank,
            step=step,
            digest=digest(self._state) if due else 0,
            token_digest=self._state.token_digest if due else 0,
            seconds=seconds,
            tokens=tokens if speaks else b"",
            logprobs=logprobs if speaks else (),
            details=details(self._state) if due else (),
            histories=histories(self._state) if due else (),
        )
