"""Translation: from a body of the Responses API, after the items of earlier responses, to the ChatBody that asks for the same.

Owns what an item of each type means to a chat. Items of one turn of the assistant (reasoning, words, calls) become one message,
as the chat template wrote it when it was the answer, so that the prefix cache still holds it. A custom tool takes a text; to a
chat it is a function with one argument.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.conversation import CallPairs, is_object
from vnext.server.context.errors import SCORING, Names, converted
from vnext.server.context.openai_types import ChatBody
from vnext.server.context.structure import check_names
from vnext.server.responses.bodies import Content, Item, ResponsesBody, Tool

ARGUMENT = "input"
"""The one argument of a custom tool."""
LEFT_OUT = frozenset(
    "web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 image_generation tool_search "
    "local_shell shell apply_patch".split()
)
"""Tools that run at OpenAI, or that its models know without a schema. Codex and other clients offer them with every request: the
model does not see them."""
PASSED_OVER = frozenset(
    "web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output "
    "local_shell_call local_shell_call_output shell_call shell_call_output apply_patch_call apply_patch_call_output "
    "mcp_call mcp_list_tools mcp_approval_request mcp_approval_response tool_search_call tool_search_output "
    "program program_output ghost_snapshot context_compaction compaction compaction_summary compaction_trigger".split()
)
"""Items of such tools in a history that another server began: what they say is in the answers that followed."""
SAME = (
    "model", "stream", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "priority", "cache_salt", "request_id",
    "prompt_cache_retention", "enable_thinking", "thinking_token_budget", "chat_template_kwargs", "structured_outputs",
    "bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids",
)  # fmt: skip
_TEXTS = ("input_text", "output_text", "text")
_REFUSALS = ("refusal",)
_MEDIA = {"input_image": "image", "input_audio": "audio"}
"""Types of parts -> the kind of input that each gives."""


def chat_body(body: ResponsesBody, earlier: Sequence[Item], reads: Collection[str] = ()) -> ChatBody:
    """The chat that `body` asks for; `reads`: the kinds of inputs that the model reads. Raises InvalidRequest."""
    items = [(item, "previous_response_id") for item in earlier]
    items += [(item, f"input[{place}]") for place, item in enumerate(input_items(body))]
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = _with_one_beginning(instructions + _messages(items, reads))
    if not messages:
        raise InvalidRequest("input is missing: send a text or a list of items.", "input")
    fields: dict[str, Any] = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    fields |= {"messages": messages, "max_tokens": body.max_output_tokens}
    fields |= _tools(body) | _format(body) | _reasoning(body) | _logprobs(body)
    _check(body)
    return converted(fields, ChatBody)


def check_calls(body: ResponsesBody, earlier: Sequence[Item]) -> None:
    """Raise InvalidRequest for a conversation whose calls and results are no pairs."""
    pairs = CallPairs()
    items = [(item, "previous_response_id") for item in earlier]
    items += [(item, f"input[{place}].call_id") for place, item in enumerate(input_items(body))]
    for item, path in _read(items):
        if item.kind in ("function_call", "custom_tool_call") and item.call_id is not None:
            is_cut = item.status == "incomplete" or (item.kind == "function_call" and not is_object(_arguments(item)))
            pairs.call(item.call_id, path, is_cut)
        elif item.kind in ("function_call_output", "custom_tool_call_output"):
            pairs.result(item.call_id, path)
    pairs.end()


def input_items(body: ResponsesBody) -> list[Item]:
    """The input; a text is a user's message."""
    if isinstance(body.input, str):
        return [Item(type="message", role="user", content=body.input)]
    return body.input or []


