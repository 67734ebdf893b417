"""Tool choice: what a body's `tools`, `tool_choice` and `parallel_tool_calls` ask of an answer.

Owns the checks of these fields and their meaning: the tools that the template shows, and those of which a forced answer calls
at least one. The dialect of the model's template turns the force into a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.conversation import json_size
from vnext.server.context.openai_types import ChatBody

TOOLS_MAX, TOOLS_BYTES_MAX = 1024, 2**22
_FIELD = "tool_choice"

Force = Literal["none", "auto", "required", "named"]


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
    for tool in shown:
        tool["function"].pop("strict", None)
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
