"""Steps: how a rank computes its planned steps, and the implementation for the host.

Owns the interface between a rank and its steps. A host step is done when `launch` returns; a device step finishes later
(`gpu_loading.py`). Knows batches and a runner; folds no event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.batch.draft_batch import DraftBatch, HeadDrafts, HostModelDrafts
from vnext.runtime.batch.draft_rows import Kept
from vnext.runtime.batch.halves import with_halves
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs, spoilt_requests
from vnext.runtime.batch.words import fed_words
from vnext.runtime.protocol.messages import PromptResult, TokenLogprobs
from vnext.runtime.protocol.stats import ExpertStats, LayerLoad
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.transport.collectives.group import agreements, give_up_in_group
from vnext.state.config import SchedulerConfig
from vnext.state.drafting import drafts_a_step
from vnext.state.events import pack_tokens
from vnext.state.facilities.encoding import due
from vnext.state.state import State, StepInFlight

if TYPE_CHECKING:
    from vnext.models.layers.expert_load import ExpertLoad
    from vnext.runtime.rank.adapters import AdapterSlots


LOOK_S = 100e-6
"""How long to wait for a message before looking at a pending step: a device has its next step by then."""


class Computed(NamedTuple):
    """The results of a step, which later steps do not overwrite: sampled tokens (int32 bytes) and their log-probabilities, the
    seconds from launch to result, the words of the model's inputs (`fed`) where due, (request, why) of the samples whose
    constraint cannot be followed, and what the step computed of prompts. `counts` and `drafted` are those of StepCommitted,
    `drafts` what `fed` hashed. `experts`: their load where it is due and measured."""

    tokens: bytes
    logprobs: tuple[TokenLogprobs | None, ...]
    seconds: float
    fed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    prompts: tuple[PromptResult, ...] = ()
    counts: bytes = b""
    drafted: bytes = b""
    drafts: bytes = b""
    experts: ExpertStats | None = None


class Steps(Protocol):
    """The steps of one rank, computed in the order of their launches. One thread. `adapters` is None where it has no slots."""

    @property
    def adapters(self) -> AdapterSlots | None: ...

    @property
    def look_s(self) -> float | None:
        """How long to wait for a message before looking at a pending step; None where its result comes with a message."""

    def start(self, state: State) -> None:
        """Allocate the cache. `state` is the engine's first."""

    def launch(self, state: State) -> None:
        """Start the newest step in flight of `state`."""

    def is_there(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Computed:
        """The result of the oldest step that was launched and not waited for."""

    def give_up(self, error: Exception) -> None:
        """Memory lacks for the step that `launch` was to start. Raises `error` where other ranks do not hear of it."""

    def drop(self) -> None:
        """The steps that were launched and not waited for are over; who was in them leaves the batch, or takes a row anew."""


def is_due(state: State, step: int) -> bool:
    """Whether a step's digests must be reported."""
    return step % state.config.digest_interval == 0


def with_drafts(done: Computed, found: Kept) -> Computed:
    """The results of a step with drafts: `done` has the tokens that are kept and the log-probabilities of all samples."""
    if not found.counts:
        return done
    logprobs = tuple(done.logprobs[at] for at in found.samples.tolist()) if done.logprobs else ()
    drafts = pack_tokens(found.drafts) if done.fed else b""
    return done._replace(logprobs=logprobs, counts=found.counts, drafted=found.drafted, drafts=drafts)


def make_batch(runner: ModelRunner, config: SchedulerConfig) -> PersistentBatch:
    """The batch of a runner's engine."""
    vocabulary = runner.vocabulary(config.eos_token_ids)
    drafts: Callable[..., DraftBatch] | None = None
    if config.speculation and runner.head is not None:
        drafts = partial(HeadDrafts, runner.head)
    elif config.speculation and runner.draft is not None:
        drafts = partial(HostModelDrafts, runner.draft)
    return PersistentBatch(config, runner.config.vocab_size, vocabulary, drafts)


def fed_words_of(inputs: StepInputs, config: SchedulerConfig, adapters: AdapterSlots | None = None) -> tuple[int, ...]:
    """The words of a step's inputs (Computed.fed)."""
    return fed_words(inputs, config, adapters.digests if adapters else None)


def finished(
    batch: PersistentBatch, scheduled: StepInFlight, outputs: StepOutputs, words: tuple[int, ...], began_s: float,
    failed: tuple[tuple[int, str], ...] = (),
) -> Computed:
    """The results of a step that began at `began_s` and has sampled, once the batch has its tokens. `failed`: of constraints."""
    if outputs.spoilt or outputs.prompts:
        failed += spoilt_requests(scheduled, outputs)
    found = batch.take_sampled(scheduled, outputs.tokens)
    tokens = pack_tokens(outputs.tokens if found is None else found.tokens)  # the next step overwrites the outputs
    done = Computed(tokens, outputs.logprobs, time.perf_counter() - began_s, words, failed, outputs.prompts)
    return done if found is None else with_drafts(done, found)


def expert_stats(load: ExpertLoad) -> ExpertStats:
    """What was counted until now."""
    sums = load.end_interval()
    layers = zip(sums.layers, *(each.tolist() for each in sums[1:]))
    return ExpertStats(load.expert_count, load.rank_count, tuple(LayerLoad(*each) for each in layers))


def encode_ahead(runner: ModelRunner, state: State) -> None:
    """Compute the units of an input that go with the newest step. Raises ModelError."""
    if (found := due(state)) is not None and runner.parts.inputs is not None:
        runner.parts.inputs.advance(*found)


class HostSteps:
    """Steps on the host: `launch` computes the whole step."""

    look_s = LOOK_S

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.adapters = runner.adapters
        self._batch: PersistentBatch | None = None
        self._done: deque[Computed] = deque()

    def start(self, state: State) -> None:
        self._batch = make_batch(self._runner, state.config)
        config = state.config
        self._runner.make_cache(config.page_count, config.block_size, config.state_pages, drafts_a_step(config))

    def launch(self, state: State) -> None:
        began_s, scheduled, batch = time.perf_counter(), state.in_flight[-1], self._batch
        assert batch is not None, "start comes first"
        inputs = batch.step_inputs(state)
        if state.encoding is not None:
            encode_ahead(self._runner, state)
        outputs = self._runner.run(with_halves(inputs, state) if state.config.guidance else inputs)
        words = fed_words_of(inputs, state.config, self.adapters) if is_due(state, scheduled.step) else ()
        failed = batch.failed_constraints(scheduled) if batch.masks.matchers else ()
        done = finished(batch, scheduled, outputs, words, began_s, failed)
        if (states := self._runner.cache.states) is not None:
            states.keep(done.counts)
        if routed := self._runner.routes.ids:
            done = done._replace(prompts=done.prompts + routed.results(scheduled, inputs.forward, state.requests))
        if words and self._runner.routes.load is not None:
            done = done._replace(experts=expert_stats(self._runner.routes.load))
        for agree in agreements:
            agree()
        self._done.append(done)

    def is_there(self) -> bool:
        return bool(self._done)

    def wait(self) -> Computed:
        return self._done.popleft()

    def give_up(self, error: Exception) -> None:
        if self._runner.stage is not None:
            raise error
        give_up_in_group(error)

    def drop(self) -> None:
        self._done.clear()
        if self._batch is not None:
            self._batch.drop_steps()
