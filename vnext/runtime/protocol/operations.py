"""Operations on an engine that runs. Typed messages; nothing is pickled.

An operation comes from a client, is carried out by the engine core (core/operations.py), one after another, and is answered once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.state.events import Pause

Mode = Literal["wait", "keep", "abort"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
Plain = str | int | float | bool | None


class Operation(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of all operations."""


def _require_sendable(name: str, value: Plain) -> None:
    """Raise InvalidRequest for a number that no message can hold."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidRequest(f"{name} is a number of more than 64 bits, which ranks cannot be sent.", name)


class UpdateWeights(Operation, frozen=True, tag=0):
    """Compute with the tensors in the folders or files `paths`; `partial`: what they lack stays as it is. `version` 0 is the next
    one. Files in the run directory are the engine's, which removes them when it has no more use for them."""

    paths: tuple[str, ...]
    mode: Mode = "wait"
    version: int = 0
    partial: bool = False

    def __post_init__(self) -> None:
        _require_sendable("version", self.version)


class PauseEngine(Operation, frozen=True, tag=1):
    mode: Mode = "wait"


class ResumeEngine(Operation, frozen=True, tag=2):
    """Has no fields."""


class PutToSleep(Operation, frozen=True, tag=3):
    """Level 1 gives back the memory of cache and weights, which come back from their files; level 2 forgets the weights."""

    level: int = 1
    mode: Mode = "wait"


class WakeUp(Operation, frozen=True, tag=4):
    tags: tuple[Tag, ...] = TAGS


class CallRanks(Operation, frozen=True, tag=5):
    """Call a registered function (rank/weights.py) on every rank; its value is one for each."""

    function: str
    arguments: dict[str, Plain] = {}

    def __post_init__(self) -> None:
        for name, value in self.arguments.items():
            _require_sendable(f"kwargs.{name[:60]}", value)


class CheckPiece(Operation, frozen=True, tag=6):
    """Say whether the tensors in the file `path` may be a part of an update. One that may not is removed as after UpdateWeights."""

    path: str


AnyOperation = UpdateWeights | PauseEngine | ResumeEngine | PutToSleep | WakeUp | CallRanks | CheckPiece


class Residence(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine computes with and holds: the pause, the parts without memory, the version and digest of the weights (0 and ""
    before the first change), and the resident bytes of all ranks when they last reported them."""

    paused: Pause = ""
    asleep: tuple[Tag, ...] = ()
    version: int = 0
    digest: str = ""
    resident_bytes: int = 0


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a tensor lies: `offset` bytes into the POSIX shared memory named `segment`, dense. `dtype` is torch's name for it."""

    name: str
    dtype: str
    shape: list[int]
    segment: str
    offset: int = 0
