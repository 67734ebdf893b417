"""The adapters of one rank: what its slots hold, and the one that is read beside running steps.

Reading makes copies in a thread of its own; a slot takes what was read when the engine's event says so. An event whose
adapter was not read before, as in the replay of a log, is read then. Decides nothing.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from vnext.models.errors import ModelError
from vnext.models.layers.adapted import Adapter
from vnext.models.loading.adapter import Base, load_adapter
from vnext.runtime.messages import AdapterRead
from vnext.runtime.ring.broadcast import ReadAdapter
from vnext.state.events import AdapterEvicted, AdapterLoaded

READER_NICENESS = 10


class Resident(NamedTuple):
    """What a slot holds. The files had this digest when they were read."""

    digest: str
    adapter: Adapter


class AdapterSlots:
    """The slots of a rank; `read`, `done` and `fold` belong to one thread."""

    def __init__(self, rank: int, base: Base, rank_max: int) -> None:
        self._rank, self._base, self._rank_max = rank, base, rank_max
        self._residents: dict[int, Resident] = {}
        self._reader = ThreadPoolExecutor(1, "adapter", _yield_to_others)
        self._reading: tuple[str, Future[Resident]] | None = None
        self._is_reported = True

    def __getitem__(self, slot: int) -> Adapter:
        return self.resident(slot).adapter

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

    def read(self, wish: ReadAdapter) -> None:
        """Begin to read an adapter, in the place of the one that was read and not used."""
        future = self._reader.submit(self._load, wish.path, wish.digest)
        self._reading, self._is_reported = (wish.digest, future), False

    def done(self) -> list[AdapterRead]:
        """The report of the adapter that has been read since the last call, if one has."""
        if self._is_reported or self._reading is None or not self._reading[1].done():
            return []
        digest, future = self._reading
        self._is_reported = True
        error = future.exception()
        if error is not None and not isinstance(error, ModelError | OSError | MemoryError):
            raise error
        return [AdapterRead(rank=self._rank, digest=digest, error=str(error) if error else "")]

    def fold(self, event: AdapterLoaded | AdapterEvicted) -> None:
        """Change a slot. Raises ModelError for an adapter that cannot be read."""
        if isinstance(event, AdapterEvicted):
            del self._residents[event.slot]
            return
        if self._reading is not None and self._reading[0] == event.digest:
            self._residents[event.slot] = self._reading[1].result()
            self._reading = None
        else:
            self._residents[event.slot] = self._load(event.path, event.digest)

    def _load(self, path: str, digest: str) -> Resident:
        return Resident(digest, load_adapter(Path(path), digest, self._base, self._rank_max))


def _yield_to_others() -> None:
    """Let what streams wait for have the cores first. On Linux a thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READER_NICENESS)
