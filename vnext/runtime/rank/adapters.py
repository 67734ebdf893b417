"""The adapters of one rank: what its slots hold, and the one that is read beside running steps.

Reading makes copies in a thread of its own; a slot takes what was read when the engine's event says so. An event whose
adapter was not read before, as in the replay of a log, is read then. Decides nothing.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vnext.models.errors import ModelError
from vnext.models.layers.adapted import Adapter
from vnext.models.loading.adapter import Base, load_adapter
from vnext.runtime.messages import AdapterRead
from vnext.runtime.ring.broadcast import ReadAdapter
from vnext.state.events import AdapterEvicted, AdapterLoaded


class AdapterSlots:
    """The slots of a rank; `read`, `done` and `fold` belong to one thread."""

    def __init__(self, rank: int, base: Base, rank_max: int) -> None:
        self._rank, self._base, self._rank_max = rank, base, rank_max
        self._slots: dict[int, Adapter] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self._reading: tuple[str, Future[Adapter]] | None = None
        self._is_reported = True

    def __getitem__(self, slot: int) -> Adapter:
        return self._slots[slot]

    @property
    def is_reading(self) -> bool:
        """Whether `done` has a report to come."""
        return not self._is_reported

    def read(self, wish: ReadAdapter) -> None:
        """Begin to read an adapter, in the place of the one that was read and not used."""
        future = self._reader.submit(load_adapter, Path(wish.path), wish.digest, self._base, self._rank_max)
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
            del self._slots[event.slot]
            return
        if self._reading is not None and self._reading[0] == event.digest:
            self._slots[event.slot] = self._reading[1].result()
            self._reading = None
        else:
            self._slots[event.slot] = load_adapter(Path(event.path), event.digest, self._base, self._rank_max)
