"""Silence: how long an engine core has not answered, as its client counts it.

Owns the count and the two lines in the client's log about it. A core that is stopped, swapped out or held by a debugger is
silent but has not ended: calls that wait for it go on waiting. Time is counted in looks, one per INTERVAL_S, and not by the
clock: a client that was itself stopped has looked only once in that time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

INTERVAL_S = 1.0
"""The time between two looks. A core that is silent from one look to the next gets one ping."""
SILENT_S = 5.0
"""Silence from here on is reported: no turn of a running core takes this long."""

logger = logging.getLogger(__name__)


class Silence:
    """What one client knows of its core's silence. `has_heard`: whether something has arrived since the last look, as the client
    notes. Mutable."""

    def __init__(self) -> None:
        self.has_heard = True
        self._was_asked = False
        self._looks = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def sentence(self) -> str:
        """Why nothing comes from the core; "" while something does, or may."""
        seconds = 0.0 if self.has_heard else self._looks * INTERVAL_S
        if seconds < SILENT_S:
            return ""
        return f"The engine core has not answered for {seconds:.0f} s: its process is stopped, or its machine is overloaded."

    def begin(self, ping: Callable[[], None], is_away: Callable[[], object]) -> None:
        """Look until `end`. A core that `is_away` has a successor, which has nothing to answer yet."""
        self._watch = asyncio.create_task(self._look_on(ping, is_away))

    def end(self) -> None:
        """Idempotent."""
        if self._watch is not None:
            self._watch.cancel()

    async def _look_on(self, ping: Callable[[], None], is_away: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.has_heard = self.has_heard or bool(is_away())
            if self.look():
                ping()

    def look(self) -> bool:
        """INTERVAL_S has passed. Returns whether to ping the core now."""
        if self.has_heard:
            if self._looks * INTERVAL_S >= SILENT_S:
                logger.warning("The engine core answers again.")
            self.has_heard = self._was_asked = False
            self._looks = 0
            return False
        if not self._was_asked:
            self._was_asked = True
            return True
        was_silent = bool(self.sentence)
        self._looks += 1
        if self.sentence and not was_silent:
            logger.warning("%s Requests wait until it goes on.", self.sentence)
        return False