def names_of(body: ResponsesBody) -> Names:
    """A chat's fields -> this API's. The chat's list of tools has no entries for those that are left out."""
    tools = [(rf"tools\[{at}\]\.function", path) for at, (_, _, path) in enumerate(_flat(body.tools))]
    return [
        SCORING,
        *tools,
        (r"response_format\.json_schema\.schema", "text.format.schema"),
        (r"response_format", "text.format"),
        (r"max_tokens", "max_output_tokens"),
        (r"reasoning_effort", "reasoning.effort"),
        (r"messages\[\d+\]\.content\[\d+\]\.image_url", "input_image"),
        (r"messages\[\d+\]\.content\[\d+\]\.input_audio", "input_audio"),
        (r"the messages", "the input"),
        (r"messages$", "input"),
    ]


def with_items(body: ResponsesBody, find: Callable[[str], Item | None]) -> ResponsesBody:
    """The body with the stored items that its references name, each at most once: a few bytes would stand for gigabytes. Raises
    InvalidRequest for one that `find` does not find, or finds again."""
    if not isinstance(body.input, list) or all(item.kind != "item_reference" for item in body.input):
        return body
    seen: set[int] = set()
    items = [_referred(item, f"input[{place}].id", find, seen) for place, item in enumerate(body.input)]
    return msgspec.structs.replace(body, input=items)


def _referred(item: Item, path: str, find: Callable[[str], Item | None], seen: set[int]) -> Item:
    """`seen`: the identities of items that others have named."""
    if item.kind != "item_reference":
        return item
    found = find(item.id or "")
    if found is None:
        raise InvalidRequest(
            f"{path}: there is no item {(item.id or '')[:60]!r} here, it was not stored or was dropped for later ones: send the "
            "item itself.",
            path,
        )
    if id(found) in seen:
        raise InvalidRequest(f"{path}: the item {(item.id or '')[:60]!r} is in the input already: name it once.", path)
    seen.add(id(found))
    return found


class Named(msgspec.Struct, frozen=True):
    """A tool as a client knows it, by the name that the model knows."""

    name: str
    namespace: str | None
    is_custom: bool


def named_tools(body: ResponsesBody) -> dict[str, Named]:
    """The client's tools by the names that the model knows: those in a namespace have its name before their own."""
    return {
        _full_name(tool.name, namespace): Named(tool.name, namespace, tool.type == "custom")
        for tool, namespace, _ in _flat(body.tools)
        if tool.name is not None
    }


def opaque(text: str) -> str:
    """Reasoning as the opaque text that clients send back. It is not secret: the client has the reasoning itself."""
    return base64.b64encode(text.encode()).decode()


def _check(body: ResponsesBody) -> None:
    """A `truncation` of "auto" is for an input that does not fit, which is refused."""
    if body.truncation not in (None, "disabled", "auto"):
        raise InvalidRequest(f"truncation is {body.truncation!r}: it must be 'disabled' or 'auto'.", "truncation")


def _logprobs(body: ResponsesBody) -> dict[str, Any]:
    """Asked for by `include`, or by a number of alternatives."""
    if not body.top_logprobs and "message.output_text.logprobs" not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}


def _reasoning(body: ResponsesBody) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    return {} if effort is None else {"reasoning_effort": effort}


def _format(body: ResponsesBody) -> dict[str, Any]:
    asked = None if body.text is None else body.text.format
    if asked is None:
        return {}
    match asked.type:
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            if asked.schema is None:
                raise InvalidRequest("text.format.schema is missing: it is required with this type.", "text.format.schema")
            return {"response_format": {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema}}}
        case kind:
            raise InvalidRequest(
                f"text.format.type is {kind!r}: it must be text, json_object or json_schema.", "text.format.type"
            )


# ---- tools ----------------------------------------------------------------------------------------------------------------


def _tools(body: ResponsesBody) -> dict[str, Any]:
    flat = _flat(body.tools)
    check_names([(_full_name(tool.name, namespace), f"{path}.name") for tool, namespace, path in flat if tool.name])
    found = [_tool(*each) for each in flat]
    if not found and body.tools and body.tool_choice == "required":
        raise _unforced(body.tools[0].type)
    return {"tools": found or None, "tool_choice": _choice(body.tool_choice)}


