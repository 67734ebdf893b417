"""Steps: how a rank computes its planned steps, and the implementation for the host.

Owns the interface between a rank and its steps. A host step is done when `launch` returns; a device step finishes later
(`device_steps.py`). Knows batches and a runner; folds no event.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.batch.draft_batch import DraftBatch
from vnext.runtime.batch.draft_rows import Kept
from vnext.runtime.batch.head_batch import HeadDrafts
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.words import fed_words
from vnext.runtime.collectives.group import require_whole_group
from vnext.runtime.messages import PromptResult, TokenLogprobs
from vnext.runtime.rank.runner import ModelRunner
from vnext.state.config import SchedulerConfig
from vnext.state.events import pack_tokens
from vnext.state.state import State

if TYPE_CHECKING:
    from vnext.runtime.rank.adapters import AdapterSlots


class Computed(NamedTuple):
    """The results of a step, which later steps do not overwrite: sampled tokens (int32 bytes) and their log-probabilities, the
    seconds from launch to result, the words of the model's inputs (`fed`) where due, (request, why) of the samples whose
    constraint cannot be followed, and what the step computed of prompts. `counts` and `drafted` are those of StepCommitted, and
    `drafts` what `fed` hashed."""

    tokens: bytes
    logprobs: tuple[TokenLogprobs | None, ...]
    seconds: float
    fed: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    prompts: tuple[PromptResult, ...] = ()
    counts: bytes = b""
    drafted: bytes = b""
    drafts: bytes = b""


class Steps(Protocol):
    """The steps of one rank, computed in the order of their launches. One thread. `adapters` is None where it has no slots."""

    adapters: AdapterSlots | None

    def start(self, state: State) -> None:
        """Allocate the cache. `state` is the engine's first."""

    def launch(self, state: State) -> None:
        """Start the newest step in flight of `state`."""

    def is_there(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Computed:
        """The result of the oldest step that was launched and not waited for."""


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


class HostSteps:
    """Steps on the host: `launch` computes the whole step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.adapters = runner.adapters
        self._batch: PersistentBatch | None = None
        self._done: deque[Computed] = deque()

    def start(self, state: State) -> None:
        config = state.config
        runner = self._runner
        vocabulary = runner.vocabulary(config.eos_token_ids)
        models = ((HeadDrafts, runner.head), (DraftBatch, runner.draft)) if config.speculation else ()
        drafts = next((partial(made_of, model) for made_of, model in models if model), None)
        self._batch = PersistentBatch(config, runner.config.vocab_size, vocabulary, drafts)
        self._runner.make_cache(config.page_count, config.block_size)

    def launch(self, state: State) -> None:
        began_s, scheduled = time.perf_counter(), state.in_flight[-1]
        inputs = self._batch.step_inputs(state)
        outputs = self._runner.run(inputs)
        words = self._fed_words(inputs, state.config) if is_due(state, scheduled.step) else ()
        require_whole_group()
        failed = self._batch.failed_constraints(scheduled)
        found = self._batch.take_sampled(scheduled, outputs.tokens)
        tokens = pack_tokens(outputs.tokens if found is None else found.tokens)  # the next step overwrites the outputs
        seconds = time.perf_counter() - began_s
        prompts = outputs.prompts
        if routed := self._runner.routed:
            prompts += routed.results(scheduled, inputs.forward, state.requests)
        done = Computed(tokens, outputs.logprobs, seconds, words, failed, prompts)
        self._done.append(done if found is None else with_drafts(done, found))

    def _fed_words(self, inputs: StepInputs, config: SchedulerConfig) -> tuple[int, ...]:
        return fed_words(inputs, config, self.adapters.digests if self.adapters else None)

    def is_there(self) -> bool:
        return bool(self._done)

    def wait(self) -> Computed:
        return self._done.popleft()
