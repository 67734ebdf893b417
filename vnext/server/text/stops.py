"""Stop strings: where an answer's text ends, wherever the tokens' borders lie.

Owns the text that is held back because it may be a stop string's beginning. The stop string that is completed first
ends the text; of several completed by the same character the one that began first. So the result does not depend on the
pieces in which the text came.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Looks for `stops` in one text. With `include` the found string stays at the text's end."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can be given out after `text` came. Once `found` is set: the last there is."""
        held = self._held + text
        match = min((found for stop in self._stops if (found := _find(held, stop))), default=None)
        if match is not None:
            end, start = match
            self.found, self._held = held[start:end], ""
            return held[:end] if self._include else held[:start]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def finish(self) -> str:
        """What was held back in vain: the text has ended by itself."""
        held, self._held = self._held, ""
        return held


def _find(text: str, stop: str) -> tuple[int, int] | None:
    """(end, start) of the first occurrence."""
    start = text.find(stop)
    return None if start < 0 else (start + len(stop), start)


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that begins the stop string without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
