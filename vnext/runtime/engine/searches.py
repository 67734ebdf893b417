"""Searches, as the engine core runs them: it has ranks look for vectors of inputs in files, and tells what all have read.

Which request is next is decided in vnext/sched/encoding.py. Each is looked for when it arrives, and again behind the loss of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from vnext.runtime.engine.facility import NO_ERRORS, Facility, Send
from vnext.runtime.protocol.messages import InputsRead, RankReady
from vnext.runtime.transport.ring.broadcast import FetchInputs, encode_fetch
from vnext.sched.encoding import next_search
from vnext.state.events import InputsFound, InputsSought, RequestId
from vnext.state.state import State
from vnext.state.store.inputs import has_inputs

LOOK_MS, PATIENCE_S = 1000, 10.0
"""A search that takes longer is given up: the inputs are encoded."""


class Searches(Facility):
    """Requests whose inputs are looked for, and those that are to be."""

    answers = (InputsRead,)

    def __init__(self, keepers: int, send: Send, tickets: dict[int, str]) -> None:
        """`keepers`: the ranks that look; `tickets`: of requests whose inputs another engine has encoded."""
        self._keepers, self._tickets = keepers, tickets
        self.begin_again(send, ())

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """Other ranks have read nothing."""
        self._send, self._next_id = send, 0
        self._wanted: dict[int, None] = {}
        self._began_s: dict[int, float] = {}
        self._read: dict[int, dict[int, InputsRead]] = {}

    def wait_ms(self, state: State) -> int | None:
        """A search may take too long."""
        return LOOK_MS if self._began_s else None

    def answered(self, message: InputsRead, state: State) -> Mapping[int, str]:
        if message.id in self._began_s:
            self._read.setdefault(message.id, {})[message.rank] = message
        return NO_ERRORS

    def next_event(self, state: State) -> InputsSought | InputsFound | None:
        return self._found(state) or self._sought(state)

    def _found(self, state: State) -> InputsFound | None:
        """The end of a search in which all ranks have read what there is, or which takes too long."""
        for id_, began_s in list(self._began_s.items()):
            answers = self._read.get(id_, {})
            is_late = time.monotonic() - began_s > PATIENCE_S
            if len(answers) < self._keepers and not is_late and id_ in state.requests:
                continue
            del self._began_s[id_]
            self._read.pop(id_, None)
            if id_ in state.requests:
                everywhere = set.intersection(*(set(answer.places) for answer in answers.values())) if not is_late else set[int]()
                return InputsFound(id=RequestId(id_), places=tuple(sorted(everywhere)))
        return None

    def _sought(self, state: State) -> InputsSought | None:
        """The next search. A request that computes no input is forgotten."""
        if self._next_id < state.next_id:
            live = range(self._next_id, state.next_id) if self._next_id else sorted(id_ for id_, _ in state.requests.items())
            self._wanted.update((id_, None) for id_ in live if id_ in state.requests and has_inputs(state.requests[id_].prompt))
            self._next_id = state.next_id
        if not self._wanted:
            return None
        for id_ in [id_ for id_ in self._tickets if id_ not in state.requests]:
            del self._tickets[id_]
        event = next_search(state, self._wanted)
        if event is not None and (ticket := self._tickets.get(event.id)):
            self._send(encode_fetch(FetchInputs(id=event.id, ticket=ticket)))
        for id_ in list(self._wanted):
            del self._wanted[id_]
            if event is not None and id_ == event.id:
                self._began_s[id_] = time.monotonic()
                break
        return event
