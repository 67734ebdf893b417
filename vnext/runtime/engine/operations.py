"""Operations, as the engine core carries them out: one after another, each a generator of events and of waits for the ranks.

An operation that cannot be carried out changes nothing, and its client reads one sentence. Weights are checked by all ranks before
anybody has to wait for them. Ranks get commands over the ring, between the events that come before and after, and answer each.

Ranks and the engine core may die at any moment of an operation, which is then begun again: by this core with other ranks, or by the
next core, which its client asks by the same name. A change of the weights counts from the moment in which its note is written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vnext.base.spelling import reason
from vnext.models.weight_index import INDEX_SUFFIX, index_of
from vnext.runtime.engine.facility import NO_ERRORS, Facility, Send
from vnext.runtime.processes.run_dir import WEIGHTS, CoreNotes
from vnext.runtime.protocol.messages import Operate, Operated, RankAnswer, RankReady
from vnext.runtime.protocol.operations import (
    TAGS,
    CallRanks,
    CheckPiece,
    Mode,
    PauseEngine,
    PutToSleep,
    Residence,
    ResumeEngine,
    Tag,
    UpdateWeights,
    WakeUp,
)
from vnext.runtime.transport.ring.broadcast import encode_command
from vnext.runtime.transport.ring.commands import AnyCommand, CallFunction, CheckWeights, Release, Restore
from vnext.state.events import AnyEvent, EnginePaused, EngineStarted, Pause, RequestAborted, RequestId, WeightsChanged
from vnext.state.facilities.weights import is_drained
from vnext.state.state import State, Weights

Course = Generator[AnyEvent | None, None, Any]
"""Yields events to be folded, None to wait; returns the operation's value."""
LOST = "the weights were discarded by sleep(level=2): give new ones with update_weights first"
log = logging.getLogger(__name__)


class CannotDo(Exception):
    """Why an operation was not carried out, in one sentence."""


