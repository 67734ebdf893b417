"""Grammars that force calls: Lark text as llguidance reads it, with a function's schema inside.

A call's arguments are one JSON value under the function's own schema, so that references in it hold. Where a dialect writes one
argument after another, each gets its own schema; a function whose schema cannot be taken apart so is written as JSON instead,
which each dialect's parser reads too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Schema = Mapping[str, Any]
Members = dict[str, Any]
Functions = Sequence[Schema]
Spell = Callable[[str], str]

WHOLE_MAX = 64  # calls as whole JSON objects: more of them are more ways at one position than a grammar may have
_WHOLE = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentRequired", "dependentSchemas"}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The text around calls: `before` the first, `between` two, `after` the last; `head` before the arguments of a name, `tail`
    after them. `key`: the member of the arguments where a call is one JSON object and no mark stands before it."""

    head: Callable[[str], str]
    tail: str = ""
    before: str = ""
    between: str = ""
    after: str = ""
    key: str = ""


def speller(special: Mapping[str, int]) -> Spell:
    """Writes a text in Lark: special tokens by their ids, the rest as strings."""
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def spell(text: str) -> str:
        pieces, place = [], 0
        for found in pattern.finditer(text):
            pieces += [quoted(text[place : found.start()]), f"<[{special[found[0]]}]>"]
            place = found.end()
        return " ".join(piece for piece in [*pieces, quoted(text[place:])] if piece)

    return spell


def behind(head: str, grammar: str) -> str:
    """The grammar, as llguidance reads it, of an answer that begins with `head` (Lark) and then follows `grammar`."""
    inner = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": f"start: {head} @answer"}, {**inner, "name": "answer"}]}, ensure_ascii=False)


def either(calls: str, answer: str) -> str:
    """The grammar, as llguidance reads it, of an answer that is `calls` (Lark) or follows `answer`."""
    first, *rest = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    choice = {"lark_grammar": "start: @calls | @words"}
    named = [{"lark_grammar": calls, "name": "calls"}, {**first, "name": "words"}]
    return json.dumps({"grammars": [choice, *named, *rest]}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A string in Lark, "" for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def schema_of(function: Schema) -> Members:
    """A function's schema of arguments: an object, without unknown names where the names are listed."""
    schema: Members = {"type": "object"} | dict(function.get("parameters") or {})
    if not _WHOLE & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def json_rule(schema: Schema) -> str:
    """The body of a rule for one JSON value. The reader of the grammar bounds the space in it (`CALL_OPTIONS`)."""
    return "%json " + json.dumps(schema, ensure_ascii=False)


def properties_of(function: Schema) -> dict[str, tuple[Members, bool]] | None:
    """Name -> (schema, is required) of each argument, with the definitions that it may refer to; None where the arguments do
    not stand alone."""
    schema = schema_of(function)
    known = {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "title",
        "description",
        "$schema",
    }
    if schema.keys() - known or schema["type"] != "object":
        return None
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if set(required) - properties.keys() or not all(isinstance(each, dict) for each in properties.values()):
        return None
    definitions: Members = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {name: ({**each, **definitions}, name in required) for name, each in properties.items()}


def framed(functions: Functions, parallel: bool, spell: Spell, frame: Frame, body: Callable[[int], str] | None = None) -> str:
    """Calls of functions whose arguments are one JSON object each. `body` gives the rules of another: `arguments_N: ...`."""
    rules = []
    for place, function in enumerate(functions):
        if frame.key and len(functions) <= WHOLE_MAX and (whole := whole_call(function, frame.key)):
            rules += [f"call_{place}: {json_rule(whole)}"]
            continue
        head, tail = spell(frame.head(function["name"])), spell(frame.tail)
        rules += [f"call_{place}: {head} arguments_{place} {tail}"]
        rules += [body(place) if body else f"arguments_{place}: {json_rule(schema_of(function))}"]
    return "\n".join([start(len(functions), parallel, spell, frame), *rules]) + "\n"


def whole_call(function: Schema, key: str) -> Members | None:
    """The schema of a call as one JSON object, so that a grammar may hold other JSON beside it; None where the arguments' schema
    refers to its own places by other ways than definitions."""
    schema = dict(schema_of(function))
    definitions: Members = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    if re.search(r'"\$ref": "(?!#/(\$defs|definitions)/)', json.dumps(schema) + json.dumps(definitions)):
        return None
    members = {"name": {"const": function["name"]}, key: schema}
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False, **definitions}


def start(count: int, parallel: bool, spell: Spell, frame: Frame) -> str:
    """The rules `start` and `call`, over rules call_0 ... for each function."""
    more = f"({spell(frame.between)} call)*" if parallel else ""
    choice = " | ".join(f"call_{place}" for place in range(count))
    return f"start: {spell(frame.before)} call {more} {spell(frame.after)}\ncall: {choice}"


def chosen(lark: str, opens: Sequence[str], spell: Spell) -> str | None:
    """Lark for free text in which each mark begins a call of `lark`, the grammar of a forced call; None where no mark does. A mark
    that ends in a line is what prose may hold too (a fenced block)."""
    for mark in opens:
        spelled = spell(mark)
        is_token = spelled.startswith("<[")
        begin = spelled if is_token else spelled[:-1]
        before = rf"^(start|call_\d+): {re.escape(begin)}"
        inner, count = re.subn(before, r"\1: " if is_token else r'\1: "', lark, flags=re.MULTILINE)
        if count and not mark.endswith("\n"):
            tag = f"tag: TEXT {spelled} calls" if is_token else f"trigger[lazy]: TEXT {spelled}\ntag: trigger calls"
            head = ["%llguidance {}", "start: tag* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", tag]
            return "\n".join([*head, inner.replace("start:", "calls:", 1)])
    return None
