"""A steady step: the rows of the step before, each advanced by one token.

Owns the arrays of that step and advances them in place: nothing reads a step's arrays once the next step is launched. Serves
as long as every row decodes and none enters another block. Gives the same arrays that `PersistentBatch` would build anew.
"""

from __future__ import annotations

import numpy as np

from vnext.runtime.batch.step_inputs import StepInputs
from vnext.state.state import StepInFlight


class DecodeStep:
    """`inputs` belong to a step on the CPU in which each row computes and samples one token; no other step shares their
    arrays."""

    def __init__(self, inputs: StepInputs, scheduled: StepInFlight, places: np.ndarray, block_size: int) -> None:
        """`places` int64[R]: the rows' indices among the last tokens."""
        forward = inputs.forward
        self._inputs, self._places = inputs, places
        self._owners, self._samples = scheduled.entries[:2].tobytes(), scheduled.samples.tobytes()
        self._token_ids = forward.token_ids
        self._positions = forward.positions
        sampled = inputs.sampling.position
        self._moved = (self._positions, forward.slots, forward.host.context_lengths, sampled)
        self._steps_left = int((-sampled % block_size).min())

    def next(self, scheduled: StepInFlight, last: np.ndarray) -> StepInputs | None:
        """The inputs of this step if it advances the same rows, else None; `last` int64: each row's newest token."""
        if self._steps_left == 0 or scheduled.tokens != len(self._places) or scheduled.samples.tobytes() != self._samples:
            return None
        if scheduled.entries[:2].tobytes() != self._owners:
            return None
        self._steps_left -= 1
        for values in self._moved:
            values += 1
        if self._positions.tobytes() != scheduled.starts.tobytes():
            self._steps_left = 0
            return None
        last.take(self._places, out=self._token_ids, mode="clip")
        return self._inputs
