"""Trials: requests with which engine cores have ended twice in a row, begun one at a time, so that a third end names one.

Owns their queue and the note in the run directory that names the one on trial, from the moment from which the scheduler may begin
it until its first token. Decides nothing about other requests: they join the batch as usual.
"""

from __future__ import annotations

from collections.abc import Collection

from vnext.runtime.engine.owners import News
from vnext.runtime.processes.run_dir import SUSPECT, CoreNotes
from vnext.runtime.protocol.messages import SubmitRequest

DEATHS_MIN = 2
Submitted = tuple[bytes, SubmitRequest]
"""(client, request)."""


class Trials:
    """Mutable. `notes`: where the one `on_trial` (its id and name) is named. `queue`: the suspects that wait, of DEATHS_MIN."""

    def __init__(self, notes: CoreNotes) -> None:
        self._notes = notes
        self.queue: list[Submitted] = []
        self.on_trial: tuple[int, str] | None = None
        self._is_noted = False

    @property
    def are_due(self) -> bool:
        """Whether `next` has one."""
        return bool(self.queue) and self.on_trial is None

    def next(self) -> Submitted | None:
        """The next suspect, if none is on trial."""
        return self.queue.pop(0) if self.are_due else None

    def admit(self, id_: int, name: str, is_next: bool) -> None:
        """This suspect arrives at the engine; `is_next`: nobody waits before it."""
        self.on_trial = id_, name
        if is_next:
            self.begun((id_,))

    def begun(self, ids: Collection[int]) -> None:
        """These requests are about to have their first step, while one is on trial."""
        if self.on_trial is not None and self.on_trial[0] in ids and not self._is_noted:
            self._notes.write(SUSPECT, self.on_trial[1])
            self._is_noted = True

    def heard(self, news: News) -> None:
        """The clients get this while one is on trial: its token or its end ends the trial."""
        assert self.on_trial is not None, "nobody is on trial"
        (going, outputs), id_ = news, self.on_trial[0]
        named = any(output.number == id_ and (output.tokens or output.finish) for output in outputs)
        if named or (going is not None and (going.ids == id_).any()):
            self._notes.erase(SUSPECT)
            self.on_trial, self._is_noted = None, False

    def forget(self, peer: bytes, names: Collection[str] | None = None) -> None:
        """A client has left, or does not want these requests any more."""
        self.queue = [
            each for each in self.queue if each[0] != peer or (names is not None and each[1].name not in names)
        ]
