"""Calls as JSON objects {"name": ..., "arguments": {...}}: Hermes, Llama 3, Mistral's older form, Granite, Phi 4 mini, Gemma 3.

hermes      <tool_call>{...}</tool_call>                       Qwen 2.5 and 3, Hermes, SmolLM 3
llama3      {"name": ..., "parameters": {...}}; ...            Llama 3.x; the token <|python_tag|> may stand before it
granite     <|tool_call|>[{...}, ...]                          Granite 3; Granite 4 writes Hermes' form
phi4        <|tool_call|>[{...}]<|/tool_call|>, functools[...] Phi 4 mini
gemma       ```json / ```tool_call {...} ```                   Gemma 3, as its users prompt it
json        {...} or [{...}, ...]                              any template that knows tools and is none of these
"""

from __future__ import annotations

import json
from typing import Any

from vnext.text.dialects import json_text
from vnext.text.dialects.dialect import Dialect, Tools, names_of
from vnext.text.dialects.grammar import Frame, Functions, Spell, framed
from vnext.text.dialects.reader import Reader, Reading


def json_head(name: str, arguments: str = "arguments") -> str:
    """The beginning of a call's object, up to the arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


def json_calls(name: str, opens: tuple[str, ...], close: str, frame: Frame, *, only_known: bool = False) -> Dialect:
    """Calls between the marks `opens` and `close`, which a model may forget; `only_known`: other names are no calls."""

    def read(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
        names = names_of(tools) if only_known and tools else None
        yield from json_text.calls(reader, names)
        if close:
            yield from json_text.stray(reader, close)
            yield from reader.close(close)

    def grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
        return framed(functions, parallel, spell, frame)

    return Dialect(name=name, opens=opens, read=read, grammar=grammar)


_LIST: dict[str, Any] = {"head": json_head, "tail": "}", "between": ", "}

HERMES = json_calls(
    "hermes",
    ("<tool_call>",),
    "</tool_call>",
    Frame(head=lambda name: "<tool_call>\n" + json_head(name), tail="}\n</tool_call>", between="\n"),
)
LLAMA3 = json_calls(
    "llama3_json",
    (),
    "",
    Frame(head=lambda name: json_head(name, "parameters"), tail="}", between="; ", key="parameters"),
    only_known=True,
)
GRANITE = json_calls(
    "granite", ("<|tool_call|>", "<tool_call>"), "</tool_call>", Frame(before="<|tool_call|>[", after="]", **_LIST)
)
PHI4 = json_calls(
    "phi4_mini_json",
    ("<|tool_call|>", "functools"),
    "<|/tool_call|>",
    Frame(before="<|tool_call|>[", after="]<|/tool_call|>", **_LIST),
)
GEMMA = json_calls(
    "gemma",
    ("```json\n", "```tool_call\n"),
    "```",
    Frame(before="```json\n[", after="]\n```", **_LIST),
    only_known=True,
)
JSON = json_calls("json", (), "", Frame(before="[", after="]", key="arguments", **_LIST), only_known=True)