class _Asked(NamedTuple):
    peer: bytes
    message: Operate


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine core that follows this one begins with: the weights since a change (None: the checkpoint's own), the name of
    the operation that changed them, and the pause that clients have asked for."""

    model_digest: str
    weights: Weights | None = None
    update: str = ""
    paused: Pause = ""


def handover_of(notes: CoreNotes, model_digest: str) -> Handover:
    """What the engine core before this one noted. Weights of another model do not count."""
    text = notes.text(WEIGHTS)
    found = Handover(model_digest=model_digest) if text is None else msgspec.json.decode(text, type=Handover)
    return found if found.model_digest == model_digest else Handover(model_digest=model_digest, paused=found.paused)


class Operations(Facility):
    """The operations of one engine core. It is on while one of them is carried out or waits."""

    answers = (RankAnswer,)
    goes_out = True

    def __init__(
        self, started: EngineStarted, send: Send, tell: Callable[[bytes, Operated], None], notes: CoreNotes
    ) -> None:
        """`tell` answers a client. `notes`: where `handover` is, for an engine core that follows this one."""
        self.is_on = False
        self._world_size, self._send, self._tell, self._notes = started.world_size, send, tell, notes
        self.handover = handover_of(notes, started.model_digest)
        self._queue: deque[_Asked] = deque()
        self._current: tuple[_Asked, Course] | None = None
        self._serial = 0  # of the newest command
        self._answers: dict[int, RankAnswer] = {}
        self._asleep: tuple[Tag, ...] = ()
        self._is_lost = False
        self._owned = self._files()
        self._resident_bytes = 0

    def ask_all(self, asked: list[tuple[bytes, Operate]]) -> None:
        """Take what clients have asked for, first come first."""
        self._queue.extend(_Asked(*each) for each in asked)
        asked.clear()
        self.is_on = True

    def answered(self, message: RankAnswer, state: State) -> Mapping[int, str]:
        """An answer to an earlier command is dropped."""
        if message.serial == self._serial:
            self._answers[message.rank] = message
        return NO_ERRORS

    def begin_again(self, send: Send, ranks: Sequence[RankReady]) -> None:
        """They have begun, awake, with the state's weights; what was asked of those before is asked again."""
        self._send, self._asleep = send, ()
        if self._current is not None:
            asked = self._current[0]
            self._current = asked, self._course(asked.message)

    def next_event(self, state: State) -> AnyEvent | None:
        """The next event of the operation that is carried out; None while there is none or it waits. What it returned before has
        been folded and broadcast."""
        self._state = state
        while self._current is not None or self._queue:
            if self._current is None:
                asked = self._queue.popleft()
                self._current = asked, self._course(asked.message)
            asked, course = self._current
            try:
                return next(course)
            except StopIteration as done:
                self._current = None
                self._end(asked, done.value, "")
            except CannotDo as error:
                self._current = None
                self._discard(asked.message)
                self._end(asked, None, str(error))
        self.is_on = False
        return None

    def stats(self, state: State) -> dict[str, object]:
        weights = state.weights
        residence = Residence(
            paused=state.paused, asleep=self._asleep, version=weights.version if weights else 0,
            digest=weights.digest if weights else "", resident_bytes=self._resident_bytes,
        )  # fmt: skip
        return {"residence": residence}

    def _end(self, asked: _Asked, value: object, error: str) -> None:
        self._tell(asked.peer, Operated(name=asked.message.name, error=error, value=msgspec.json.encode(value)))

    def _course(self, message: Operate) -> Course:
        match message.operation:
            case UpdateWeights() as operation:
                return self._update(operation, message.name)
            case PauseEngine(mode=mode):
                return self._pause_and_wait(mode)
            case ResumeEngine():
                return self._resume()
            case PutToSleep() as operation:
                return self._sleep(operation)
            case WakeUp(tags=tags):
                return self._wake_up(tags)
            case CallRanks(function=function, arguments=arguments):
                return self._call(function, arguments)
            case CheckPiece(path=path):
                return self._command(CheckWeights(serial=0, paths=(path,), partial=True, is_piece=True))

    # ---- the operations --------------------------------------------------------------------------------------------

    def _update(self, operation: UpdateWeights, name: str) -> Course:
        if self.handover.update != name:
            yield from self._change(operation, name)
        yield from self._call("resident_bytes", {})  # answered once every rank computes with them
        self._is_lost, self._asleep = False, tuple(tag for tag in self._asleep if tag != "weights")
        before, self._owned = self._owned, self._files()
        _remove(before - self._owned)
        yield from self._unpause()
        weights = self._state.weights
        assert weights is not None, "they have changed"
        return {"version": weights.version, "digest": weights.digest}

    def _change(self, operation: UpdateWeights, name: str) -> Course:
        path, before = operation.paths[0], self._state.weights.path if self._state.weights else ""
        index = self._notes.path(f"weights.{name}{INDEX_SUFFIX}") if operation.partial or len(operation.paths) > 1 else ""
        command = CheckWeights(serial=0, paths=operation.paths, partial=operation.partial, base=before, index=index)
        checked = yield from self._command(command)
        newest = self._state.weights.version if self._state.weights else 0
        version = operation.version or newest + 1
        if version <= newest:
            raise CannotDo(f"version {version} of the weights would follow version {newest}: versions grow")
        if not self._state.paused:
            yield from self._pause(operation.mode)
        while not is_drained(self._state):
            yield None
        weights = Weights(version, next(filter(None, checked)), index or path)
        try:
            self._hand_over(weights=weights, update=name)
        except CannotDo:
            yield from self._unpause()
            raise
        yield WeightsChanged(version=weights.version, digest=weights.digest, path=weights.path)

    def _pause_and_wait(self, mode: Mode) -> Course:
        if self._state.paused == "sleep":
            raise CannotDo("the engine sleeps: wake_up comes before pause")
        self._hand_over(paused=mode)
        yield from self._pause(mode)
        while not is_drained(self._state):
            yield None
        return {"paused": mode}

    def _resume(self) -> Course:
        if self._state.paused == "sleep":
            raise CannotDo(LOST if self._is_lost else "the engine sleeps: use wake_up")
        self._hand_over(paused="")
        yield from self._unpause()
        return {"paused": ""}

    def _sleep(self, operation: PutToSleep) -> Course:
        if operation.level not in (1, 2):
            raise CannotDo(f"level is {operation.level}: 1 keeps the weights' files, 2 forgets the weights")
        if self._state.paused != "sleep":
            yield from self._command(Release(serial=0, tags=()))  # whether they can
            self._hand_over(paused="sleep")
            yield from self._pause(operation.mode)
            while not is_drained(self._state):
                yield None
            yield EnginePaused(mode="sleep")
        self._log_bytes(self._state.paused, (yield from self._command(Release(serial=0, tags=TAGS))))
        self._asleep, self._is_lost = TAGS, self._is_lost or operation.level == 2
        return {"level": operation.level, "resident_bytes": self._resident_bytes}

    def _wake_up(self, tags: tuple[Tag, ...]) -> Course:
        rest = tuple(tag for tag in self._asleep if tag not in tags)
        if self._is_lost and not rest and self._state.paused == "sleep":
            raise CannotDo(LOST)
        if "weights" in tags and "weights" in self._asleep and not self._is_lost:
            weights = self._state.weights
            path, digest = (weights.path, weights.digest) if weights else ("", "")
            self._log_bytes("weights", (yield from self._command(Restore(serial=0, path=path, digest=digest))))
        self._asleep = rest
        if not rest and self._state.paused == "sleep":
            self._hand_over(paused="")
            yield from self._unpause()
        return {"asleep": list(rest), "resident_bytes": self._resident_bytes}

    # ---- their parts -----------------------------------------------------------------------------------------------

    def _pause(self, mode: Mode) -> Course:
        live = tuple(sorted(RequestId(id_) for id_, _ in self._state.requests.items()))
        if mode == "abort" and live:
            yield RequestAborted(ids=live, reason="client")
        if self._state.paused != mode:
            yield EnginePaused(mode=mode)

    def _unpause(self) -> Course:
        """Pause as clients have asked for, if at all."""
        if self._state.paused != self.handover.paused:
            yield EnginePaused(mode=self.handover.paused)

    def _hand_over(self, **changes: Any) -> None:
        """Raises CannotDo, with nothing changed."""
        handover = msgspec.structs.replace(self.handover, **changes)
        try:
            self._notes.replace(WEIGHTS, msgspec.json.encode(handover).decode())
        except OSError as error:
            raise CannotDo(f"the engine cannot note it for its recovery ({reason(error)}); nothing has changed") from error
        self.handover = handover

    def _call(self, function: str, arguments: dict[str, Any]) -> Course:
        values = yield from self._command(CallFunction(serial=0, function=function, arguments=arguments))
        if function == "resident_bytes":
            self._log_bytes(function, values)
        return values

    def _command(self, command: AnyCommand) -> Generator[None, None, list[Any]]:
        """The ranks' values, by rank. Raises CannotDo with the first rank's error."""
        self._serial, self._answers = self._serial + 1, {}
        self._send(encode_command(msgspec.structs.replace(command, serial=self._serial)))
        while len(self._answers) < self._world_size:
            yield None
        answers = [self._answers[rank] for rank in range(self._world_size)]
        if error := next((answer.error for answer in answers if answer.error), ""):
            raise CannotDo(error)
        return [msgspec.json.decode(answer.value) for answer in answers]

    def _log_bytes(self, what: str, sizes: list[int]) -> None:
        self._resident_bytes = sum(sizes)
        log.info("%s: %d bytes are resident", what, self._resident_bytes)

    def _files(self) -> set[str]:
        """The engine's own files among those of the weights that are handed over."""
        path = self.handover.weights.path if self.handover.weights else ""
        files = {path, *map(str, index_of(Path(path)).values())}
        return {file for file in files if self._notes.is_beside(file)}

    def _discard(self, message: Operate) -> None:
        """Remove the engine's own files of an update that was not carried out."""
        match message.operation:
            case UpdateWeights(paths=paths):
                files = {*paths, self._notes.path(f"weights.{message.name}{INDEX_SUFFIX}")}
            case CheckPiece(path=path):
                files = {path}
            case _:
                return
        _remove({file for file in files if self._notes.is_beside(file)} - self._owned)


def _remove(files: set[str]) -> None:
    for file in files:
        with suppress(OSError):
            Path(file).unlink()
