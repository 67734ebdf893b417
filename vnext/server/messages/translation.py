"""Translation: from a body of the Messages API to the ChatBody that asks for the same.

Owns what a block of each type means to a chat, and says to a model that reads text only: an image or a file that is no text
becomes a placeholder, because it stays in the client's history, and a refusal would end the session for good. What ran at
Anthropic is passed over. Tools that Anthropic's models know without a schema and that the client runs become functions; the date
at the end of such a tool's type is its version. Errors of the blocks name this API's fields; errors of the chat name the chat's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.conversation import TTLS_S, Breakpoint, CallPairs, needed
from vnext.server.context.errors import NO_THREADS, SCORING, Names, converted
from vnext.server.context.openai_types import ChatBody
from vnext.server.messages.blocks import own_id
from vnext.server.messages.bodies import Block, CacheControl, CountTokensBody, Message, MessagesBody, Tool

BILLING_HEADER = "x-anthropic-billing-header:"
"""A system block of Claude Code that differs from request to request: as a part of the prompt, it would defeat the prefix
cache."""
_NAMES = (
    SCORING,
    (r"tools(\[\d+\])\.function\.parameters", r"tools\1.input_schema"),
    (r"tools(\[\d+\])\.function(?=\.)", r"tools\1"),
    (r"continue_final_message is true, and the last message's", "The last message's"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"continue_final_message", "messages"),
    (r"stop(?= (?:has|holds|is)\b|$)", "stop_sequences"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _LINE, "description": "The first and the last line; -1 as the last is the end."}
PASSED_OVER = frozenset(
    "server_tool_use mcp_tool_use container_upload tool_reference web_search_tool_result web_fetch_tool_result "
    "code_execution_tool_result bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result "
    "mcp_tool_result mcp_tool_listing advisor_tool_result fallback".split()
)
"""Calls of tools that ran at Anthropic, and their results: what they say is in the words that followed."""
_PLACEHOLDERS = {
    "image": "[An image was here. This model reads text only.]",
    "document": "[A file was here. This model reads text only.]",
}


def blocks_of(content: str | Sequence[Block], path: str) -> Iterator[tuple[Block, str]]:
    """Each block that is not passed over, with its place."""
    assert not isinstance(content, str)
    for place, block in enumerate(content):
        if block.type not in PASSED_OVER:
            yield block, f"{path}.content[{place}]"


def text_of(block: Block, path: str) -> str:
    """A block's text. Raises InvalidRequest for a type that has none."""
    match block.type:
        case "text":
            if block.text is None:
                raise InvalidRequest(f"{path}.text is missing: it is required.", f"{path}.text")
            return block.text
        case "image":
            return _PLACEHOLDERS["image"]
        case "document":
            return _document(block, f"{path}.source")
        case "search_result":
            source = block.source if isinstance(block.source, str) else None
            return _titled(_content(block.content, path), block.title, source)
        case "compaction":
            return _content(block.content, path)
    raise InvalidRequest(f"{path}.type is {block.type!r}: this server reads text only here, leave it out.", f"{path}.type")


def result_of(block: Block, path: str) -> str:
    """A tool's result. Chat templates know no failed results: the text says so."""
    text = _content(block.content, path)
    return f"Error: {text}" if block.is_error else text


def _document(block: Block, path: str) -> str:
    """Of its own text, or a placeholder."""
    match block.source:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return _titled(text, block.title, block.context)
        case {"type": "content", "content": [*parts]}:
            texts = [part["text"] if _is_text(part) else _PLACEHOLDERS["image"] for part in parts]
            return _titled("\n".join(texts), block.title, block.context)
        case {"type": "base64" | "url" | "file"}:
            return _titled(_PLACEHOLDERS["document"], block.title, block.context)
    raise InvalidRequest(f"{path} is no document: its type must be 'text', 'content', 'base64', 'url' or 'file'.", path)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _titled(text: str, *heads: str | None) -> str:
    return "\n".join([*filter(None, heads), text])


def _content(content: str | list[Block] | dict[str, Any] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        raise InvalidRequest(f"{path}.content is an object: send a text or a list of blocks.", f"{path}.content")
    return "\n".join(text_of(each, where) for each, where in blocks_of(content, path))


def names_of(body: CountTokensBody) -> Names:
    """A chat's fields -> this API's."""
    format_ = _format_name(body)
    return [*_NAMES, (r"response_format\.json_schema\.schema", f"{format_}.schema"), (r"response_format", format_)]


def chat_body(body: CountTokensBody, reasons: bool, sees: bool = False) -> ChatBody:
    """The chat that `body` asks for; `reasons`: the model does; `sees`: it reads images. Raises InvalidRequest."""
    if body.thread:
        raise InvalidRequest("thread is not supported: send all messages in each request.", "thread", code=NO_THREADS)
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body, sees)}
    fields |= _tools(body) | _thinking(body, reasons) | _format(body)
    if isinstance(body, MessagesBody):
        fields |= _sampling(body)
    last = fields["messages"][-1] if fields["messages"] else {}
    if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
        fields["continue_final_message"] = True
    return converted(fields, ChatBody)


