"""Calls of the compiled kernels (kernels/cpu/traced.py): what a person calls each, and what is its own part of the time.

Loads no torch: a running engine's calls are drawn beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from vnext.kernels.cpu.traced import CALL, Operation

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


def calls_in(data: bytes) -> np.ndarray:
    """The calls in the bytes of a record: CALL[n]. Raises ValueError where they are none."""
    return np.frombuffer(data, dtype=CALL)


def parts_of(calls: np.ndarray) -> Iterator[tuple[str, Part]]:
    """Each call's name and what is its own: a call that another one of its thread holds counts for itself alone."""
    open_calls: dict[int, list[tuple[np.void, int]]] = defaultdict(list)
    for call in calls:
        held = open_calls[int(call["thread"])]
        while held and held[-1][0]["ended_ns"] <= call["began_ns"]:
            yield _own(*held.pop())
        ns = int(call["ended_ns"] - call["began_ns"])
        if held:
            held[-1] = held[-1][0], held[-1][1] - ns
        held.append((call, ns))
    for held in open_calls.values():
        while held:
            yield _own(*held.pop())


def add_parts(totals: dict[str, Part], more: Iterable[tuple[str, Part]]) -> None:
    """Add named parts to those that are there."""
    for name, part in more:
        totals[name] = part.plus(totals[name]) if name in totals else part


def _own(call: np.void, ns: int) -> tuple[str, Part]:
    return name_of(call), Part(1, ns, int(call["work"]), int(call["bytes"]))


def name_of(call: np.void) -> str:
    """What a person calls it; a product by how many inputs and outputs it has."""
    operation = Operation(int(call["operation"]))
    return f"product {call['in']} to {call['out']}" if operation is Operation.PRODUCT else WORDS[operation]
