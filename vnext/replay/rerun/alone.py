"""A request alone: an engine that decides, folds and computes for one request only.

Owns that engine's states, which the usual reducer and scheduler make from a request in a log, and its cache, which
grows on demand. The request's tokens are given; the caller compares them with what this engine would sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import torch

from vnext.replay.rerun.machine import Caches, Machine, refusing
from vnext.runtime.batch.halves import with_halves
from vnext.runtime.batch.rebuild import rebuild
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.tensors import tensors_of_sampling
from vnext.sampling.sampling import report, sample
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import AdapterLoaded, EngineStarted, RequestArrived, RequestId, StepCommitted, pack_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import Request, State, blocks_for

replace = msgspec.structs.replace
SCORED_TOGETHER = 128
"""Positions whose logits are in memory at once."""
NOBODY_ELSE = dict(
    prefix_caching=False,
    pipeline_depth=1,
    max_num_seqs=1,
    policy="fcfs",
    long_prefill_token_threshold=0,
    chunked_prefill=True,
    speculation=None,
    inputs_a_step=0,
    input_units=0,
    input_tokens=0,
)


def engine_of(config: SchedulerConfig, request: Request, tokens: np.ndarray) -> State:
    """A fresh engine in which this request waits; its first `tokens` (int32[n], the prompt's and more) are known."""
    blocks = blocks_for(request.prompt_length + request.sampling.max_tokens, config.block_size)
    pages = (blocks + 1) * config.group_count
    own = replace(config, page_count=pages, state_pages=min(config.state_pages, 1), **NOBODY_ELSE)
    state = start(EngineStarted(config=own, model="", model_digest="", world_size=1, environment={}, started_ns=0))
    arrival = RequestArrived(
        id=RequestId(0), name="", prompt=request.prompt, sampling=request.sampling, priority=0, arrival_ns=0
    )  # fmt: skip
    state = reduce(state, arrival)
    if request.sampling.adapter:
        state = reduce(state, AdapterLoaded(name="", digest=request.sampling.adapter, slot=0))
    return replace(state, waiting=(replace(state.waiting[0], tokens=pack_tokens(tokens)),))


class Alone:
    """Runs requests one after the other on a private cache."""

    def __init__(self, machine: Machine, config: SchedulerConfig) -> None:
        self._machine, self._config, self.versions = machine, config, machine.versions
        self._caches: Caches | None = None

    def computed(self, request: Request, tokens: np.ndarray, end: int) -> Caches:
        """The cache with the keys and values of positions [0, end) of `tokens`; block b of group g is in page b *
        groups + g."""
        state = engine_of(self._config, request, tokens[:end])
        caches = self._room(state.config)
        while not len(state.rows) or int(state.rows.computed[0]) < end:
            state, inputs = self._planned(state)
            self._logits(state, inputs._replace(forward=inputs.forward._replace(sample_at=np.empty(0, dtype=np.int64))), caches)
            if state.in_flight[0].samples[0]:
                break
            state = reduce(state, StepCommitted(step=state.committed, tokens=b""))
        return caches

    def logprobs(self, request: Request, tokens: np.ndarray, first: int) -> list[float]:
        """The log-probabilities of `tokens` (int32[n]) from position `first`, at least 1, on: float32 values, an engine's bits."""
        state, found, start = engine_of(replace(self._config, max_num_batched_tokens=SCORED_TOGETHER), request, tokens[:-1]), [], 0
        caches = self._room(state.config)
        while start < len(tokens) - 1:
            state, inputs = self._planned(state)
            end = start + len(inputs.forward.token_ids)
            at = np.arange(max(first - 1, start), end)
            if len(at):
                logits = self._logits(state, inputs._replace(forward=inputs.forward._replace(sample_at=at - start)), caches)
                following = torch.from_numpy(tokens[at + 1].astype(np.int64))
                assert logits is not None
                logprobs = report(logits, following, 0).logprob
                assert logprobs is not None, "log-probabilities were asked for"
                found += logprobs.tolist()
            else:
                self._logits(state, inputs._replace(forward=inputs.forward._replace(sample_at=at)), caches)
            if end < len(tokens) - 1:
                state = reduce(state, StepCommitted(step=state.committed, tokens=b""))
            start = end
        return found

    def answers(self, request: Request, tokens: np.ndarray, known: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(position, sampled token, its logits float32 [V]) for every position of `tokens` from `known` on. Each is
        computed from the given tokens before it, regardless of what was sampled. Ends early if the engine ends the
        request.
        """
        state = engine_of(self._config, request, tokens[:known])
        caches, position = self._room(state.config), known
        while position < len(tokens) and state.requests:
            state, inputs = self._planned(state)
            logits = self._logits(state, inputs, caches)
            committed = b""
            if logits is not None and inputs.sampling is not None:
                with refusing():
                    token = int(sample(logits, tensors_of_sampling(inputs.sampling), own=self._machine.sampler).tokens[0])
                yield position, token, logits[0]
                committed = pack_tokens(tokens[position : position + 1])
                position += 1
            state = reduce(state, StepCommitted(step=state.committed, tokens=committed))

    def _logits(self, state: State, inputs: StepInputs, caches: Caches) -> torch.Tensor | None:
        """Those of the newest step in flight, with guidance."""
        inputs = with_halves(inputs, state) if state.config.guidance else inputs
        logits = self._machine.logits(inputs.forward, caches)
        return logits if logits is None or inputs.guided is None else inputs.guided.combined(logits)

    def _planned(self, state: State) -> tuple[State, StepInputs]:
        plan = schedule(state)
        assert plan is not None, "the request is not done"
        state = reduce(state, plan)
        inputs = rebuild(state, {}, self._machine.config.vocab_size, self._machine.vocabulary)
        return state, inputs._replace(forward=self._machine.adapters.placed(inputs.forward, state))

    def _room(self, config: SchedulerConfig) -> Caches:
        if self._caches is None or self._caches.pages < config.page_count:
            self._caches = None
            self._caches = self._machine.caches(config.page_count, config.block_size, config.state_pages)
        return self._caches
