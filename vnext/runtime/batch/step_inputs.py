"""The inputs of a step: the tensors of its forward and of its sampling. Owns their types; batches fill them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, as_tensor
from vnext.models.layers.batch import ForwardBatch
from vnext.runtime.batch.prompts import PromptInputs
from vnext.sampling.inputs import SamplingInputs
from vnext.state.state import Copies


class Guided(NamedTuple):
    """The last G samples of a step are of other halves. Of each pair `with_prompt` int64[G] is the sample behind the prompt and
    `without` int64[G] the one behind the negative prompt; the earlier one is the request's. `scales` are float32[G]."""

    with_prompt: np.ndarray
    without: np.ndarray
    scales: np.ndarray

    def combined(self, logits: Array) -> Array:
        """float32[S, V] of logits float32[S + G, V], which may be overwritten."""
        is_host, count = isinstance(logits, np.ndarray), len(logits) - len(self.scales)
        arrays = *self, np.minimum(self.with_prompt, self.without)
        with_prompt, without, scales, rows = arrays if is_host else map(as_tensor, arrays)
        base = logits[without]
        pushed = base + scales[:, None] * (logits[with_prompt] - base)
        if not is_host:
            return logits[:count].index_copy(0, rows, pushed)
        logits[rows] = pushed
        return logits[:count]


class StepInputs(NamedTuple):
    """What one step computes and how it samples. `logprobs` int64[S]: alternatives that each sampled row asked for, -1 none.

    `sampling` is None in a step that samples nothing. `prompts`: what requests want of prompts that this step computes. `copies`:
    with recurrent layers, which state pages are copied before and after the step. `guided`: None where no sample is.
    """

    forward: ForwardBatch
    sampling: SamplingInputs | None
    logprobs: np.ndarray
    prompts: PromptInputs | None = None
    copies: Copies | None = None
    guided: Guided | None = None
