"""Lines: the user's input. Owns line editing, the history file, and messages of several lines.

readline edits the lines, if Python has it and input and output are a terminal; otherwise they are read as they come. Only the
user can read the history file (mode 0600); if it cannot be written, the history is lost, but the chat goes on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

try:
    import readline
except ImportError:  # a Python without it, as on Windows
    readline = None  # type: ignore[assignment]

HISTORY_LINES_MAX = 1000
FENCE = '"""'


class Lines:
    """`prompt` begins a message, `more` each further line of it. `history` is a path, "" for none; `words` are completed by Tab."""

    def __init__(self, prompt: str, more: str, history: str = "", words: Sequence[str] = ()) -> None:
        self._prompt, self._more = prompt, more
        self._history = history if readline is not None else ""
        if readline is not None:
            _complete(words)
        if self._history and not self._open_history():
            self._history = ""

    def ask(self) -> str:
        """Read one message: a line, lines joined by a backslash at the end, or the lines between two lines of three quotes.
        Raises EOFError at the end of input, and KeyboardInterrupt."""
        first = self._line(self._prompt)
        if first.strip().startswith(FENCE):
            return self._fenced(first.strip()[len(FENCE) :])
        lines = [first]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(self._more))
        return "\n".join(lines).strip()

    def _fenced(self, first: str) -> str:
        if first.endswith(FENCE):
            return first[: -len(FENCE)].strip()
        lines = [first]
        while not (line := self._line(self._more)).rstrip().endswith(FENCE):
            lines.append(line)
        return "\n".join([*lines, line.rstrip()[: -len(FENCE)]]).strip()

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        if self._history and line.strip():
            _append(self._history)
        return line

    def _open_history(self) -> bool:
        """Read the history file, creating it for its owner alone; returns whether that worked."""
        path = Path(self._history)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600))
            path.chmod(0o600)
            readline.clear_history()
            readline.read_history_file(path)
        except OSError:
            return False
        readline.set_history_length(HISTORY_LINES_MAX)
        return True


def _append(path: str) -> None:
    """Append the last line to the history file, which other chats write to as well."""
    try:
        if hasattr(readline, "append_history_file"):
            readline.append_history_file(1, path)
        else:  # libedit
            readline.write_history_file(path)
    except OSError:
        pass


def _complete(words: Sequence[str]) -> None:
    """Tab completes the first word of a line to one of `words`."""

    def word(text: str, state: int) -> str | None:
        found = [each for each in words if each.startswith(text)] if readline.get_begidx() == 0 else []
        return found[state] if state < len(found) else None

    readline.set_completer(word)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
