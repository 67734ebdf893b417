"""The loading of adapters, as the engine core sees it: asks the ranks to read one, and turns their answers into events.

One adapter is read at a time. The ranks answer when they have it; the next plan follows the events. An adapter that a rank
cannot read ends the requests that wait for it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vnext.runtime.engine.facility import NO_ERRORS, Facility, Send
from vnext.runtime.protocol.messages import AdapterFiles, AdapterRead, RankReady
from vnext.runtime.protocol.stats import AdapterStats
from vnext.runtime.transport.ring.broadcast import ReadAdapter, encode_read
from vnext.sched.residency import next_load
from vnext.state.events import AdapterEvicted, AdapterLoaded
from vnext.state.facilities.adapters import held
from vnext.state.state import State


class Reading(NamedTuple):
    """An adapter that ranks read or have read; `answers` are those that did, with what went wrong."""

    files: AdapterFiles
    answers: dict[int, str]


class AdapterLoading(Facility):
    """Which adapter is read, and what comes of it. `files`: what is known of adapters, by digest, before requests name them."""

    answers = (AdapterRead,)

    def __init__(self, world_size: int, send: Send, files: Mapping[str, AdapterFiles]) -> None:
        self._world_size, self._send, self._files = world_size, send, files
        self._reading: Reading | None = None
        self._coming: list[AdapterEvicted | AdapterLoaded] = []
        self._loads = self._evictions = 0

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """What the ranks before had read is gone."""
        self._send, self._reading = send, None

    def next_event(self, state: State) -> AdapterEvicted | AdapterLoaded | None:
        """What happens next: an adapter that all ranks have read gets its slot. Asks for one that is missing. A slot that is
        emptied for another adapter gets it in the same frame; ranks asked for the next have given this one its slot."""
        if not self._coming:
            self._coming += self._loaded(state)
        event = self._coming.pop(0) if self._coming else None
        self.goes_out = not self._coming
        return event

    def _loaded(self, state: State) -> tuple[AdapterEvicted | AdapterLoaded, ...]:
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
        self._loads += 1
        self._evictions += wish.evicts
        return wish.events(reading.files.name, reading.files.path)

    def answered(self, message: AdapterRead, state: State) -> Mapping[int, str]:
        """The requests that wait for an adapter that a rank cannot read never get it."""
        reading = self._reading
        if reading is None or reading.files.digest != message.digest:
            return NO_ERRORS
        reading.answers[message.rank] = message.error
        if not self._is_answered(reading) or not (error := max(reading.answers.values())):
            return NO_ERRORS
        self._reading = None
        waiting = (entry.id for entry in state.waiting)
        return {id_: error for id_ in waiting if state.requests[id_].sampling.adapter == message.digest}

    def stats(self, state: State) -> dict[str, object]:
        """What slots hold and requests wait for."""
        names = {slot.digest: slot.name for slot in state.slots if slot is not None}
        waiting = [state.requests[entry.id].sampling.adapter for entry in state.waiting]
        stats = AdapterStats(
            slots=len(state.slots),
            resident=len(names),
            loads=self._loads,
            evictions=self._evictions,
            requests_waiting=sum(bool(digest) and digest not in names for digest in waiting),
            running=tuple(sorted(names[digest] for digest in held(state))),
            waiting=tuple(sorted({names.get(digest) or self._files[digest].name for digest in waiting if digest})),
        )
        return {"adapters": stats}

    def _is_answered(self, reading: Reading) -> bool:
        return len(reading.answers) == self._world_size
