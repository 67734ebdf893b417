"""Dialect: how one model family writes tool calls.

    dialect = dialect_of(template, tokenizer.added_tokens)                     table.py
    parser = dialect.parser(tools)                                             for one answer
    parts = parser.push(text) + parser.finish()
    dialect.call_grammar(tools, parallel, special)                             Lark, for forced calls

Space between words and a call is not part of the words. A call's arguments stream as the model writes them, and those of a call
that has a CallEnded are valid JSON. A call that breaks off has none, and what follows the break is words; where the parser `holds`
calls back, the call itself is. A text that ends within a call loses the rest of it, as an answer that was cut does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vnext.text.dialects.grammar import Functions, Spell, chosen, speller
from vnext.text.dialects.reader import NoCall, Reader, Reading
from vnext.text.parts import Part

Tools = Sequence[Mapping[str, Any]]  # as OpenAI's chat API spells them: {"type": "function", "function": {"name": ...}}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. `opens`: each of these marks begins calls wherever it stands; () where only a whole answer can be calls.

    `read(reader, opened, tools)` reads calls from the mark `opened` on ("" for a whole answer) and raises NoCall where there are
    none, or no more. `grammar(functions, parallel, spell)` writes a Lark grammar that forces calls; `functions` are the
    `function` of each tool, `spell` writes a text in Lark. `is_whole`: `read` reads a whole answer, words and reasoning included.
    `ends`: special tokens that end an answer, whatever the checkpoint calls its end tokens.
    """

    name: str
    opens: tuple[str, ...]
    read: Callable[[Reader, str, Tools], Reading[None]]
    grammar: Callable[[Functions, bool, Spell], str]
    is_whole: bool = False
    ends: tuple[str, ...] = ()

    def has_marks(self, tools: Tools | None) -> bool:
        """Whether special tokens must stay in the text, because they may be marks."""
        return self.is_whole or (tools is not None and bool(self.opens))

    def parser(self, tools: Tools, holds: bool = False) -> DialectParser:
        """A parser of one answer by a model that is offered `tools`. `holds`: calls come when they are complete."""
        return DialectParser(self, tools, holds)

    def call_grammar(self, tools: Tools, parallel: bool, special: Mapping[str, int] | None = None) -> str:
        """Lark, as llguidance reads it, for an answer that calls one of the tools; `parallel`: or several.

        `special`: the tokenizer's special tokens, text to id: a mark that is one must be that token.
        """
        return self.grammar([tool["function"] for tool in tools], parallel, speller(special or {}))

    def chosen_grammar(self, tools: Tools, special: Mapping[str, int] | None = None) -> str | None:
        """Lark for an answer in which the model may call the tools, and whose calls keep to their schemas; None where a call
        has no mark that tells it from words."""
        spell = speller(special or {})
        functions = [tool["function"] for tool in tools]
        return None if self.is_whole else chosen(self.grammar(functions, False, spell), self.opens, spell)


class DialectParser:
    """A parser of one answer."""

    def __init__(self, dialect: Dialect, tools: Tools, holds: bool = False) -> None:
        self._reader = Reader(holds)
        read = _whole if dialect.is_whole else _marked if dialect.opens else _bare
        self._reading = read(self._reader, dialect, tools)
        self._is_done = False

    def push(self, text: str) -> list[Part]:
        """Take in a text; returns the parts that are certain by now."""
        return self._look(text, False)

    def finish(self, cut: bool = False) -> list[Part]:
        """The rest: the text has ended. `cut`: before the model ended it."""
        self._reader.is_cut = cut
        return self._look("", True)

    def _look(self, text: str, ended: bool) -> list[Part]:
        if self._reader.add(text, ended) and not self._is_done:
            self._is_done = next(self._reading, StopIteration) is StopIteration
        return self._reader.take_parts()


def _whole(reader: Reader, dialect: Dialect, tools: Tools) -> Reading[None]:
    return dialect.read(reader, "", tools)


def _marked(reader: Reader, dialect: Dialect, tools: Tools) -> Reading[None]:
    """Words, and calls where a mark opens them."""
    while opened := (yield from reader.words_until(dialect.opens)):
        try:
            yield from dialect.read(reader, opened, tools)
        except NoCall:
            reader.break_off()
            continue
        reader.drop()
        yield from reader.skip()
        reader.drop()
        yield from reader.skip_cut(dialect.opens)


def _bare(reader: Reader, dialect: Dialect, tools: Tools) -> Reading[None]:
    """An answer that is all calls or all words."""
    try:
        yield from dialect.read(reader, "", tools)
        yield from reader.skip()
        reader.drop()
    except NoCall:
        reader.break_off()
    yield from reader.words_until(())


def names_of(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)
