"""Structure: what a body asks of the answer's shape, by its several names, the grammar for it, and the tools that it may or must
call.

Owns the names that OpenAI, vLLM and older vLLM give to one thing, the checks and the meaning of `tools`, `tool_choice` and
`parallel_tool_calls`, and the grammars of recent requests: agents send the same schema with every request, and reading one takes
0.4 ms and more. `vnext/text/structured` does the reading; the dialect of the model's template turns a forced call into a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.server.context.conversation import json_size
from vnext.server.context.openai_types import ChatBody, GenerationBody, ResponseFormat
from vnext.server.context.text_work import TextWork
from vnext.text.structured.asked import Asked, asked_of
from vnext.text.tokenizer import Tokenizer

_GUIDED = "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "structural_tag"
_guided = attrgetter(*_GUIDED)
asking = attrgetter("response_format", "structured_outputs", *_GUIDED)
RECENT_MAX = 256
RECENT_BYTES_MAX = 2**23
TOOLS_MAX, TOOLS_BYTES_MAX = 1024, 2**22
_FIELD = "tool_choice"

Force = Literal["none", "auto", "required", "named"]


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
    text: str = _structured()[0].grammar_of(asked, tokenizer)
    return text


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
    if asked is None:
        return None
    match asked.type:
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


class ToolChoice(msgspec.Struct, frozen=True):
    """`shown` are the tools for the template, None where the model may call none. `force` is "required" if the answer must
    call one of `allowed`, "named" if it must call the one tool in it. `one`: it calls at most one. `strict`: the tools of which
    calls that the model chooses keep to a grammar, [] where none asks for that; one that does not ask takes any object.
    `strict_names`: those that ask."""

    force: Force
    shown: list[dict[str, Any]] | None
    allowed: list[dict[str, Any]]
    one: bool
    strict: list[dict[str, Any]] = []
    strict_names: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        return self.force in ("required", "named")


def tool_choice_of(body: ChatBody, knows_tools: bool) -> ToolChoice:
    """What the body asks for. `knows_tools`: the model's template shows tools, and its calls can be read. Raises
    InvalidRequest."""
    force, names = _asked(body)
    if force == "none" or not body.tools:
        if force in ("required", "named"):
            raise InvalidRequest(f"{_FIELD} asks for a call, and there are no tools: send tools, or leave it out.", _FIELD)
        return ToolChoice("none", None, [], False)
    if not knows_tools:
        raise InvalidRequest(
            "tools is given, and the chat template of this model knows none that this server can read: leave it out, or start "
            "the server with a --chat-template that does.",
            "tools",
        )
    tools = _tools(body)
    known = {tool["function"]["name"] for tool in tools}
    if unknown := [name for name in names or () if name not in known]:
        raise InvalidRequest(f"{_FIELD} names {unknown[0]!r}, which is not among tools: send one that is.", _FIELD)
    allowed = tools if names is None else [tool for tool in tools if tool["function"]["name"] in names]
    one = force == "named" or body.parallel_tool_calls is False
    strict = frozenset(tool.function.name for tool in body.tools if tool.function.strict)
    if force != "auto":
        return ToolChoice(force, tools, allowed, one, [], strict)
    return ToolChoice(force, allowed, allowed, one, _strict(body, {tool["function"]["name"] for tool in allowed}), strict)


def _strict(body: ChatBody, names: set[str]) -> list[dict[str, Any]]:
    functions = [tool.function for tool in body.tools or () if tool.function.name in names]
    if not any(function.strict for function in functions):
        return []
    anything = {"type": "object", "additionalProperties": True}
    return [
        {"function": {"name": each.name, "parameters": each.parameters if each.strict else anything}} for each in functions
    ]


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools for the template. `strict` is for the server, and no model was trained on it."""
    assert body.tools is not None
    if len(body.tools) > TOOLS_MAX:
        raise InvalidRequest(f"tools has {len(body.tools)} entries: at most {TOOLS_MAX} are allowed.", "tools")
    if (size := json_size(body.tools, "tools")) > TOOLS_BYTES_MAX:
        raise InvalidRequest(f"tools has {size} bytes: at most {TOOLS_BYTES_MAX} are allowed.", "tools")
    for place, tool in enumerate(body.tools):
        if tool.type != "function":
            raise InvalidRequest(f"tools[{place}].type is {tool.type!r}: only 'function' is supported.", f"tools[{place}].type")
    check_names([(tool.function.name, f"tools[{place}].function.name") for place, tool in enumerate(body.tools)])
    shown: list[dict[str, Any]] = msgspec.to_builtins(body.tools)
    for each in shown:
        each["function"].pop("strict", None)
    return shown


def check_names(names: Sequence[tuple[str, str]]) -> None:
    """Raise InvalidRequest for two tools of one name: nobody could say which of them a call means. `names` have their places."""
    seen: set[str] = set()
    for name, path in names:
        if name in seen:
            raise InvalidRequest(f"{path} is {name[:80]!r}: an earlier tool has this name too, make each unique.", path)
        seen.add(name)


def _asked(body: ChatBody) -> tuple[Force, list[str] | None]:
    """The force, and the names of the tools that it is about, None for all."""
    match body.tool_choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required" | "any":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "named", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            return mode, [_name(tool) for tool in tools]
    raise InvalidRequest(
        f"{_FIELD} must be 'none', 'auto', 'required', {{'type': 'function', 'function': {{'name': ...}}}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}.",
        _FIELD,
    )


def _name(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise InvalidRequest(f"{_FIELD}.allowed_tools.tools has an entry without a function's name: send one.", _FIELD)
