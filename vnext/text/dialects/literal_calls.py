"""Calls whose arguments are written name by name with literals: Python's, and Gemma's.

pythonic       [f(a=1, b="x"), g()]                                        Llama 3.2 and 4, where a template teaches it
lfm2           <|tool_call_start|>[f(a=1)]<|tool_call_end|>                LFM 2
functiongemma  <start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>
gemma4         <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>

Where the arguments of a function cannot be distinguished (grammar.py), a forced call writes them as one JSON object, f(**{...}) and
call:f{...}, which the same readers read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vnext.text.dialects.dialect import Dialect, Tools, names_of
from vnext.text.dialects.grammar import Frame, Functions, Spell, json_rule, properties_of, quoted, schema_of, start
from vnext.text.dialects.literals import PYTHON, Spelling, bare_key, literal
from vnext.text.dialects.named import NAME_SIZE_MAX
from vnext.text.dialects.reader import NoCall, Reader, Reading

_NAME = re.compile(r"[A-Za-z_][\w.:/-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TEXT_KEYWORDS = {"type", "title", "description", "default", "examples"}
Value = Callable[[Mapping[str, Any], str, Spell], str]  # (schema, the rule's name, spell) -> rules


class Style(NamedTuple):
    """How a forced call is written. `marks`: between a key and its value, and between two arguments. `whole`: the text around
    arguments that are one JSON object, None where they stand in place of head's and tail's braces."""

    head: str
    tail: str
    marks: tuple[str, str]
    value: Value
    whole: tuple[str, str] | None


def _name(reader: Reader, mark: str) -> Reading[str]:
    """A function's name, up to and over the mark. Raises NoCall."""
    name = (yield from reader.until(mark, size_max=NAME_SIZE_MAX)).strip()
    if not _NAME.fullmatch(name):
        raise NoCall
    return name


def _members(reader: Reader, spelling: Spelling, equals: str, close: str) -> Reading[None]:
    """The arguments of the call that has begun, up to and over `close`."""
    begin = "{"
    while True:
        yield from reader.skip()
        if (yield from reader.take(close)):
            reader.arguments("{}" if begin == "{" else "}")
            return
        if begin != "{" and spelling.quotes == PYTHON.quotes and (yield from reader.next_is("*")):
            raise NoCall
        key = yield from _member_key(reader, equals)
        reader.arguments(f"{begin}{key}: ")
        begin = ", "
        yield from literal(reader, reader.arguments, spelling)
        yield from reader.skip()
        if not (yield from reader.take(",")):
            yield from reader.expect(close)
            reader.arguments("}")
            return


def _member_key(reader: Reader, equals: str) -> Reading[str]:
    """A key as JSON; in Gemma's calls it may be quoted."""
    if equals == ":" and (yield from reader.take('"')):
        key = yield from reader.until('"', size_max=NAME_SIZE_MAX)
        yield from reader.skip()
        yield from reader.expect(":")
        try:
            return json.dumps(json.loads(f'"{key}"'), ensure_ascii=False)
        except ValueError as error:
            raise NoCall from error
    return json.dumps((yield from bare_key(reader, equals)), ensure_ascii=False)


# ---- Python ------------------------------------------------------------------------------------------------------


def _python_calls(reader: Reader, names: frozenset[str] | None) -> Reading[None]:
    """A list of calls. `names`: only these are calls. Raises NoCall."""
    yield from reader.skip()
    yield from reader.expect("[")
    while True:
        name = yield from _name(reader, "(")
        if names is not None and name not in names:
            raise NoCall
        reader.begin_call(name)
        yield from reader.skip()
        if (yield from reader.take("**")):
            if not (yield from reader.next_is("{")):
                raise NoCall
            yield from literal(reader, reader.arguments, PYTHON)
            yield from reader.skip()
            yield from reader.expect(")")
        else:
            yield from _members(reader, PYTHON, "=", ")")
        reader.end_call()
        yield from reader.skip()
        has_comma = yield from reader.take(",")
        yield from reader.skip()
        if (yield from reader.take("]")):
            return
        if not has_comma:
            raise NoCall


