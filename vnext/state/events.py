"""Events: the facts an engine is made of, in the order in which the engine core numbered them.

The list reads as the story of a run. Each event names who emits it and who reacts. Token ids travel as little-endian
int32 bytes: a prompt of 4,096 tokens decodes in no time and cannot be changed by accident.

    EngineStarted      engine core; everyone       first record of every log
    RequestArrived     engine core; scheduler      a client's request, already checked and numbered
    RequestAborted     engine core; scheduler      client gone, stop string found, shutdown
    StepPlanned        engine core; ranks          the decision, as its difference from the expected one
    StepCommitted      engine core; every rank     sampled tokens become part of the state (each rank knows its own)
    PrefixCacheReset   engine core; everyone       cached contents are forgotten
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NewType

import msgspec

from vnext.state.config import SchedulerConfig
from vnext.state.params import Sampling

if TYPE_CHECKING:  # who only passes events on needs no numpy: a start is shorter by its import
    import numpy as np

RequestId = NewType("RequestId", int)
AbortReason = Literal["client", "stop", "shutdown", "error"]


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all events."""


class EngineStarted(Event, tag=0):
    """`environment` is the determinism environment: versions, instruction set, threads, devices."""

    config: SchedulerConfig
    model: str
    model_digest: str
    world_size: int
    environment: dict[str, str]
    started_ns: int


class RequestArrived(Event, tag=1):
    """`id` counts arrivals from 0 without gaps; `name` is the client's label. `prompt` is int32 bytes, not empty."""

    id: RequestId
    name: str
    prompt: bytes
    sampling: Sampling
    priority: int
    arrival_ns: int
    cache_salt: str = ""


class RequestAborted(Event, tag=2):
    """An id that has ended already is legally ignored: a stop string may race with the last token."""

    ids: tuple[RequestId, ...]
    reason: AbortReason


class StepPlanned(Event, tag=3):
    """One plan, as its difference from `expected`: every running request advances by what it needs.

    `preempted`: rows (places in running order) that give way. `changed`: (row, tokens) where the decision is not the
    expected one. `admitted`: (place in the waiting queue, tokens), in order of admission; places count after the
    preempted requests went back into the queue. A steady decode step carries its number and three empty lists.
    """

    step: int
    preempted: tuple[int, ...] = ()
    changed: tuple[tuple[int, int], ...] = ()
    admitted: tuple[tuple[int, int], ...] = ()


class StepCommitted(Event, tag=4):
    """Sampled tokens of one step in schedule order, one for every request that sampled (int32 bytes)."""

    step: int
    tokens: bytes


class PrefixCacheReset(Event, tag=5):
    """Kept blocks lose their content's name; held blocks are no longer offered to new requests."""


AnyEvent = EngineStarted | RequestArrived | RequestAborted | StepPlanned | StepCommitted | PrefixCacheReset


def pack_tokens(tokens: np.ndarray | list[int] | tuple[int, ...]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    import numpy as np

    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """The ids of `pack_tokens` as a read-only int32 array."""
    import numpy as np

    return np.frombuffer(data, dtype="<i4")
