"""Store: complete responses by id, with the items of the conversation that each belongs to, in this process's memory.

Owns the bound. The responses asked for least recently are dropped first; what a response holds of earlier ones counts again, so
the bound holds whatever is dropped in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vnext.server.responses.bodies import Item

COUNT_MAX = 10_000


class Stored(msgspec.Struct, frozen=True):
    """A response as its client saw it, its own input, and the whole conversation, its output included."""

    response: dict[str, Any]
    input: tuple[Item, ...]
    conversation: tuple[Item, ...]
    size: int


class ResponseStore:
    """Mutable; only the event loop uses it."""

    def __init__(self, bytes_max: int) -> None:
        """0 keeps nothing."""
        self._bytes_max = bytes_max
        self._kept: dict[str, Stored] = {}
        self._of_item: dict[str, str] = {}  # a response's id by that of an item of its output
        self.size_bytes = 0

    def get(self, id_: str) -> Stored | None:
        """The response; it becomes the one that is dropped last."""
        if (found := self._kept.pop(id_, None)) is not None:
            self._kept[id_] = found
        return found

    def item(self, id_: str) -> Item | None:
        """An item of a stored response's output by its id, or of its input by the id RESPONSE_PLACE that its list shows."""
        response_id, _, place = id_.rpartition("_")
        if (owner := self._of_item.get(id_)) is not None and (found := self.get(owner)) is not None:
            return next((each for each in found.conversation if each.id == id_), None)
        found = self.get(response_id)
        return found.input[int(place)] if found and place.isdecimal() and int(place[:9]) < len(found.input) else None

    def put(self, response: dict[str, Any], given: Sequence[Item], earlier: Sequence[Item]) -> None:
        """Keep a complete response to the input `given`, which followed the conversation `earlier`."""
        output = msgspec.convert(response["output"], list[Item])
        conversation = (*earlier, *given, *output)
        size = len(msgspec.json.encode(response)) + len(msgspec.json.encode(conversation))
        if size > self._bytes_max:
            return
        self._kept[response["id"]] = Stored(response, tuple(given), conversation, size)
        self._of_item |= {item.id: response["id"] for item in output if item.id}
        self.size_bytes += size
        while self.size_bytes > self._bytes_max or len(self._kept) > COUNT_MAX:
            self.delete(next(iter(self._kept)))

    def delete(self, id_: str) -> bool:
        """Whether the response was there."""
        found = self._kept.pop(id_, None)
        if found is None:
            return False
        self.size_bytes -= found.size
        for item in found.response["output"]:
            self._of_item.pop(item["id"], None)
        return True
