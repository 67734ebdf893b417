"""The table of dialects, and which one a model writes: found from its chat template and tokens, or named as vLLM names it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vnext.text.dialects import harmony, literal_calls, named, objects, tagged
from vnext.text.dialects.dialect import Dialect

_TOOLS = re.compile(r"\btools\b")
# A dialect, and texts of which each must stand in the template (or be a token, where it is a mark); the first match counts.
DETECTED: tuple[tuple[Dialect, tuple[str, ...]], ...] = (
    (harmony.HARMONY, ("<|channel|>analysis<|message|>", "<|call|>")),
    (literal_calls.FUNCTIONGEMMA, ("<start_function_call>",)),
    (literal_calls.GEMMA4, ("<|tool_call>", "<tool_call|>")),
    (literal_calls.LFM2, ("<|tool_call_start|>",)),
    (literal_calls.PYTHONIC, ("func_name1(",)),
    (tagged.QWEN3_CODER, ("<function=",)),
    (tagged.GLM45, ("<arg_key>",)),
    (named.KIMI_K2, ("<|tool_calls_section_begin|>",)),
    (named.DEEPSEEK_V3, ("<｜tool▁call▁begin｜>", "```json")),
    (named.DEEPSEEK_V31, ("<｜tool▁call▁begin｜>",)),
    (named.MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (named.MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (objects.PHI4, ("<|tool|>",)),
    (objects.PHI4, ("functools",)),
    (objects.GRANITE, ("<|tool_call|>",)),
    (objects.HERMES, ("<tool_call>",)),
    (objects.LLAMA3, ("ipython",)),
    (objects.GEMMA, ("<start_of_turn>",)),
    (objects.JSON, ()),
)
# vLLM's names of --tool-call-parser for ours.
NAMES: dict[str, Dialect] = {dialect.name: dialect for dialect, _ in DETECTED} | {
    "deepseek_r1": named.DEEPSEEK_V3,
    "granite-20b-fc": objects.GRANITE,
    "llama4_json": objects.LLAMA3,
    "glm47": tagged.GLM45,
    "llama4_pythonic": literal_calls.PYTHONIC,
    "gpt-oss": harmony.HARMONY,
    "llama3": objects.LLAMA3,
    "qwen25": objects.HERMES,
    "qwen3": objects.HERMES,
    "qwen3_xml": tagged.QWEN3_CODER,
    "qwen": objects.HERMES,
}


def dialect_of(template: str, tokens: Collection[str] = (), tool_parser: str = "") -> Dialect | None:
    """The dialect of a chat template's source and a tokenizer's added tokens; None where the template knows no tools.

    `tool_parser` overrides what is found. Raises ValueError for an unknown name, with those known.
    """
    if tool_parser and tool_parser not in NAMES:
        known = ", ".join(sorted(NAMES))
        raise ValueError(f"--tool-call-parser is {tool_parser!r}: it must be one of {known}, or be left out.")
    return NAMES[tool_parser] if tool_parser else _detected(template, tokens)


def shows_tools(template: str) -> bool:
    return _TOOLS.search(template) is not None


def _detected(template: str, tokens: Collection[str]) -> Dialect | None:
    if not shows_tools(template):
        return None
    return next((dialect for dialect, marks in DETECTED if all(mark in template or mark in tokens for mark in marks)), None)


# ---- any model's calls -------------------------------------------------------------------------------------------
# Tools of a chat whose template knows none, described and called in the words of its messages. The tools stand in the first
# message, calls of earlier turns in the assistant's words, and their results in a user's message, all as HERMES reads and writes
# calls. A model that learnt no other way follows them as far as it can; forced calls are kept by the grammar as in any dialect.

GENERIC = objects.HERMES
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
