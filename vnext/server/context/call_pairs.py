"""Call pairs: each tool's result in a conversation answers a call before it, and each call has its result.

What breaks this is a fault of the program that keeps the conversation, and a model would answer it with nonsense. A call that was
cut off needs no result: it could not be made.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.openai_types import ChatMessage


class CallPairs:
    """The calls of a conversation from its beginning on. Mutable. `path` is where the client wrote an id."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._open: dict[str, str] = {}

    def call(self, id_: str, path: str, is_cut: bool = False) -> None:
        """Take in a call; `is_cut`: its answer ended within it."""
        self._known.add(id_)
        if not is_cut:
            self._open[id_] = path

    def result(self, id_: str | None, path: str) -> None:
        """Take in a result. Raises InvalidRequest for one without an id, or of no call before it."""
        if not id_:
            raise InvalidRequest(f"{path} is missing: a result names the call that it answers.", path)
        if id_ not in self._known:
            raise InvalidRequest(f"{path} is {id_[:60]!r}: no call before it has this id.", path)
        self._open.pop(id_, None)

    def end(self) -> None:
        """Raise InvalidRequest for a call without a result."""
        for id_, path in self._open.items():
            raise InvalidRequest(f"{path}: the call {id_[:60]!r} has no result behind it, send one for each call.", path)


def check_calls(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest for a chat whose calls and results are no pairs. A call without an id is not looked for."""
    pairs = CallPairs()
    for place, message in enumerate(messages):
        for at, call in enumerate(message.tool_calls or ()):
            if call.id is not None:
                pairs.call(call.id, f"messages[{place}].tool_calls[{at}].id", not is_object(call.function.arguments))
        if message.role == "tool":
            pairs.result(message.tool_call_id, f"messages[{place}].tool_call_id")
    pairs.end()


def is_object(text: str) -> bool:
    """Whether the text is a JSON object, or empty for none."""
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
