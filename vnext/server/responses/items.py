"""Items: an answer's parts as output items, and the events of a stream that brings them.

Owns the order of events. An item is added, then its content part is, deltas follow, and both are done, in OpenAI's order; one
item is open at a time. Whole answers are the items that the same events describe. A custom tool's input comes in one delta,
because its text stands in the arguments as a JSON string.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vnext.server.responses.translation import ARGUMENT, Named, opaque
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

Event = dict[str, Any]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ItemBuilder:
    """One answer. `items` are those so far; the last may be open. The next text of a message has the entries `logprobs`."""

    def __init__(self, tools: Mapping[str, Named], encodes: bool, name: str) -> None:
        """`tools`: the client's, by the names that the model knows. `encodes`: reasoning gets an encrypted_content. The items' ids
        follow from `name`."""
        self._name = name
        self._tools, self._encodes = tools, encodes
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._of_message: list[dict[str, Any]] = []  # the entries of the open one

    def part(self, part: Part) -> list[Event]:
        match part:
            case Words():
                return self._text("message", part.text)
            case Reasoning():
                return self._text("reasoning", part.text)
            case CallBegun():
                return self._begin_call(part)
            case CallArguments():
                self._pieces.append(part.text)
                is_custom = self.items[-1]["type"] == "custom_tool_call"
                return [] if is_custom else [self._event("response.function_call_arguments.delta", delta=part.text)]
            case CallEnded():
                return self.close("completed")

    def close(self, status: str) -> list[Event]:
        """The events that end the open item; `status` is "completed" or "incomplete"."""
        if not self._is_open:
            return []
        item, text = self.items[-1], "".join(self._pieces)
        item["status"], self._is_open, self._pieces = status, False, []
        if item["type"] in _PARTS:
            events = self._close_text(item, text)
        elif item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            item["input"] = given = _input_of(text)
            events = [
                self._event("response.custom_tool_call_input.delta", delta=given),
                self._event("response.custom_tool_call_input.done", input=given),
            ]
        return [*events, self._of_item("response.output_item.done")]

    def complete(self, status: str) -> list[Event]:
        """The events after the last part. An answer without parts is an empty message."""
        return (self._begin("message") if not self.items else []) + self._break_off(status)

    def _break_off(self, status: str) -> list[Event]:
        """As `close`; a call that is still open has broken off."""
        return self.close(status if self._is_open and self.items[-1]["type"] in _PARTS else "incomplete")

    def _text(self, kind: str, text: str) -> list[Event]:
        events = [] if self._is_open and self.items[-1]["type"] == kind else self._break_off("completed") + self._begin(kind)
        self._pieces.append(text)
        logprobs: list[dict[str, Any]] = []
        if kind == "message":
            logprobs, self.logprobs = self.logprobs, []
        self._of_message += logprobs
        return [*events, self._of_text("delta", logprobs, delta=text)]

    def _begin(self, kind: str) -> list[Event]:
        """An item with one content part."""
        members = {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
        return [
            self._add(kind, members),
            self._event("response.content_part.added", content_index=0, part=_content(kind, "")),
        ]

    def _begin_call(self, part: CallBegun) -> list[Event]:
        events, tool = self._break_off("completed"), self._tools.get(part.name) or Named(part.name, None, False)
        kind, given = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
        within = {"namespace": tool.namespace} if tool.namespace else {}
        return [*events, self._add(kind, {"call_id": part.id, "name": tool.name, given: ""} | within)]

    def _add(self, kind: str, members: dict[str, Any]) -> Event:
        digest = hashlib.blake2b(f"{self._name} {len(self.items)}".encode(), digest_size=16)
        head = {"id": f"{_PREFIXES[kind]}_{digest.hexdigest()}", "type": kind, "status": "in_progress"}
        self.items.append(head | members)
        self._is_open, self._pieces, self._of_message = True, [], []
        return self._of_item("response.output_item.added")

    def _close_text(self, item: dict[str, Any], text: str) -> list[Event]:
        content = _content(item["type"], text, self._of_message)
        done = [
            self._of_text("done", self._of_message, text=text),
            self._event("response.content_part.done", content_index=0, part=content),
        ]
        item["content"] = [content]
        if item["type"] == "reasoning" and self._encodes:
            item["encrypted_content"] = opaque(text)
        return done

    def _of_text(self, name: str, logprobs: list[dict[str, Any]], **members: Any) -> Event:
        kind = self.items[-1]["type"]
        extra = {"logprobs": logprobs} if kind == "message" else {}
        return self._event(f"response.{_PARTS[kind]}.{name}", content_index=0, **members, **extra)

    def _of_item(self, name: str) -> Event:
        return {"type": name, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _event(self, kind: str, /, **members: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **members}


def _content(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    extra = {"annotations": [], "logprobs": [*logprobs]} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **extra}


def _input_of(arguments: str) -> str:
    """A custom tool's input; the arguments as they are where the answer was cut off within them."""
    try:
        return str(msgspec.json.decode(arguments, type=dict[str, Any])[ARGUMENT])
    except (ValueError, RecursionError, KeyError):
        return arguments
