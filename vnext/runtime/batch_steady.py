"""A steady step: the rows of the step before once more, each one token on.

Owns the tensors of that step, which it moves on in place: nobody reads those of a step once the next one is asked for. Serves
as long as every row decodes and none enters another block; what it gives is what `PersistentBatch` would build anew.
"""

from __future__ import annotations

import numpy as np

from vnext.runtime.step_inputs import StepInputs
from vnext.state.state import Flight


class SteadyStep:
    """`inputs` are those of a step on the CPU in which each row computes one token and samples one, with tensors of its own."""

    def __init__(self, inputs: StepInputs, flight: Flight, places: np.ndarray, block_size: int) -> None:
        """`places` int64[R]: the rows' places among the last tokens."""
        forward = inputs.forward
        self._inputs, self._places = inputs, places
        self._owners, self._samples = flight.entries[:2].tobytes(), flight.samples.tobytes()
        self._token_ids = forward.token_ids.numpy()
        self._positions = forward.positions.numpy()
        sampled = inputs.sampling.position.numpy()
        self._moved = (self._positions, forward.slots.numpy(), forward.host.context_lengths, sampled)
        self._steps_left = int((-sampled % block_size).min())

    def next(self, flight: Flight, last: np.ndarray) -> StepInputs | None:
        """The inputs of this step if it is the next one of these rows, else None; `last` int64: each place's newest token."""
        if self._steps_left == 0 or flight.tokens != len(self._places) or flight.samples.tobytes() != self._samples:
            return None
        if flight.entries[:2].tobytes() != self._owners:
            return None
        self._steps_left -= 1
        for values in self._moved:
            values += 1
        if self._positions.tobytes() != flight.starts.tobytes():
            self._steps_left = 0
            return None
        last.take(self._places, out=self._token_ids, mode="clip")
        return self._inputs
