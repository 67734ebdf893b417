"""Operations, as the engine core carries them out: one after another, each a generator of events and of waits for the ranks.

An operation that cannot be carried out changes nothing, and its client reads one sentence. Weights are checked by all ranks before
anybody has to wait for them. Ranks get commands over the ring, between the events that come before and after, and answer each.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vnext.runtime.messages import Operate, Operated, RankAnswer
from vnext.runtime.operations import (
    TAGS,
    AnyOperation,
    CallRanks,
    Mode,
    PauseEngine,
    PutToSleep,
    Residence,
    ResumeEngine,
    Tag,
    UpdateWeights,
    WakeUp,
)
from vnext.runtime.processes.run_dir import WEIGHTS, CoreNotes
from vnext.runtime.ring.broadcast import encode_command
from vnext.runtime.ring.commands import AnyCommand, CallFunction, CheckWeights, Release, Restore
from vnext.state.events import AnyEvent, EnginePaused, EngineStarted, RequestAborted, RequestId, WeightsChanged
from vnext.state.state import State, Weights
from vnext.state.weights import is_drained

Course = Generator[AnyEvent | None, None, Any]
"""Yields events to be folded, None to wait; returns the operation's value."""
LOST = "the weights were discarded by sleep(level=2): give new ones with update_weights first"
ENDED = "the ranks have ended and others have begun: ask again"
log = logging.getLogger(__name__)


class CannotDo(Exception):
    """Why an operation was not carried out, in one sentence."""


class _Asked(NamedTuple):
    peer: bytes
    message: Operate


def weights_of(notes: CoreNotes, model_digest: str) -> Weights | None:
    """What an engine core before this one computed with at last; None for the checkpoint's own weights, and another model's."""
    text = notes.text(WEIGHTS)
    found, weights = ("", None) if text is None else msgspec.json.decode(text, type=tuple[str, Weights])
    return weights if found == model_digest else None


