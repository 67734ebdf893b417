"""A log that is opened for the page: its walk, its overview, and what the page is told of it first.

Owns the making of the index in the background, and how a question that folds is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from vnext.replay.index import Index
from vnext.replay.source import UnusableLog, open_log
from vnext.replay.ui.overview import Overview
from vnext.replay.ui.walk import Walk


class Opened:
    """One log. Its index is made in the background if there is none yet, then its overview."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = open_log(path)
        self.walk = Walk(Index(self.log, self._progress))
        self.overview = Overview(self.log, self.walk.index.first)
        self.indexed = (0, self.log.size_bytes)
        self.error = ""
        self._opening = Thread(target=self._open, name="index", daemon=True)
        self._opening.start()

    @property
    def opening(self) -> bool:
        return self._opening.is_alive()

    def _progress(self, done: int, total: int) -> None:
        self.indexed = (done, total)

    def _open(self) -> None:
        try:
            with self.walk.lock:
                assert self.walk.last_step >= -1, "asking for it makes the index"
        except UnusableLog as error:
            self.error = str(error)
            return
        self.overview.start()

    async def ask(self, question: Callable[[Walk], Any]) -> Any:
        """The answer of a question that folds, from a thread: one at a time."""
        return await asked(self.walk, question)

    def about(self) -> dict[str, Any]:
        return about_log(self) | {"name": self.path.name, "live": None}


async def asked(walk: Walk, question: Callable[[Walk], Any]) -> Any:
    """The answer of a question that folds, from a thread: one at a time."""

    def answer() -> Any:
        with walk.lock:
            return question(walk)

    return await asyncio.to_thread(answer)


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
