"""Measured: a recorded step runs on a warm cache, and each call of the compiled kernels is timed (kernels/cpu/traced.py).

Owns the record of the calls, their names, and what is each one's own part.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vnext.kernels.cpu.traced import CALL, Operation, traced
from vnext.models.layers.batch import ForwardBatch
from vnext.replay.rerun.batched import Batched
from vnext.replay.rerun.machine import Caches
from vnext.runtime.batch.step_inputs import StepInputs

CALLS_MAX = 1 << 17  # of one step
ELSEWHERE = "outside of the kernels"
WORDS = {
    Operation.LAYER: "sums, copies", Operation.ATTENTION: "attention", Operation.NORM: "norm", Operation.GATE: "gate",
    Operation.ROTARY: "rotation, cache write", Operation.ADAPTERS: "adapters", Operation.ROUTE: "choice of experts",
    Operation.EXPERTS: "experts' rows", Operation.CONVOLUTION: "convolution", Operation.RECURRENCE: "recurrence",
    Operation.SAMPLE: "sampling",
}  # fmt: skip


class Part(NamedTuple):
    """Calls of one name, all its own."""

    calls: int = 0
    ns: int = 0
    work: int = 0
    bytes: int = 0

    def plus(self, other: Part) -> Part:
        return Part(*(mine + its for mine, its in zip(self, other)))


class MeasuredStep(NamedTuple):
    """A step began at `began_ns` (of the monotonic clock) and took `ns`. `calls`: CALL[n], and `left_out` more."""

    began_ns: int
    ns: int
    calls: np.ndarray
    left_out: int

    def parts(self) -> Iterator[tuple[str, Part]]:
        """What belongs to each call, and to none."""
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
        slots = np.concatenate([np.asarray(each.slots) for each in (forward, *forward.groups)])
        cold = np.setdiff1d(slots // caches.block_size, warm)
        self._batched.machine.copy_pages(caches, cold, caches, cold)
        self._warm = caches, np.concatenate([warm, cold])


def parts_of(calls: np.ndarray) -> Iterator[tuple[str, Part]]:
    """Each call's name and what is its own: a call that another one of its thread holds counts for itself alone."""
    open_calls: dict[int, list[list]] = defaultdict(list)
    for call in calls:
        held = open_calls[int(call["thread"])]
        while held and held[-1][0]["ended_ns"] <= call["began_ns"]:
            yield _own(*held.pop())
        ns = int(call["ended_ns"] - call["began_ns"])
        if held:
            held[-1][1] -= ns
        held.append([call, ns])
    for held in open_calls.values():
        while held:
            yield _own(*held.pop())


def _own(call: np.void, ns: int) -> tuple[str, Part]:
    return name_of(call), Part(1, ns, int(call["work"]), int(call["bytes"]))


def name_of(call: np.void) -> str:
    """What a person calls it; a product by how many inputs and outputs it has."""
    operation = Operation(int(call["operation"]))
    return f"product {call['in']} to {call['out']}" if operation is Operation.PRODUCT else WORDS[operation]