class Operations:
    """The operations of one engine core. `send` broadcasts a ring message, `tell` answers a client."""

    def __init__(
        self, started: EngineStarted, send: Callable[[bytes], None], tell: Callable[[bytes, Operated], None], notes: CoreNotes
    ) -> None:
        """`notes`: for an engine core that follows this one with the same model, and begins with the same weights."""
        self._world_size, self._send, self._tell, self._notes = started.world_size, send, tell, notes
        self._model_digest = started.model_digest
        self._queue: deque[_Asked] = deque()
        self._current: tuple[_Asked, Course] | None = None
        self._serials = count(1)
        self._serial = 0
        self._answers: dict[int, RankAnswer] = {}
        self._asleep: tuple[Tag, ...] = ()
        self._is_lost = False
        self._owned = ""
        self._resident_bytes = 0

    def ask(self, peer: bytes, message: Operate) -> None:
        self._queue.append(_Asked(peer, message))

    def answered(self, message: RankAnswer) -> None:
        """Take a rank's answer; one to an earlier command is dropped."""
        if message.serial == self._serial:
            self._answers[message.rank] = message

    def begin_again(self, send: Callable[[bytes], None]) -> None:
        """Other ranks have begun, awake, with the state's weights; nobody answers what was asked."""
        self._send, self._asleep = send, ()
        if self._current is not None:
            asked, self._current = self._current[0], None
            self._end(asked, None, ENDED)

    def next_event(self, state: State) -> AnyEvent | None:
        """The next event of the operation that is carried out; None while there is none or it waits. What it returned before has
        been folded and broadcast."""
        self._state = state
        while self._current is not None or self._queue:
            if self._current is None:
                asked = self._queue.popleft()
                self._current = asked, self._course(asked.message.operation)
            asked, course = self._current
            try:
                return next(course)
            except StopIteration as done:
                self._current = None
                self._end(asked, done.value, "")
            except CannotDo as error:
                self._current = None
                self._end(asked, None, str(error))
        return None

    def residence(self, state: State) -> Residence:
        weights = state.weights
        return Residence(
            paused=state.paused, asleep=self._asleep, version=weights.version if weights else 0,
            digest=weights.digest if weights else "", resident_bytes=self._resident_bytes,
        )  # fmt: skip

    def _end(self, asked: _Asked, value: Any, error: str) -> None:
        self._tell(asked.peer, Operated(name=asked.message.name, error=error, value=msgspec.json.encode(value)))

    def _course(self, operation: AnyOperation) -> Course:
        match operation:
            case UpdateWeights():
                return self._update(operation)
            case PauseEngine():
                return self._pause_and_wait(operation.mode)
            case ResumeEngine():
                return self._resume()
            case PutToSleep():
                return self._sleep(operation)
            case WakeUp():
                return self._wake_up(operation.tags)
            case CallRanks():
                return self._call(operation.function, operation.arguments)

    # ---- the operations --------------------------------------------------------------------------------------------

    def _update(self, operation: UpdateWeights) -> Course:
        checked = yield from self._command(CheckWeights(serial=0, path=operation.path))
        weights, before = self._state.weights, self._state.paused
        newest = weights.version if weights else 0
        version = operation.version or newest + 1
        if version <= newest:
            raise CannotDo(f"version {version} of the weights would follow version {newest}: versions grow")
        if not before:
            yield from self._pause(operation.mode)
        while not is_drained(self._state):
            yield None
        digest = next(filter(None, checked))
        yield WeightsChanged(version=version, digest=digest, path=operation.path)
        self._notes.write(WEIGHTS, msgspec.json.encode((self._model_digest, self._state.weights)).decode())
        yield from self._call("resident_bytes", {})  # answered once every rank computes with them
        self._is_lost, self._asleep = False, tuple(tag for tag in self._asleep if tag != "weights")
        self._own(operation.path if operation.owned else "")
        if not before:
            yield EnginePaused(mode="")
        return {"version": version, "digest": digest}

    def _pause_and_wait(self, mode: Mode) -> Course:
        if self._state.paused == "sleep":
            raise CannotDo("the engine sleeps: wake_up comes before pause")
        yield from self._pause(mode)
        while not is_drained(self._state):
            yield None
        return {"paused": mode}

    def _resume(self) -> Course:
        if self._state.paused == "sleep":
            raise CannotDo(LOST if self._is_lost else "the engine sleeps: use wake_up")
        if self._state.paused:
            yield EnginePaused(mode="")
        return {"paused": ""}

    def _sleep(self, operation: PutToSleep) -> Course:
        if operation.level not in (1, 2):
            raise CannotDo(f"level is {operation.level}: 1 keeps the weights' files, 2 forgets the weights")
        if self._state.paused != "sleep":
            yield from self._command(Release(serial=0, tags=()))  # whether they can
            yield from self._pause(operation.mode)
            while not is_drained(self._state):
                yield None
            yield EnginePaused(mode="sleep")
        self._note(self._state.paused, (yield from self._command(Release(serial=0, tags=TAGS))))
        self._asleep, self._is_lost = TAGS, self._is_lost or operation.level == 2
        return {"level": operation.level, "resident_bytes": self._resident_bytes}

    def _wake_up(self, tags: tuple[Tag, ...]) -> Course:
        rest = tuple(tag for tag in self._asleep if tag not in tags)
        if self._is_lost and not rest and self._state.paused == "sleep":
            raise CannotDo(LOST)
        if "weights" in tags and "weights" in self._asleep and not self._is_lost:
            weights = self._state.weights
            path, digest = (weights.path, weights.digest) if weights else ("", "")
            self._note("weights", (yield from self._command(Restore(serial=0, path=path, digest=digest))))
        self._asleep = rest
        if not rest and self._state.paused == "sleep":
            yield EnginePaused(mode="")
        return {"asleep": list(rest), "resident_bytes": self._resident_bytes}

    # ---- their parts -----------------------------------------------------------------------------------------------

    def _pause(self, mode: Mode) -> Course:
        live = tuple(sorted(RequestId(id_) for id_, _ in self._state.requests.items()))
        if mode == "abort" and live:
            yield RequestAborted(ids=live, reason="client")
        if self._state.paused != mode:
            yield EnginePaused(mode=mode)

    def _call(self, function: str, arguments: dict[str, Any]) -> Course:
        values = yield from self._command(CallFunction(serial=0, function=function, arguments=arguments))
        if function == "resident_bytes":
            self._note(function, values)
        return values

    def _command(self, command: AnyCommand) -> Generator[None, None, list[Any]]:
        """The ranks' values, by rank. Raises CannotDo with the first rank's error."""
        self._serial, self._answers = next(self._serials), {}
        self._send(encode_command(msgspec.structs.replace(command, serial=self._serial)))
        while len(self._answers) < self._world_size:
            yield None
        answers = [self._answers[rank] for rank in range(self._world_size)]
        self._serial = 0
        if error := next((answer.error for answer in answers if answer.error), ""):
            raise CannotDo(error)
        return [msgspec.json.decode(answer.value) for answer in answers]

    def _note(self, what: str, sizes: list[int]) -> None:
        self._resident_bytes = sum(sizes)
        log.info("%s: %d bytes are resident", what, self._resident_bytes)

    def _own(self, path: str) -> None:
        """Remove the engine's own file of the weights before."""
        before, self._owned = self._owned, path
        if before and before != path:
            with suppress(OSError):
                Path(before).unlink()