def check_calls(body: MessagesBody) -> None:
    """Raise InvalidRequest for a conversation whose calls and results are no pairs."""
    pairs = CallPairs()
    for place, message in enumerate(body.messages):
        blocks = [] if isinstance(message.content, str) else message.content
        for block, where in blocks_of(blocks, f"messages[{place}]"):
            if block.type == "tool_use" and block.id is not None:
                pairs.call(block.id, f"{where}.id")
            elif block.type == "tool_result":
                pairs.result(block.tool_use_id, f"{where}.tool_use_id")
    pairs.end()


def breakpoints_of(body: MessagesBody) -> list[Breakpoint]:
    """What of the conversation stays in the cache: that up to each message with a `cache_control`, tools and system being its
    beginning. Only those that no later one covers. Raises InvalidRequest."""
    system = 1 if _system(body.system) else 0
    found = [_breakpoint(system, tool.cache_control, f"tools[{place}]") for place, tool in enumerate(body.tools or ())]
    blocks = [] if isinstance(body.system, str) else body.system or []
    found += [_breakpoint(system, block.cache_control, f"system[{place}]") for place, block in enumerate(blocks)]
    for place, message in enumerate(body.messages):
        marked = [] if isinstance(message.content, str) else _marked(message.content, f"messages[{place}]")
        if marked:
            count = len(_messages(msgspec.structs.replace(body, messages=body.messages[: place + 1])))
            found += [_breakpoint(count, control, where) for control, where in marked]
    found.append(_breakpoint(len(_messages(body)), body.cache_control, ""))
    return needed([each for each in found if each is not None])


def _marked(content: Sequence[Block], path: str) -> list[tuple[CacheControl, str]]:
    """Every `cache_control` of a message's blocks, those in a tool's result too, with the place of its block."""
    found = []
    for block, where in blocks_of(content, path):
        found += [(block.cache_control, where)] if block.cache_control else []
        found += _marked(block.content, where) if isinstance(block.content, list) else []
    return found


def _breakpoint(messages: int, control: CacheControl | None, path: str) -> Breakpoint | None:
    if control is None:
        return None
    name = f"{path}.cache_control" if path else "cache_control"
    if control.type != "ephemeral":
        raise InvalidRequest(f"{name}.type is {control.type!r}: it must be 'ephemeral'.", f"{name}.type")
    if control.ttl is not None and control.ttl not in TTLS_S:
        raise InvalidRequest(f"{name}.ttl is {control.ttl!r}: it must be '5m' or '1h'.", f"{name}.ttl")
    return Breakpoint(messages, TTLS_S[control.ttl or "5m"])


def _sampling(body: MessagesBody) -> dict[str, Any]:
    return {
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
    }


def _thinking(body: CountTokensBody, reasons: bool) -> dict[str, Any]:
    """Without `thinking` an answer has no reasoning, as at Anthropic. A model that does not reason needs no budget."""
    effort = None if body.output_config is None else body.output_config.effort
    kind = "disabled" if body.thinking is None else body.thinking.type
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequest(f"thinking.type is {kind!r}: it must be 'enabled', 'adaptive' or 'disabled'.", "thinking.type")
    if kind == "disabled":
        return {"enable_thinking": False, "include_reasoning": False}
    is_shown = body.thinking is None or body.thinking.display != "omitted"
    budget = body.thinking.budget_tokens if body.thinking and reasons else None
    shown = {"enable_thinking": True, "include_reasoning": is_shown, "reasoning_effort": effort}
    return shown | {"thinking_token_budget": budget}


def _format(body: CountTokensBody) -> dict[str, Any]:
    asked = body.output_format if body.output_config is None else body.output_config.format or body.output_format
    if asked is None:
        return {}
    if asked.type != "json_schema" or asked.schema is None:
        name = _format_name(body)
        raise InvalidRequest(f"{name} must be {{'type': 'json_schema', 'schema': {{...}}}}.", name)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.schema}}}


def _format_name(body: CountTokensBody) -> str:
    return "output_config.format" if body.output_config and body.output_config.format else "output_format"


def _tools(body: CountTokensBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools)]
    if choice := body.tool_choice:
        if choice.type == "tool":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
        elif choice.type in _CHOICES:
            fields["tool_choice"] = _CHOICES[choice.type]
        else:
            raise InvalidRequest(
                f"tool_choice.type is {choice.type!r}: it must be 'auto', 'any', 'tool' or 'none'.", "tool_choice.type"
            )
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.type not in (None, "custom"):
        if (known := function_of(tool.type)) is None:
            reason = "answers with images" if tool.type.startswith("computer") else "runs at Anthropic"
            raise InvalidRequest(
                f"{path}.type is {tool.type!r}: such a tool {reason}, and this server reads text and runs none; leave it out (in "
                "Claude Code: deny the tool in permissions).",
                f"{path}.type",
            )
        function |= known
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _messages(body: CountTokensBody, sees: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if system := _system(body.system):
        found.append({"role": "system", "content": system})
    for place, message in enumerate(body.messages):
        path = f"messages[{place}]"
        if message.role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"{path}.role is {message.role!r}: it must be 'user' or 'assistant'.", f"{path}.role")
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        else:
            found += _assistant(message, path) if message.role == "assistant" else _user(message, path, sees)
    return found


