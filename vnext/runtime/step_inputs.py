"""What a step is given: the tensors of its forward and of its sampling. Owns their form; batches make them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.models.batch import ForwardBatch
from vnext.runtime.sampling_inputs import SamplingInputs


class StepInputs(NamedTuple):
    """What one step computes and how it is sampled. `logprobs` int64[S]: alternatives each sampled row asked for, -1 none.

    `sampling` is None in a step that samples nothing.
    """

    forward: ForwardBatch
    sampling: SamplingInputs | None
    logprobs: np.ndarray
