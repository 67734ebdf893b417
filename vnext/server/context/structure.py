"""Structure: what a body asks of the answer's shape, by its several names, and the grammar for it.

Owns the names that OpenAI, vLLM and older vLLM give to one thing, and the grammars of recent requests: agents send the same
schema with every request, and reading one takes 0.4 ms and more. `vnext/text/structured` does the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.server.context.openai_types import GenerationBody, ResponseFormat
from vnext.server.context.text_work import TextWork
from vnext.text.structured.asked import Asked, asked_of
from vnext.text.tokenizer import Tokenizer

_GUIDED = "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "structural_tag"
_guided = attrgetter(*_GUIDED)
RECENT_MAX = 256
RECENT_BYTES_MAX = 2**23


class Grammars:
    """Grammars by what was asked for. Mutable; only the event loop uses it."""

    def __init__(self, tokenizer: Tokenizer, work: TextWork) -> None:
        self._tokenizer = tokenizer
        self._work = work
        self._recent: dict[bytes, str] = {}
        self.size = 0

    async def grammar(self, asked: Asked, client: str) -> str:
        """The grammar's text. Raises InvalidRequest, Overloaded."""
        return await self.made(asked, client, lambda: asked)

    async def made(self, of: Any, client: str, asked: Callable[[], Asked]) -> str:
        """The grammar of what `asked` makes of the value `of`, beside the event loop. Raises InvalidRequest, Overloaded."""
        try:
            key = msgspec.json.encode(of)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return grammar_of(asked(), self._tokenizer)  # which says what is wrong with it
        if found := self._recent.pop(key, None):
            self._recent[key] = found
            return found
        grammar = await self._work.run_grammar(len(key), client, lambda: grammar_of(asked(), self._tokenizer))
        self._keep(key, grammar)
        return grammar

    def _keep(self, key: bytes, grammar: str) -> None:
        if key not in self._recent:
            self.size += len(key) + len(grammar)
            self._recent[key] = grammar
        while len(self._recent) > RECENT_MAX or self.size > RECENT_BYTES_MAX:
            oldest = next(iter(self._recent))
            self.size -= len(oldest) + len(self._recent.pop(oldest))


def grammar_of(asked: Asked, tokenizer: Tokenizer) -> str:
    """As that of text/structured/grammar.py."""
    return _structured()[0].grammar_of(asked, tokenizer)


def kept_tools(tools: list[dict[str, Any]], strict: Collection[str], options: StructuredOutputsParams) -> list[dict[str, Any]]:
    """As that of text/structured/tools.py. Takes time: not for the event loop. Raises InvalidRequest."""
    found: list[dict[str, Any]] = _structured()[1].kept_tools(tools, strict, options)
    return found


def _structured() -> tuple[Any, Any]:
    """Imported by the first request that asks for a structure: llguidance takes 70 ms."""
    from vnext.text.structured import grammar, tools

    return grammar, tools


def asked_structure(body: GenerationBody) -> Asked | None:
    """What the body asks for, None for free text. Raises InvalidRequest for two things at once."""
    format_ = _of_format(body.response_format)
    found = [] if format_ is None else [format_]
    found += [] if body.structured_outputs is None else [asked_of(body.structured_outputs)]
    found += _of_guided(body)
    if len(found) > 1:
        names = " and ".join(each.path for each in found)
        raise InvalidRequest(f"The request has {names}: an answer follows one of them, leave the others out.", found[1].path)
    if found and body.use_beam_search:
        raise InvalidRequest(f"use_beam_search cannot be combined with {found[0].path}: leave one out.", "use_beam_search")
    return found[0] if found else None


def _of_format(asked: ResponseFormat | None) -> Asked | None:
    name = "response_format"
    match asked.type if asked else "text":
        case "text":
            return None
        case "json_object":
            return Asked(kind="json_object", value=True, path=name)
        case "json_schema":
            if asked.json_schema is None or asked.json_schema.schema is None:
                raise InvalidRequest(f"{name}.json_schema.schema is missing: it is required with this type.", name)
            return Asked(kind="json", value=asked.json_schema.schema, path=f"{name}.json_schema.schema")
        case "structural_tag":
            return Asked(kind="structural_tag", value={"structures": asked.structures, "triggers": asked.triggers}, path=name)
        case kind:
            raise InvalidRequest(f"{name}.type is {kind!r}: it must be text, json_object, json_schema or structural_tag.", name)


def _of_guided(body: GenerationBody) -> list[Asked]:
    """The names of vLLM before `structured_outputs`."""
    given = [(name, value) for name, value in zip(_GUIDED, _guided(body)) if value not in (None, "", False)]
    if not given:
        return []
    options = StructuredOutputsParams(whitespace_pattern=body.guided_whitespace_pattern)
    return [Asked(kind=name.removeprefix("guided_"), value=value, path=name, options=options) for name, value in given]
