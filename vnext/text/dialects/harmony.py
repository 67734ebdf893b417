"""Harmony: gpt-oss writes an answer as messages, each with a channel, and a call as a message to a function.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

The recipient may also stand after the role. Messages in `analysis` are reasoning, those in other channels without a recipient
are words. An answer has one call, because it ends with <|call|>. The package `openai-harmony` fetches its vocabulary from the
net and reads tokens; this reader needs neither.
"""

from __future__ import annotations

import re

from vnext.text.dialects.dialect import Dialect, Tools
from vnext.text.dialects.grammar import Frame, Functions, Spell, framed
from vnext.text.dialects.named import NAME_SIZE_MAX, named_call
from vnext.text.dialects.reader import NoCall, Reader, Reading

_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant(?:\s+to=(?P<by_role>[^\s<]+))?\s*)?"
    r"(?:<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<by_channel>[^\s<]+))?)?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)


def _read(reader: Reader, opened: str, tools: Tools) -> Reading[None]:
    mark = yield from reader.words_until(_STARTS)
    while mark is not None:
        try:
            mark = yield from _message(reader, mark)
        except NoCall:
            reader.break_off()
            mark = None
        if mark is None:
            mark = yield from reader.words_until(_STARTS)


def _message(reader: Reader, mark: str) -> Reading[str | None]:
    """One message, whose header begins with `mark`; returns the mark of the next if it ends this one. Raises NoCall."""
    header = mark + (yield from reader.until("<|message|>", size_max=2 * NAME_SIZE_MAX))
    found = _HEADER.fullmatch(header)
    if found is None:
        raise NoCall
    if recipient := found["by_role"] or found["by_channel"]:
        yield from named_call(reader, recipient.removeprefix("functions."))
        yield from reader.skip()
        yield from reader.close(*_ENDS)
        reader.drop()
        return None
    reader.drop()
    read = reader.reasoning_until if found["channel"] == "analysis" else reader.words_until
    end = yield from read((*_ENDS, *_STARTS))
    if end in _STARTS:
        reader.begin = reader.place - len(end)
        return end
    reader.drop()
    return None


def _grammar(functions: Functions, parallel: bool, spell: Spell) -> str:
    head = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    return framed(functions, False, spell, Frame(head=head.format))


HARMONY = Dialect(name="openai", opens=(), read=_read, grammar=_grammar, is_whole=True, ends=("<|call|>",))
