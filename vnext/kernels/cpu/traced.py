"""Traced: when each operation of the compiled kernels began and ended, for a profile of a step.

Owns the record that the kernels write while they are asked to. It costs nothing else: the same calls run, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import numpy as np

from vnext.kernels.cpu import native

T = TypeVar("T")


class Operation(IntEnum):
    """As the module numbers them. A LAYER holds the others of a decoder layer, EXPERTS the products of a layer's experts."""

    LAYER = 0
    PRODUCT = 1
    ATTENTION = 2
    NORM = 3
    GATE = 4
    ROTARY = 5
    ADAPTERS = 6
    ROUTE = 7
    EXPERTS = 8
    CONVOLUTION = 9
    RECURRENCE = 10
    SAMPLE = 11


FIELDS = ("operation", "thread", "began_ns", "ended_ns", "rows", "in", "out", "work", "bytes")
CALL = np.dtype([(name, np.int64) for name in FIELDS])
"""`work`: multiplications and additions; `bytes`: of weights, or of keys and values, where each row reads its own. The `in` of a
layer is its number. Times in nanoseconds, as time.monotonic_ns has them."""
native.agree_on_struct("TracedCall", FIELDS)
native.agree_on({f"OP_{each.name}": each for each in Operation})


def traced(work: Callable[[], T], record: np.ndarray) -> tuple[T, np.ndarray, int]:
    """What the work gives, its calls in the order in which they began (a view of `record`, CALL[n]), and how many more there were
    for which `record` has no room. Only one at a time in a process; nothing else may compute meanwhile. Raises RuntimeError
    without compiled kernels."""
    begin_tracing(record)
    try:
        found = work()
    finally:
        calls, more = end_tracing(record)
    return found, calls, more


def begin_tracing(record: np.ndarray) -> None:
    """Have every call from now on written into `record` (CALL[n]), which must live as long as the process where calls may run when
    it ends. Raises RuntimeError without compiled kernels."""
    native.kernels.trace_operations(record.ctypes.data, len(record))


def end_tracing(record: np.ndarray) -> tuple[np.ndarray, int]:
    """The calls since `begin_tracing` with this record, and how many more there were, as `traced` has them."""
    module = native.kernels
    count: int = module.traced_operations()
    module.trace_operations(None, 0)
    return record[:count], max(0, count - len(record))
