"""Measured: a recorded step runs on a warm cache, and each call of the compiled kernels is timed (kernels/cpu/traced.py).

Owns the record of the calls; calls.py has their names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vnext.kernels.cpu.traced import CALL, traced
from vnext.models.layers.batch import ForwardBatch
from vnext.replay.rerun.batched import Batched
from vnext.replay.rerun.calls import ELSEWHERE, Part, add_parts, parts_of
from vnext.replay.rerun.machine import Caches
from vnext.runtime.batch.step_inputs import StepInputs

CALLS_MAX = 1 << 17  # of one step


class MeasuredStep(NamedTuple):
    """A step began at `began_ns` (of the monotonic clock) and took `ns`. `calls`: CALL[n], and `left_out` more."""

    began_ns: int
    ns: int
    calls: np.ndarray
    left_out: int

    def add_to(self, totals: dict[str, Part]) -> None:
        """Add what belongs to each call, and to none."""
        add_parts(totals, self._parts())

    def _parts(self) -> Iterator[tuple[str, Part]]:
        within = 0
        for name, part in parts_of(self.calls):
            within += part.ns
            yield name, part
        yield ELSEWHERE, Part(1, max(0, self.ns - within))


class Measured:
    """Runs steps on the caches of `batched`. Mutable."""

    def __init__(self, batched: Batched) -> None:
        self._batched, self._record = batched, np.zeros(CALLS_MAX, dtype=CALL)
        self._warm: tuple[Caches | None, np.ndarray] = None, np.zeros(0, dtype=np.int64)

    def run(self, inputs: StepInputs) -> MeasuredStep:
        self._touch(inputs.forward)
        began_ns = time.monotonic_ns()
        _, calls, more = traced(lambda: self._batched.run(inputs), self._record)
        return MeasuredStep(began_ns, time.monotonic_ns() - began_ns, calls.copy(), more)

    def _touch(self, forward: ForwardBatch) -> None:
        """Have the system give the memory of pages that are written for the first time, which an engine has by then."""
        caches = self._batched.caches
        warm = self._warm[1] if self._warm[0] is caches else self._warm[1][:0]
        slots = np.concatenate([np.asarray(each) for each in (forward.slots, *(group.slots for group in forward.groups))])
        cold = np.setdiff1d(slots // caches.block_size, warm)
        self._batched.machine.copy_pages(caches, cold, caches, cold)
        self._warm = caches, np.concatenate([warm, cold])