def _flat(tools: Sequence[Tool] | None) -> list[tuple[Tool, str | None, str]]:
    """(tool, its namespace, where it stands) of all tools that the model sees."""
    found: list[tuple[Tool, str | None, str]] = []
    for place, tool in enumerate(tools or ()):
        if tool.type == "namespace":
            found += [(each, tool.name, f"tools[{place}].tools[{at}]") for at, each in enumerate(tool.tools or ())]
        elif tool.type not in LEFT_OUT:
            found.append((tool, None, f"tools[{place}]"))
    return found


def _full_name(name: str, namespace: object) -> str:
    return f"{namespace}__{name}" if namespace else name


def _tool(tool: Tool, namespace: str | None, path: str) -> dict[str, Any]:
    if tool.type not in ("function", "custom"):
        raise InvalidRequest(
            f"{path}.type is {tool.type!r}: such a tool runs at OpenAI, and this server runs none; leave it out.", f"{path}.type"
        )
    if tool.name is None:
        raise InvalidRequest(f"{path}.name is missing: it is required.", f"{path}.name")
    function: dict[str, Any] = {"name": _full_name(tool.name, namespace)}
    if tool.type == "custom":
        function |= {"description": _described(tool), "parameters": _parameters(tool)}
    else:
        function |= {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _described(tool: Tool) -> str | None:
    """With the text's grammar, which no schema can hold the argument to."""
    if (tool.format or {}).get("syntax") != "lark":
        return tool.description
    return f"{tool.description or ''}\nThe input keeps to this Lark grammar:\n{(tool.format or {}).get('definition', '')}".strip()


def _parameters(tool: Tool) -> dict[str, Any]:
    argument: dict[str, Any] = {"type": "string"}
    if (tool.format or {}).get("syntax") == "regex":
        argument["pattern"] = f"^(?:{(tool.format or {}).get('definition', '')})$"
    return {"type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT], "additionalProperties": False}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case {"type": "function" | "custom", "name": str(name), **rest}:
            return {"type": "function", "function": {"name": _full_name(name, rest.get("namespace"))}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            known = [_choice(tool) for tool in tools if not (isinstance(tool, dict) and tool.get("type") in LEFT_OUT)]
            if tools and not known and mode == "required":
                raise _unforced(tools[0]["type"])
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": known}} if known or not tools else "none"
        case {"type": str(kind)} if kind in LEFT_OUT:
            raise _unforced(kind)
        case None | "none" | "auto" | "required":
            return choice
    raise InvalidRequest(
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function' or 'custom', 'name': ...} or "
        "{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}.",
        "tool_choice",
    )


def _unforced(kind: str) -> InvalidRequest:
    sentence = f"tool_choice asks for a call of {kind!r}: the model is not told of such a tool here; send 'auto'."
    return InvalidRequest(sentence, "tool_choice")


# ---- items ----------------------------------------------------------------------------------------------------------------


def _messages(items: Sequence[tuple[Item, str]], reads: Collection[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item, path in _read(items):
        match item.kind:
            case "message":
                _add_message(found, item, path, reads)
            case "reasoning":
                if thought := _thought(item):
                    _turn(found, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
            case "function_call":
                _turn(found).setdefault("tool_calls", []).append(_call(item, _arguments(item), path))
            case "custom_tool_call":
                arguments = json.dumps({ARGUMENT: item.input or ""}, ensure_ascii=False)
                _turn(found).setdefault("tool_calls", []).append(_call(item, arguments, path))
            case "function_call_output" | "custom_tool_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _output(item, f"{path}.output", reads)})
            case kind:
                raise InvalidRequest(
                    f"{path}.type is {kind!r}: this server reads messages, reasoning, calls and their outputs; leave it out.",
                    f"{path}.type",
                )
    return found


def _read(items: Sequence[tuple[Item, str]]) -> Iterator[tuple[Item, str]]:
    """All but those that are passed over. Codex sends the output of a local shell's call as that of a function: it goes too."""
    gone = {item.call_id for item, _ in items if item.kind in PASSED_OVER and item.call_id}
    for item, path in items:
        if item.kind not in PASSED_OVER and not (item.kind == "function_call_output" and item.call_id in gone):
            yield item, path


def _with_one_beginning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions at the beginning as one message: many templates know one, and Codex sends several."""
    count = next((at for at, each in enumerate(messages) if each["role"] not in ("system", "developer")), len(messages))
    if count < 2:
        return messages
    return [{"role": "system", "content": "\n\n".join(each["content"] for each in messages[:count])}, *messages[count:]]


def _turn(found: list[dict[str, Any]], *later: str) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last one, unless it has one of the members `later` already."""
    if not found or found[-1]["role"] != "assistant" or any(found[-1].get(name) for name in later):
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _add_message(found: list[dict[str, Any]], item: Item, path: str, reads: Collection[str]) -> None:
    if item.role is None or item.content is None:
        name = "role" if item.role is None else "content"
        raise InvalidRequest(f"{path}.{name} is missing: it is required.", f"{path}.{name}")
    shown = reads if item.role == "user" else ()
    text = item.content if isinstance(item.content, str) else _parts(item.content, f"{path}.content", shown)
    if item.role == "assistant":
        _turn(found, "content", "tool_calls")["content"] = text
    else:
        found.append({"role": item.role, "content": text})


def _parts(parts: Sequence[Content], path: str, reads: Collection[str]) -> str | list[dict[str, object]]:
    """One text, or the parts of a chat where there are inputs that the model reads."""
    if all(_MEDIA.get(part.type) not in reads for part in parts):
        return _text(parts, path)
    return [_part(part, f"{path}[{at}]", reads) for at, part in enumerate(parts)]


def _part(part: Content, path: str, reads: Collection[str]) -> dict[str, object]:
    if _MEDIA.get(part.type) not in reads:
        return {"type": "text", "text": _text([part], path)}
    if part.type == "input_audio" and part.input_audio is not None:
        return {"type": "input_audio", "input_audio": part.input_audio}
    if part.image_url is not None:
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    name, remedy = ("image_url", "as a data URL") if part.type == "input_image" else ("input_audio", "with its data in base64")
    raise InvalidRequest(f"{path}.{name} is missing: send it {remedy}.", f"{path}.{name}")


def _arguments(item: Item) -> str:
    given = item.arguments or "{}"
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _output(item: Item, path: str, reads: Collection[str]) -> str | list[dict[str, object]]:
    if isinstance(item.output, dict):
        raise InvalidRequest(f"{path} is an object: send a text or a list of text parts.", path)
    return item.output if isinstance(item.output, str) else _parts(item.output or [], path, reads)


def _thought(item: Item) -> str:
    """The reasoning's text, else what `opaque` made of it, else its summary. Another server's opaque text says nothing here."""
    if isinstance(item.content, str) or item.content:
        return item.content if isinstance(item.content, str) else "".join(part.text or "" for part in item.content)
    if item.encrypted_content:
        with suppress(ValueError):
            return base64.b64decode(item.encrypted_content, validate=True).decode()
    return "\n".join(part.text or "" for part in item.summary or ())


def _call(item: Item, arguments: str, path: str) -> dict[str, Any]:
    if item.name is None or item.call_id is None:
        raise InvalidRequest(f"{path} has no call_id or no name: a call needs both.", path)
    function = {"name": _full_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(parts: Sequence[Content], path: str) -> str:
    for place, part in enumerate(parts):
        if part.type not in _TEXTS + _REFUSALS:
            where = f"{path}[{place}].type"
            raise InvalidRequest(f"{where} is {part.type!r}: this model does not read it here, leave it out.", where)
    return "\n".join((part.refusal if part.type in _REFUSALS else part.text) or "" for part in parts)
