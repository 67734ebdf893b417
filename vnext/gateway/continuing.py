"""Continuing: what a client still lacks of a stream that another server begins again from its beginning. Pure.

Both servers compute the same bits, so the second stream consists of the same texts, cut into other events, under other ids.
`Shown` follows what the client has: texts by their characters, lists by their lengths, and marks that a stream sends once. From
each event of the second stream it leaves what is new, under the ids of the first. A text that differs ends this: Diverged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Path = tuple[Any, ...]
HEAD = ("id", "created", "model", "system_fingerprint")
TEXTS = frozenset({"text", "content", "reasoning", "reasoning_content", "arguments", "refusal"})
ONCE = frozenset({"role", "id", "type", "name", "finish_reason", "stop_reason"})
"""Members of a choice that a stream sends once, where they are not null."""
DELTA_TEXTS = ("text", "thinking", "signature", "partial_json")
"""The text of each kind of delta in a stream of Anthropic's."""
_ENDS = b"[DONE]"
_DATA = b"data:"
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Diverged(Exception):
    """The second server's text is not the one that the client has the beginning of."""


class Shown:
    """What a client has been shown of one stream. Mutable. The subclasses know the events of one API."""

    def __init__(self) -> None:
        self._marks: set[Path] = set()
        self._texts: dict[Path, list[str]] = {}
        self._known: dict[Path, str] = {}  # the texts joined, when the present stream began
        self._lengths: dict[Path, int] = {}  # of lists
        self._places: dict[Path, int] = {}  # in the texts and lists of the present stream

    def begin_again(self) -> None:
        """The events that follow are those of another server, from the beginning."""
        self._known = {path: "".join(pieces) for path, pieces in self._texts.items()}
        self._texts = {path: [text] for path, text in self._known.items()}
        self._places = {}

    def take(self, event: bytes) -> bytes:
        """Take in an event of the present stream, with its empty line; returns what the client lacks of it, b"" for nothing.
        Raises Diverged, and DecodeError for an event that is no JSON."""
        name, data = split(event)
        if data in (b"", _ENDS):
            return event
        rest = self._rest(_decode(data))
        return b"" if rest is None else name + b"data: " + _encode(rest) + b"\n\n"

    def error(self, message: str, code: str) -> bytes:
        """The event that ends a stream which cannot go on."""
        return b"data: " + _encode({"error": {"message": message, "type": "server_error", "param": None, "code": code}}) + b"\n\n"

    def _rest(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The event without what the client has, None if it has all of it."""
        raise AssertionError("a subclass knows the events")

    def _once(self, *path: Any) -> bool:
        """Whether the client lacks a mark; it has it from now on."""
        if path in self._marks:
            return False
        self._marks.add(path)
        return True

    def _text(self, path: Path, text: str) -> str:
        """The part of the next piece of a text that the client lacks. Raises Diverged."""
        begin = self._places.get(path, 0)
        has = self._known.get(path, "")[begin : begin + len(text)]
        if not text.startswith(has):
            raise Diverged(f"the text differs {begin} characters behind its beginning")
        self._places[path] = begin + len(text)
        rest = text[len(has) :]
        if rest:
            self._texts.setdefault(path, []).append(rest)
        return rest

    def _items(self, path: Path, items: list[Any]) -> list[Any]:
        """The same of a list; its entries are not compared."""
        begin, has = self._places.get(path, 0), self._lengths.get(path, 0)
        self._places[path] = begin + len(items)
        self._lengths[path] = max(has, begin + len(items))
        return items[max(0, has - begin) :]


class ShownChunks(Shown):
    """Chunks of /v1/completions and /v1/chat/completions."""

    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, Any] = {}

    def _rest(self, event: dict[str, Any]) -> dict[str, Any] | None:
        self._head = self._head or {name: event[name] for name in HEAD if name in event}
        event |= self._head
        if not event.get("choices"):
            return event if self._once("without choices") else None
        found = [self._members(choice, (choice["index"],)) for choice in event["choices"]]
        event["choices"] = [choice for choice, is_new in found if is_new]
        if "prompt_token_ids" in event:
            event["prompt_token_ids"] = self._items(("prompt",), event["prompt_token_ids"])
        return event if event["choices"] else None

    def _members(self, members: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], bool]:
        """What the client lacks of a choice or an object in it, and whether that is anything."""
        kept: dict[str, Any] = {}
        is_new = False
        for name, member in members.items():
            at = (*path, name)
            if isinstance(member, dict):
                kept[name], has_new = self._members(member, at)
            elif name == "tool_calls" and isinstance(member, list):
                found = [self._members(call, (*at, call["index"])) for call in member]
                kept[name] = [call for call, is_new_call in found if is_new_call]
                has_new = bool(kept[name])
                if not has_new:
                    del kept[name]
            elif isinstance(member, list):
                kept[name] = self._items(at, member)
                has_new = bool(kept[name])
            elif isinstance(member, str) and name in TEXTS:
                kept[name] = self._text(at, member)
                has_new = bool(kept[name])
            elif name in ONCE and member is not None:
                has_new = self._once(*at)
                kept |= {name: member} if has_new else {}
            else:
                kept[name], has_new = member, False
            is_new = is_new or has_new
        return kept, is_new


class ShownMessage(Shown):
    """Events of Anthropic's /v1/messages."""

    def error(self, message: str, code: str) -> bytes:
        body = {"type": "error", "error": {"type": "overloaded_error", "message": message, "code": code}}
        return b"event: error\ndata: " + _encode(body) + b"\n\n"

    def _rest(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if event["type"] != "content_block_delta":
            return event if self._once(event["type"], event.get("index")) else None
        delta = event["delta"]
        name = next(name for name in DELTA_TEXTS if name in delta)
        rest = self._text((event["index"], name), delta[name])
        return event | {"delta": delta | {name: rest}} if rest else None


class ShownResponse(Shown):
    """Events of /v1/responses. `names`: the present server's ids -> those that the client knows."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: dict[Path, str] = {}
        self._created_at: Any = None
        self._number: int | None = None
        self.names: dict[str, str] = {}

    def begin_again(self) -> None:
        super().begin_again()
        self.names = {}

    def error(self, message: str, code: str) -> bytes:
        body = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": self._number or 0}
        return b"event: error\ndata: " + _encode(body) + b"\n\n"

    def _rest(self, event: dict[str, Any]) -> dict[str, Any] | None:
        self._learn(event)
        place = event["type"], event.get("output_index"), event.get("content_index")
        if event["type"].endswith(".delta"):
            event["delta"] = self._text(place, event["delta"])
            if "logprobs" in event:
                event["logprobs"] = self._items((*place, "logprobs"), event["logprobs"])
            is_new = bool(event["delta"])
        else:
            is_new = self._once(*place)
        if not is_new:
            return None
        if self._number is None:  # a client that picked the stream up has the numbers before this one
            self._number = event.get("sequence_number", 0)
        event["sequence_number"], self._number = self._number, self._number + 1
        return _renamed(event, self.names) if self.names else event

    def _learn(self, event: dict[str, Any]) -> None:
        """Take in the ids of an event, and the time at which the response began."""
        if "response" in event:
            self._id(("response",), event["response"]["id"])
            self._created_at = self._created_at or event["response"].get("created_at")
            event["response"]["created_at"] = self._created_at
        item = event.get("item") or {}
        for name, value in (("id", item.get("id") or event.get("item_id")), ("call_id", item.get("call_id"))):
            if value:
                self._id((event["output_index"], name), value)

    def _id(self, path: Path, value: str) -> None:
        first = self._ids.setdefault(path, value)
        if first != value:
            self.names[value] = first


def split(event: bytes) -> tuple[bytes, bytes]:
    """What stands before an event's data, and the data, b"" where it has none, as a comment."""
    if event.startswith(_DATA):
        return b"", event[len(_DATA) :].strip()
    name, found, data = event.partition(b"\n" + _DATA)
    return (name + b"\n", data.strip()) if found else (event, b"")


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The value with every text that is one of `names` replaced."""
    if isinstance(value, dict):
        return {name: _renamed(member, names) for name, member in value.items()}
    if isinstance(value, list):
        return [_renamed(member, names) for member in value]
    return names.get(value, value) if isinstance(value, str) else value


SHOWN: Mapping[str, type[Shown]] = {
    "/v1/completions": ShownChunks,
    "/v1/chat/completions": ShownChunks,
    "/v1/messages": ShownMessage,
    "/v1/responses": ShownResponse,
}
"""The paths whose streams can go on elsewhere."""
