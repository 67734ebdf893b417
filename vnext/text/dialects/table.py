"""The table of dialects, and which one a model writes: found from its chat template and tokens, or named as vLLM names it."""

from __future__ import annotations

import re
from collections.abc import Collection

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
    """Whether a chat template knows tools."""
    return _TOOLS.search(template) is not None


def _detected(template: str, tokens: Collection[str]) -> Dialect | None:
    if not shows_tools(template):
        return None
    return next((dialect for dialect, marks in DETECTED if all(mark in template or mark in tokens for mark in marks)), None)
