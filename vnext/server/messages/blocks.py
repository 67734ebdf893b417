"""Blocks: an answer's parts as content blocks, and the events of a stream that brings them.

Owns the order of events: message_start, then for each block content_block_start, its deltas and content_block_stop, then
message_delta and message_stop. Whole answers are the blocks that the same events describe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

Event = dict[str, Any]
_TOOL_USE = "toolu_"


class MessageBuilder:
    """One answer. `head` are the id and the model's name."""

    def __init__(self, head: Mapping[str, str]) -> None:
        self._head = dict(head)
        self.content: list[dict[str, Any]] = []
        self._is_open = False
        self._pieces: list[str] = []

    def begin(self, usage: dict[str, Any]) -> list[Event]:
        """The events before the first part."""
        message = self._message([], None, None, usage)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def part(self, part: Part) -> list[Event]:
        match part:
            case Words():
                return self._of("text", {"text": ""}) + [self._delta("text_delta", "text", part.text)]
            case Reasoning():
                block = {"thinking": "", "signature": ""}
                return self._of("thinking", block) + [self._delta("thinking_delta", "thinking", part.text)]
            case CallBegun():
                return self._open("tool_use", {"id": _TOOL_USE + part.id, "name": part.name, "input": {}})
            case CallArguments():
                return [self._delta("input_json_delta", "partial_json", part.text)]
            case CallEnded():
                return self._close()

    def end(self, reason: str, sequence: str | None, usage: dict[str, Any]) -> list[Event]:
        """The events after the last part."""
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*self._close(), {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def message(self, reason: str, sequence: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, after `end`."""
        return self._message(self.content, reason, sequence, usage)

    def _message(self, content: Any, reason: str | None, sequence: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        shown = {"type": "message", "role": "assistant", "content": content, "stop_reason": reason}
        return self._head | shown | {"stop_sequence": sequence, "usage": usage}

    def _of(self, kind: str, block: dict[str, Any]) -> list[Event]:
        """Open a block of this kind, unless it is open."""
        return [] if self._is_open and self.content[-1]["type"] == kind else self._open(kind, block)

    def _open(self, kind: str, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self.content.append({"type": kind, **block})
        self._is_open, self._pieces = True, []
        return [*events, self._event("content_block_start", content_block={"type": kind, **block})]

    def _delta(self, kind: str, name: str, text: str) -> Event:
        self._pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, name: text})

    def _close(self) -> list[Event]:
        """Close the open block. A thought is signed, because clients send only signed ones back; nothing checks it."""
        if not self._is_open:
            return []
        self._is_open = False
        block, text, events = self.content[-1], "".join(self._pieces), []
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block["thinking"], block["signature"] = text, hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._event("content_block_delta", delta=delta))
        return [*events, self._event("content_block_stop")]

    def _event(self, kind: str, **members: Any) -> Event:
        return {"type": kind, "index": len(self.content) - 1, **members}


def own_id(tool_use_id: str) -> str:
    """The id of a call as the chat template knows it: some templates take ids of one form only."""
    return tool_use_id.removeprefix(_TOOL_USE)


def _object(text: str) -> dict[str, Any]:
    """A call's arguments; empty where the answer was cut off within them."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}
