"""A log that is opened for the page: its walk, its overview, and what the page is told of it first.

Owns the making of the last segment's index in the background, which says how long the log is, and of the overview.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from vnext.replay.index import Index
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.ui.overview import Overview
from vnext.replay.ui.questions import Questions
from vnext.replay.ui.walk import Walk


class Opened:
    """One log. Its index is made in the background if there is none yet, then its overview."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = open_log(path)
        self._questions = Questions()
        self.walk = Walk(Index(self.log, self._questions.progress, waits=False))
        self.overview = Overview(self.log, self.walk.index.first)
        self.error = ""
        self._opening = Thread(target=self._open, name="index", daemon=True)
        self._opening.start()

    @property
    def opening(self) -> bool:
        return self._opening.is_alive()

    @property
    def indexed(self) -> tuple[int, int]:
        """Bytes of a segment that are indexed by now, and all of them."""
        return self._questions.indexed

    def _open(self) -> None:
        try:
            self.walk.index.segments[-1].made()
        except UnusableLog as error:
            self.error = str(error)
            return
        self.overview.start()

    async def ask(self, question: Callable[[Walk], Any]) -> Any:
        """As Questions.ask."""
        return await self._questions.ask(self.walk, question)

    def about(self) -> dict[str, Any]:
        return about_log(self) | {"name": self.path.name, "live": None}


def about_log(found: Any) -> dict[str, Any]:
    """What the page is told of a log first: of an Opened or a LiveLog, under its walk's lock."""
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