def _system(system: str | list[Block] | None) -> str:
    texts = [system] if isinstance(system, str) else [text_of(each, f"system[{i}]") for i, each in enumerate(system or ())]
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _assistant(message: Message, path: str) -> list[dict[str, Any]]:
    """One message, however many blocks it has, none where all are passed over. Redacted thinking cannot be read: it is left
    out."""
    if message.content and not any(blocks_of(message.content, path)):
        return []
    texts, thoughts, calls = [], [], []
    for block, where in blocks_of(message.content, path):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(text_of(block, where))
    shown: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        shown["reasoning_content"] = "".join(thoughts)
    return [shown | ({"tool_calls": calls} if calls else {})]


def _call(block: Block, path: str) -> dict[str, Any]:
    if block.name is None or block.id is None:
        raise InvalidRequest(f"{path} has no id or no name: a tool_use block needs both.", path)
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {"id": own_id(block.id), "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _user(message: Message, path: str, sees: bool) -> list[dict[str, Any]]:
    """A message for each tool's result and for each run of texts, and of images that the model sees, between them."""
    found: list[dict[str, Any]] = []
    for block, where in blocks_of(message.content, path):
        if block.type == "tool_result":
            found.append({"role": "tool", "tool_call_id": own_id(block.tool_use_id or ""), "content": _result(block, where, sees)})
            continue
        if not found or found[-1]["role"] != message.role:
            found.append({"role": message.role, "content": []})
        is_seen = sees and block.type == "image"
        found[-1]["content"].append(_image(block, where) if is_seen else {"type": "text", "text": text_of(block, where)})
    for each in found:
        if isinstance(each["content"], list) and all(part["type"] == "text" for part in each["content"]):
            each["content"] = "\n".join(part["text"] for part in each["content"])
    return found or [{"role": message.role, "content": ""}]


def _result(block: Block, path: str, sees: bool) -> str | list[dict[str, Any]]:
    """A tool's result, with its images where the model sees them."""
    if not sees or not isinstance(block.content, list) or all(each.type != "image" for each in block.content):
        return result_of(block, path)
    found = [
        _image(each, where) if each.type == "image" else {"type": "text", "text": text_of(each, where)}
        for each, where in blocks_of(block.content, path)
    ]
    return [{"type": "text", "text": "Error:"}, *found] if block.is_error else found


def _image(block: Block, path: str) -> dict[str, Any]:
    match block.source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "url", "url": str(address)}:
            return {"type": "image_url", "image_url": {"url": address}}
    raise InvalidRequest(f"{path}.source is no image: its type must be 'base64' or 'url'.", f"{path}.source")


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _commands(*commands: str, **properties: Any) -> dict[str, Any]:
    return _object(("command",), command={"type": "string", "enum": [*commands]}, **properties)


_EDITED = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _LINE, "view_range": _RANGE}
_RENAMED = {"old_path": _TEXT, "new_path": _TEXT}
_BASH = "Runs a command in a shell that stays open between calls. restart: true starts it anew."
_EDIT = (
    "Shows and changes files. view: path, view_range. create: path, file_text. str_replace: path, old_str, which stands in the "
    "file once, new_str. insert: path, insert_line, the line after which {} goes."
)
_MEMORY = (
    "Keeps notes in files under /memories, which last from one conversation to the next. view: path, view_range. create: path, "
    "file_text. str_replace: path, old_str, new_str. insert: path, insert_line, insert_text. delete: path. "
    "rename: old_path, new_path."
)
_SCHEMAS = {
    "bash": (_BASH, _object((), command=_TEXT, restart={"type": "boolean"})),
    "text_editor": (
        _EDIT.format("insert_text"),
        _commands("view", "create", "str_replace", "insert", **_EDITED, insert_text=_TEXT),
    ),
    "memory": (
        _MEMORY,
        _commands("view", "create", "str_replace", "insert", "delete", "rename", **_EDITED, insert_text=_TEXT, **_RENAMED),
    ),
}
_WITH_UNDO = (
    _EDIT.format("new_str") + " undo_edit: path.",
    _commands("view", "create", "str_replace", "insert", "undo_edit", **_EDITED),
)
_LAST_WITH_UNDO = "20250124"


def function_of(kind: str) -> dict[str, Any] | None:
    """The description and the schema of a tool of this type, such as bash_20250124; None for one that no client runs here."""
    if (found := re.fullmatch(r"(bash|text_editor|memory)_(\d{8})", kind)) is None:
        return None
    name, version = found.groups()
    can_undo = name == "text_editor" and version <= _LAST_WITH_UNDO
    description, parameters = _WITH_UNDO if can_undo else _SCHEMAS[name]
    return {"description": description, "parameters": parameters}
