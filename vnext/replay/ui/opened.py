"""A log opened for the page: its walk, its overview, and the first facts that the page gets.

Owns building the last segment's index in the background, which gives the log's length, and then the overview.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from vnext.replay.console.ended import COMPLETE, ended
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.ui.overview import Overview
from vnext.replay.ui.questions import Questions
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
