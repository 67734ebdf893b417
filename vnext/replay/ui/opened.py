"""A log opened for the page: its walk, its overview, and the first facts that the page gets.

Owns building the last segment's index in the background, which gives the log's length, and then the overview.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from vnext.base.spelling import reason
from vnext.replay.console.ended import COMPLETE, ended
from vnext.replay.reading.folding import IMPOSSIBLE
from vnext.replay.reading.index import Index, Segment, Unindexed
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.ui.overview import Overview
from vnext.replay.ui.walk import Walk


class Opened:
    """One log. If it has no index, one is built in the background, and then the overview."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = open_log(path)
        self._questions = Questions()
        index = Index(self.log, self._questions.progress, waits=False)
        self.walk, self.overview = Walk(index), Overview(self.log, index.first)
        self.error = ""
        self.ended = COMPLETE
        self._opening = Thread(target=self._open, name="index", daemon=True)
        self._opening.start()

    @property
    def opening(self) -> bool:
        return self._opening.is_alive()

    @property
    def indexed(self) -> tuple[int, int]:
        """The indexed bytes of a segment so far, and all of its bytes."""
        return self._questions.indexed

    def _open(self) -> None:
        try:
            self.walk.indexed().segments[-1].made()
            self.ended = ended(self.log)
        except UnusableLog as error:
            self.error = str(error)
            return
        self.overview.start()

    async def ask(self, question: Callable[[Walk], Any]) -> Any:
        """As Questions.ask."""
        return await self._questions.ask(self.walk, question)

    def about(self) -> dict[str, Any]:
        return about_log(self) | {"name": self.path.name, "live": None, "ended": self.ended.line}


def about_log(found: Any) -> dict[str, Any]:
    """The first facts that the page gets about an Opened or a LiveLog, under its walk's lock."""
    started, walk, overview = found.log.header.started, found.walk, found.overview
    return {
        "model": started.model,
        "version": found.log.header.code_version,
        "config": msgspec.to_builtins(started.config),
        "first_step": walk.first_step,
        "last_step": walk.last_step,
        "last_event": walk.events - 1,
        "last_request": walk.requests - 1,
        "overview": {
            "steps": overview.count,
            "done": overview.done,
            "broken": overview.broken,
            "peaks": overview.peaks(),
        },
    }


# ---- questions ---------------------------------------------------------------------------------------------------
# Questions that fold: each is answered in a thread, one at a time, and none waits long for an index.
#
# Owns building the indexes that questions lack, in the background. The first question about a segment starts its index.
# Until it is done, such questions get its progress (Indexing); questions that need no new index are answered meanwhile.

PATIENCE_S = 0.5


class Indexing(Exception):
    """The answer needs an index that is being built: `done` of `total` bytes."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done} of {total} bytes are indexed")
        self.done, self.total = done, total


class Questions:
    """The questions about one log. Mutable: `indexed` is the progress of the index being built, in bytes done and all
    bytes."""

    def __init__(self) -> None:
        self.indexed = (0, 1)
        self._making: dict[Segment, Future[None]] = {}

    def progress(self, done: int, total: int) -> None:
        self.indexed = (done, total)

    async def ask(self, walk: Walk, question: Callable[[Walk], Any]) -> Any:
        """The answer. Raises Indexing if that takes longer than PATIENCE_S because an index is missing."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await asyncio.to_thread(_answer, walk, question)
            except Unindexed as lacking:
                await self._made(lacking.segment, until_s - time.monotonic())

    async def _made(self, segment: Segment, wait_s: float) -> None:
        making = self._making.get(segment) or self._make(segment)
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(making)), max(0.0, wait_s))
        except TimeoutError:
            raise Indexing(*self.indexed) from None
        finally:
            if making.done():
                self._making.pop(segment, None)

    def _make(self, segment: Segment) -> Future[None]:
        """Build the index in a daemon thread, so that process exit does not wait for it."""
        making: Future[None] = Future()
        self._making[segment] = making

        def make() -> None:
            try:
                segment.made()
            except OSError as error:
                making.set_exception(UnusableLog(f"{segment.path} cannot be read any more ({reason(error)}): open its log anew"))
            except (UnusableLog, *IMPOSSIBLE) as error:
                making.set_exception(error)
            else:
                making.set_result(None)

        Thread(target=make, name="index", daemon=True).start()
        return making


def _answer(walk: Walk, question: Callable[[Walk], Any]) -> Any:
    with walk.lock:
        return question(walk)
