"""A rank of a pipeline at work: its stage of the model, and its steps where another stage samples.

Every stage folds the same events and makes the same inputs; it computes its own layers and passes the hidden states on. The last
stage samples, and its tokens come back to the stages before. These begin a step without them unless it goes on from tokens that
they do not have: so chunks of prompts follow each other through the stages, while the next token of a request waits for the one
before.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from vnext.kernels.arrays import host_dtype
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import NOTHING_SAMPLED, StepOutputs
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.stage_links import StageLinks
from vnext.runtime.rank.steps import Computed, encode_ahead, fed_words_of, finished, is_due, make_batch
from vnext.state.state import State, StepInFlight

SPOILT = -1
"""Minus a token: how the last stage tells of one of a row whose logits are no numbers."""


class StageModel:
    """A stage's part of each step, in the order of the steps. `counts` adds up what it did, by name."""

    def __init__(self, runner: ModelRunner, links: StageLinks) -> None:
        self._runner, self._links = runner, links
        self._dtype = host_dtype(runner.dtype)
        self.counts = {"steps": 0, "waited": 0}

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Compute a step from what the stage before sends. Only the last stage has outputs. Raises RankLost."""
        config, forward = self._runner.config, inputs.forward
        self.counts["steps"] += 1
        if not config.is_first:
            states = np.frombuffer(self._links.states(), self._dtype)
            inputs = inputs._replace(forward=forward._replace(states=states.reshape(-1, config.hidden_size)))
        if config.is_last:
            outputs = self._runner.run_by_parts(inputs)
            if inputs.sampling is not None:
                tokens = outputs.tokens.copy()
                tokens[list(outputs.spoilt)] = SPOILT - tokens[list(outputs.spoilt)]
                self._links.send_tokens(tokens)
            return outputs
        self._links.send_states(self._runner.states(inputs.forward))
        return NOTHING_SAMPLED

    def close(self) -> None:
        """Leave the pipeline."""
        self._links.close()


class AwaitedStep(NamedTuple):
    """A step of which this stage has done its part. `words` as in Computed.fed."""

    scheduled: StepInFlight
    is_sampled: bool
    words: tuple[int, ...]
    began_s: float


class EarlierSteps:
    """Steps of a stage before the last: `launch` computes this stage's part, and the tokens come later."""

    look_s = None
    """A commit follows every step's tokens, so nobody need look for them."""

    def __init__(self, runner: ModelRunner, stage: StageModel, links: StageLinks) -> None:
        self._runner, self._stage, self._links = runner, stage, links
        self.adapters = None
        self._awaited: deque[AwaitedStep] = deque()
        self._done: deque[Computed] = deque()

    def start(self, state: State) -> None:
        self._batch = make_batch(self._runner, state.config)
        self._runner.make_cache(state.config.page_count, state.config.block_size)

    def launch(self, state: State) -> None:
        began_s, scheduled = time.perf_counter(), state.in_flight[-1]
        needs_samples = bool(self._awaited) and self._batch.needs_samples(state)
        self._stage.counts["waited"] += needs_samples and any(step.is_sampled for step in self._awaited)
        while self._awaited and (needs_samples or not self._awaited[0].is_sampled):
            self._take()
        inputs = self._batch.step_inputs(state)
        if state.encoding is not None:
            encode_ahead(self._runner, state)
        self._runner.run(inputs)
        words = fed_words_of(inputs, state.config) if is_due(state, scheduled.step) else ()
        self._awaited.append(AwaitedStep(scheduled, inputs.sampling is not None, words, began_s))

    def is_there(self) -> bool:
        return bool(self._done)

    def wait(self) -> Computed:
        if not self._done:
            self._take()
        return self._done.popleft()

    def give_up(self, error: Exception) -> None:
        raise error

    def drop(self) -> None:
        raise AssertionError("no rank of a pipeline gives a step up")

    def _take(self) -> None:
        """Take the tokens of the oldest step that has none yet; waits for them. Raises RankLost."""
        step = self._awaited.popleft()
        outputs = _received(self._links.tokens()) if step.is_sampled else NOTHING_SAMPLED
        self._done.append(finished(self._batch, step.scheduled, outputs, step.words, step.began_s))


def _received(tokens: np.ndarray) -> StepOutputs:
    """What the last stage has sampled: tokens of rows whose logits were no numbers are negative."""
    spoilt = (tokens < 0).nonzero()[0]
    tokens[spoilt] = SPOILT - tokens[spoilt]
    return StepOutputs(tokens, (), spoilt=tuple(spoilt.tolist()))
