"""The tool calls of one answer in the API's shape: named, numbered, whole or as parts of a stream."""

from __future__ import annotations

import uuid
from typing import Any

from vnext.text.tool_calls import Call, CallScanner, Form

ID_CHARACTERS = 9  # Mistral's templates require nine; others accept any number


class ToolCalls:
    """`form`: how the model writes calls. `one`: passes on only the first call."""

    def __init__(self, form: Form, one: bool) -> None:
        self._scanner = CallScanner(form)
        self._one = one
        self._waiting: list[dict[str, Any]] = []
        self.count = 0

    def push(self, text: str, ended: bool) -> str:
        """The words in the text that is certain by now. Keeps the calls for `take`."""
        pieces = self._scanner.push(text) + (self._scanner.finish() if ended else [])
        for call in pieces:
            if isinstance(call, Call) and not (self._one and self.count):
                self._waiting.append(_shape(call))
                self.count += 1
        return "".join(piece for piece in pieces if isinstance(piece, str))

    def take(self) -> list[dict[str, Any]]:
        """The calls since the last `take`."""
        taken, self._waiting = self._waiting, []
        return taken

    def take_numbered(self) -> list[dict[str, Any]]:
        """The same with numbers, by which a stream's client joins the parts of a call."""
        first = self.count - len(self._waiting)
        return [{"index": first + place, **call} for place, call in enumerate(self.take())]


def _shape(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": uuid.uuid4().hex[:ID_CHARACTERS], "type": "function", "function": function}
