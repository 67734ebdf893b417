"""Generic: tools of a chat whose template knows none, described and called in the words of its messages.

Owns the texts. The tools stand in the first message, calls of earlier turns in the assistant's words, and their results in a
user's message, all as HERMES reads and writes calls. A model that learnt no other way follows them as far as it can; forced calls
are kept by the grammar as in any dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vnext.text.dialects import objects

DIALECT = objects.HERMES
_SHOWN = """You may call functions. They are, one in a line:
{tools}
To call one, answer with its name and an object of arguments, like this:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""

Message = dict[str, Any]


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, knows_system: bool) -> list[Message]:
    """The messages with the tools and all calls as words; `knows_system`: the template has a system's message."""
    found = [_in_words(message) for message in messages]
    if not tools:
        return found
    shown = _SHOWN.format(tools="\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools))
    first = found[0] if found else {}
    if first.get("role") == ("system" if knows_system else "user"):
        words = (first["content"], shown) if knows_system else (shown, first["content"])
        return [first | {"content": "\n\n".join(words)}, *found[1:]]
    return [{"role": "system" if knows_system else "user", "content": shown}, *found]


def _in_words(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in message["tool_calls"]]
    words = [message["content"]] if message.get("content") else []
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": "\n".join(words + calls)}


def _call(function: Mapping[str, Any]) -> str:
    """As the model wrote it: with the arguments' own text, where it is known."""
    given = function["arguments"]
    text = given if isinstance(given, str) else getattr(given, "text", "") or json.dumps(given, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'