def _python(name: str, opened: str, close: str) -> Dialect:
    """`opened`: the mark before the list, "" where the list must be the whole answer; `close`: the mark after it."""

    def read(reader: Reader, mark: str, tools: Tools) -> Reading[None]:
        if not opened:
            yield from reader.skip()
            yield from reader.take("<|python_start|>", "<|python_tag|>")
        yield from _python_calls(reader, names_of(tools) if tools and not opened else None)
        yield from reader.skip()
        yield from reader.close(close)

    def grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
        frame = Frame(head=str, before=f"{opened}[", between=", ", after=f"]{close if opened else ''}")
        return _grammar(functions, parallel, spell, frame, Style("{}(", ")", ("=", ", "), _python_value, ("**", "")))

    return Dialect(name=name, opens=(opened,) if opened else (), read=read, grammar=grammar)


def _python_value(schema: Mapping[str, Any], rule: str, spell: Spell) -> str:
    if schema.get("type") == "boolean" and not set(schema) - _TEXT_KEYWORDS:
        return f'{rule}: "True" | "False"'
    return f"{rule}: {json_rule(schema)}"


# ---- Gemma -------------------------------------------------------------------------------------------------------


def _gemma(name: str, opened: str, close: str, quote: str) -> Dialect:
    spelling = Spelling((quote, '"'), bare_keys=True)

    def read(reader: Reader, mark: str, tools: Tools) -> Reading[None]:
        yield from reader.skip()
        yield from reader.expect("call:")
        reader_name = yield from _name(reader, "{")
        reader.begin_call(reader_name)
        yield from _members(reader, spelling, ":", "}")
        reader.end_call()
        yield from reader.skip()
        yield from reader.close(close)

    def value(schema: Mapping[str, Any], rule: str, spell: Spell) -> str:
        if schema.get("type") != "string" or set(schema) - _TEXT_KEYWORDS:
            return f"{rule}: {json_rule(schema)}"
        if spell(quote) == quoted(quote):
            return f"{rule}: {spell(quote)} {rule}_text\n{rule}_text[suffix={quoted(quote)}]: /(?s:.*)/"
        mark = re.escape(quote[1])  # the text has not even the beginning of the mark
        return f"{rule}: {spell(quote)} {rule}_text {spell(quote)}\n{rule}_text: /([^<]|<+[^<{mark}])*/"

    def grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
        style = Style(f"{opened}call:{{}}{{{{", f"}}{close}", (":", ","), value, None)
        return _grammar(functions, parallel, spell, Frame(head=str), style)

    return Dialect(name=name, opens=(opened,), read=read, grammar=grammar)


# ---- forced calls ------------------------------------------------------------------------------------------------


def _grammar(functions: Functions, parallel: bool, spell: Spell, frame: Frame, style: Style) -> str:
    rules = []
    for place, function in enumerate(functions):
        call, properties = f"call_{place}", properties_of(function)
        opened, closed = style.head.format(function["name"]), style.tail
        if properties is None or not all(map(_IDENTIFIER.fullmatch, properties)):
            before, after = style.whole or ("", "")
            opened, closed = (opened + before, after + closed) if style.whole else (opened[:-1], closed[1:])
            rules += [f"{call}: {spell(opened)} arguments_{place} {spell(closed)}"]
            rules += [f"arguments_{place}: {json_rule(schema_of(function))}"]
        else:
            rules += [f"{call}: {spell(opened)} {call}_from_0 {spell(closed)}"]
            rules += _arguments(call, properties, spell, style)
    return "\n".join([start(len(functions), parallel, spell, frame), *rules]) + "\n"


def _arguments(call: str, properties: dict[str, tuple[dict[str, Any], bool]], spell: Spell, style: Style) -> list[str]:
    """Rules: `_from_N` is the arguments from the Nth on where none stands before them, `_after_N` where one does."""
    rules = []
    for place, (name, (schema, required)) in enumerate(properties.items()):
        one = f"{call}_{place}"
        rules += [f"{one}: {spell(name + style.marks[0])} {one}_value", style.value(schema, f"{one}_value", spell)]
        rest = f"{call}_after_{place + 1}"
        rules += [f"{call}_from_{place}: {one} {rest}" + ("" if required else f" | {call}_from_{place + 1}")]
        rules += [f"{call}_after_{place}: {spell(style.marks[1])} {one} {rest}" + ("" if required else f" | {rest}")]
    end = len(properties)
    return [*rules, f'{call}_from_{end}: ""', f'{call}_after_{end}: ""']


PYTHONIC = _python("pythonic", "", "<|python_end|>")
LFM2 = _python("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
FUNCTIONGEMMA = _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
