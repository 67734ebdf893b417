"""The adapters of one rank: what its slots hold, and the one that is read beside running steps.

Reading makes copies in a thread of its own; a slot takes what was read when the engine's event says so. An event whose
adapter was not read before, as in the replay of a log, is read then. Where steps run on a device, what was read is copied
there before it is reported (gpu/adapter_regions.py). Decides nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from vnext.models.errors import ModelError
from vnext.models.layers.adapted import Adapter
from vnext.models.loading.adapter import Base, huge_tensor, load_adapter
from vnext.runtime.protocol.messages import AdapterRead
from vnext.runtime.transport.ring.broadcast import ReadAdapter
from vnext.state.events import AdapterEvicted, AdapterLoaded

READER_NICENESS = 10


class Places(Protocol):
    """Where the adapters are that slots hold: here, or on a device. What it keeps of one is `held` below."""

    def room(self) -> Callable[[int], torch.Tensor]:
        """Makes the memory of the next adapter that is read: uint8 zeros of a size in bytes. Another thread calls it."""

    def begin(self, digest: str, adapter: Adapter) -> Any:
        """Begin to keep what was read into `room` last."""

    def is_there(self, held: Any) -> bool:
        """Whether steps could compute with it at once."""

    def use(self, held: Any) -> None:
        """Steps that are launched from now on may compute with it."""

    def free(self, held: Any) -> None:
        """They do not."""


class OnHost:
    """Each adapter in memory of its own, which goes with it."""

    def room(self) -> Callable[[int], torch.Tensor]:
        return huge_tensor

    def begin(self, digest: str, adapter: Adapter) -> Adapter:
        return adapter

    def is_there(self, held: Adapter) -> bool:
        return True

    def use(self, held: Adapter) -> None:
        pass

    def free(self, held: Adapter) -> None:
        pass


class Resident(NamedTuple):
    """What a slot holds. The files had this digest when they were read."""

    digest: str
    held: Any


class Reading:
    """An adapter that is read: in `future` while its thread works, and in `held` once it is kept."""

    def __init__(self, digest: str, future: Future[Adapter]) -> None:
        self.digest, self.future = digest, future
        self.held: Any = None


class AdapterSlots:
    """The slots of a rank; all methods belong to one thread."""

    def __init__(self, rank: int, base: Base, rank_max: int, places: Places | None = None) -> None:
        """`places`: None for this host."""
        self._rank, self._base, self._rank_max = rank, base, rank_max
        self._places = places or OnHost()
        self._residents: dict[int, Resident] = {}
        self._reader = ThreadPoolExecutor(1, "adapter", _yield_to_others)
        self._reading: Reading | None = None
        self._is_reported = True

    def __getitem__(self, slot: int) -> Any:
        """What a step computes with: the adapter, or its region on a device."""
        return self.resident(slot).held

    @property
    def digests(self) -> dict[int, str]:
        """What `__getitem__` computes with, by slot: the digest of the adapter's files."""
        return {slot: self.resident(slot).digest for slot in self._residents}

    def resident(self, slot: int) -> Resident:
        return self._residents[slot]

    @property
    def is_reading(self) -> bool:
        """Whether `done` has a report to come."""
        return not self._is_reported

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """As Base.linear_layers."""
        return self._base.linear_layers

    def read(self, request: ReadAdapter) -> None:
        """Begin to read an adapter, in the place of the one that was read and not used."""
        if self._reading is not None and self._reading.held is not None:
            self._places.free(self._reading.held)
        self._reading, self._is_reported = self._begin_reading(request.path, request.digest), False

    def done(self) -> list[AdapterRead]:
        """The report of the adapter that has been read since the last call, if one has."""
        reading = self._reading
        if self._is_reported or reading is None or not reading.future.done():
            return []
        error = reading.future.exception()
        if error is not None and not isinstance(error, ModelError | OSError | MemoryError):
            raise error
        if error is None and not self._places.is_there(self._kept(reading)):
            return []
        self._is_reported = True
        return [AdapterRead(rank=self._rank, digest=reading.digest, error=str(error) if error else "")]

    def fold(self, event: AdapterLoaded | AdapterEvicted) -> None:
        """Change a slot. Raises ModelError for an adapter that cannot be read."""
        if isinstance(event, AdapterEvicted):
            self._places.free(self._residents.pop(event.slot).held)
            return
        reading = self._reading
        if reading is not None and reading.digest == event.digest:
            self._reading = None
        else:
            if reading is not None and reading.future.exception() is None:
                self._kept(reading)  # which makes room
            reading = self._begin_reading(event.path, event.digest)
        held = self._kept(reading)
        self._places.use(held)
        self._residents[event.slot] = Resident(event.digest, held)

    def _begin_reading(self, path: str, digest: str) -> Reading:
        arguments = (Path(path), digest, self._base, self._rank_max, self._places.room())
        return Reading(digest, self._reader.submit(load_adapter, *arguments))

    def _kept(self, reading: Reading) -> Any:
        """What is kept of an adapter. Waits until it has been read; raises what reading it raised."""
        if reading.held is None:
            reading.held = self._places.begin(reading.digest, reading.future.result())
        return reading.held


def _yield_to_others() -> None:
    """Let what streams wait for have the cores first. On Linux a thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READER_NICENESS)
