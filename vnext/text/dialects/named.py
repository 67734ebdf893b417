"""Calls that name a function between marks, and then write its arguments as JSON: Mistral, DeepSeek, Kimi K2.

mistral      [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}            from 2025 on; the id may be missing
             [TOOL_CALLS][{"name": ..., "arguments": {...}}]   before
deepseek_v31 <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
deepseek_v3  ... <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{...}\\n```<｜tool▁call▁end｜> ..., also R1
kimi_k2      <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
             ... <|tool_calls_section_end|>; functions.name:0 is the call's id
"""

from __future__ import annotations

import re
from functools import partial

from vnext.text.dialects import json_text
from vnext.text.dialects.dialect import Dialect, Tools
from vnext.text.dialects.grammar import Frame, Functions, Spell, framed
from vnext.text.dialects.reader import NoCall, Reader, Reading

NAME_SIZE_MAX = 256
_NAME = re.compile(r"[^\s<>{}\[\]\"]+")


def named_call(reader: Reader, name: str, id_: str = "") -> Reading[None]:
    """The arguments of the call `name`. Raises NoCall."""
    if not name or len(name) > NAME_SIZE_MAX or not _NAME.fullmatch(name):
        raise NoCall
    yield from reader.skip()
    if not (yield from reader.next_is("{")):
        raise NoCall
    reader.begin_call(name, id_)
    yield from json_text.value(reader, reader.arguments)
    reader.end_call()


# ---- Mistral -----------------------------------------------------------------------------------------------------


def _read_mistral(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
    yield from reader.skip()
    if (yield from reader.next_is("[{")) or (yield from reader.next_is("[ {")):
        yield from json_text.calls(reader, None)
        return
    head = yield from reader.until("{", size_max=NAME_SIZE_MAX)
    reader.place -= 1
    name, _, rest = head.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    yield from named_call(reader, name.strip(), rest.strip())


def _mistral_grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
    frame = Frame(head=lambda name: f"[TOOL_CALLS]{name}[ARGS]")
    return framed(functions, parallel, spell, frame)


def _old_mistral_grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
    frame = Frame(
        head=lambda name: f'{{"name": "{name}", "arguments": ', tail="}", between=", ", before="[TOOL_CALLS][", after="]"
    )
    return framed(functions, parallel, spell, frame)


MISTRAL = Dialect(name="mistral", opens=("[TOOL_CALLS]",), read=_read_mistral, grammar=_mistral_grammar)
MISTRAL_LIST = Dialect(name="mistral_list", opens=("[TOOL_CALLS]",), read=_read_mistral, grammar=_old_mistral_grammar)

# ---- DeepSeek ----------------------------------------------------------------------------------------------------

_D_OPEN, _D_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_D_CALL, _D_SEP, _D_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _read_deepseek(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
    yield from reader.skip()
    first = True
    while (yield from reader.take(_D_CALL)) or (first and opened == _D_CALL):
        first = False
        name = (yield from reader.until(_D_SEP, size_max=NAME_SIZE_MAX)).strip()
        if name == "function":  # V3 names the kind of tool first
            name = (yield from reader.until("\n", size_max=NAME_SIZE_MAX)).strip()
            yield from reader.skip()
            yield from reader.take("```json")
        yield from named_call(reader, name)
        yield from reader.skip()
        if (yield from reader.close("```")):
            yield from reader.skip()
        yield from reader.close(_D_END)
        reader.drop()
        yield from reader.skip()
    if first:
        raise NoCall
    yield from reader.close(_D_CLOSE, _D_CALL)


def _deepseek(name: str, head: str, tail: str, between: str) -> Dialect:
    frame = Frame(head=lambda called: head.format(called), tail=tail, before=_D_OPEN, between=between, after=_D_CLOSE)
    return Dialect(name=name, opens=(_D_OPEN, _D_CALL), read=_read_deepseek, grammar=partial(framed, frame=frame))


DEEPSEEK_V31 = _deepseek("deepseek_v31", _D_CALL + "{}" + _D_SEP, _D_END, "")
DEEPSEEK_V3 = _deepseek("deepseek_v3", f"{_D_CALL}function{_D_SEP}{{}}\n```json\n", f"\n```{_D_END}", "\n")

# ---- Kimi --------------------------------------------------------------------------------------------------------

_K_OPEN, _K_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_K_CALL, _K_SEP, _K_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_K_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _read_kimi(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
    yield from reader.skip()
    count = reader.call_count
    while (yield from reader.take(_K_CALL)):
        id_ = (yield from reader.until(_K_SEP, size_max=NAME_SIZE_MAX)).strip()
        found = _K_ID.fullmatch(id_)
        if found is None:
            raise NoCall
        yield from named_call(reader, found[1], id_)
        yield from reader.skip()
        yield from reader.close(_K_END)
        reader.drop()
        yield from reader.skip()
    if reader.call_count == count:
        raise NoCall
    yield from reader.close(_K_CLOSE, _K_CALL)


# The model counts its calls in their ids; a grammar cannot, so it allows any number.
def _kimi_grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
    frame = Frame(head=lambda name: f"{_K_CALL}functions.{name}:\x00{_K_SEP}", tail=_K_END, before=_K_OPEN, after=_K_CLOSE)

    def spell_id(text: str) -> str:
        before, _, after = text.partition("\x00")
        return f"{spell(before)} /[0-9]{{1,3}}/ {spell(after)}" if after else spell(text)

    return framed(functions, parallel, spell_id, frame)


KIMI_K2 = Dialect(name="kimi_k2", opens=(_K_OPEN,), read=_read_kimi, grammar=_kimi_grammar)
