"""The inputs of a step: the tensors of its forward and of its sampling. Owns their types; batches fill them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.models.layers.batch import ForwardBatch
from vnext.runtime.batch.prompts import PromptInputs
from vnext.sampling.inputs import SamplingInputs
from vnext.state.state import Copies


class StepInputs(NamedTuple):
    """What one step computes and how it samples. `logprobs` int64[S]: alternatives that each sampled row asked for, -1 none.

    `sampling` is None in a step that samples nothing. `prompts`: what requests want of prompts that this step computes. `copies`:
    with recurrent layers, which state pages are copied before and after the step.
    """

    forward: ForwardBatch
    sampling: SamplingInputs | None
    logprobs: np.ndarray
    prompts: PromptInputs | None = None
    copies: Copies | None = None
