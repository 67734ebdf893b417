"""The loading of adapters, as the engine core sees it: asks the ranks to read one, and turns their answers into events.

One adapter is read at a time. The ranks answer when they have it; the next plan follows the events. An adapter that a rank
cannot read ends the requests that wait for it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vnext.runtime.messages import AdapterFiles, AdapterRead
from vnext.runtime.ring.broadcast import ReadAdapter, encode_read
from vnext.sched.residency import next_load
from vnext.state.events import AdapterEvicted, AdapterLoaded
from vnext.state.state import State


class Reading(NamedTuple):
    """An adapter that ranks read or have read; `answers` are those that did, with what went wrong."""

    files: AdapterFiles
    answers: dict[int, str]


class AdapterLoading:
    """What is known of adapters, by digest, and the one that is read."""

    def __init__(self, world_size: int, send: Callable[[bytes], None]) -> None:
        self._world_size, self._send = world_size, send
        self._files: dict[str, AdapterFiles] = {}
        self._reading: Reading | None = None

    def know(self, files: AdapterFiles) -> None:
        """Remember where an adapter's files are; requests that name its digest follow."""
        self._files[files.digest] = files

    def events(self, state: State) -> tuple[AdapterEvicted | AdapterLoaded, ...]:
        """What happens next: an adapter that all ranks have read gets its slot. Asks for one that is missing."""
        wish = next_load(state)
        if wish is None:
            return ()
        reading = self._reading
        if reading is None or (reading.files.digest != wish.digest and self._is_answered(reading)):
            self._reading = reading = Reading(self._files[wish.digest], {})
            self._send(encode_read(ReadAdapter(digest=wish.digest, path=reading.files.path)))
        if reading.files.digest != wish.digest or not self._is_answered(reading):
            return ()
        self._reading = None
        return wish.events(reading.files.name, reading.files.path)

    def answered(self, message: AdapterRead, state: State) -> dict[int, str]:
        """Take a rank's answer; returns the waiting requests that can never get this adapter, and why."""
        reading = self._reading
        if reading is None or reading.files.digest != message.digest:
            return {}
        reading.answers[message.rank] = message.error
        if not self._is_answered(reading) or not (error := max(reading.answers.values())):
            return {}
        self._reading = None
        waiting = (entry.id for entry in state.waiting)
        return {id_: error for id_ in waiting if state.requests[id_].sampling.adapter == message.digest}

    def _is_answered(self, reading: Reading) -> bool:
        return len(reading.answers) == self._world_size
