"""Stop strings: find the end of an answer's text, independent of token boundaries.

Owns the text that is held back because it may begin a stop string. The stop string that is completed first ends the text; of
several that the same character completes, the one that began first. So the result does not depend on the pieces in which the
text came.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Searches one text for `stops`. With `include`, the text keeps the found string at its end."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[:1] for stop in stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Take in `text`; returns the text to emit. Once `found` is set, it was the last."""
        if not self._stops:
            return text
        held = self._held + text
        if self._firsts.isdisjoint(held):
            self._held = ""
            return held
        match = min((found for stop in self._stops if (found := _find(held, stop))), default=None)
        if match is not None:
            end, start = match
            self.found, self._held = held[start:end], ""
            return held[:end] if self._include else held[:start]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def finish(self) -> str:
        """The text that is still held back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _find(text: str, stop: str) -> tuple[int, int] | None:
    """(end, start) of the first occurrence."""
    start = text.find(stop)
    return None if start < 0 else (start + len(stop), start)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
