"""Translation: from a body of Ollama's API to the ChatBody or CompletionBody that asks for the same.

Calls and their results have no ids there: a result belongs to the first call of its tool's name that has none yet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.errors import SCORING, Names, converted
from vnext.server.context.identity import model_of
from vnext.server.context.openai_types import ChatBody, CompletionBody

_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
NAMES: Names = (
    SCORING,
    ("max_tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    (r"response_format\.json_schema\.schema", "format"),
    ("response_format", "format"),
    ("reasoning_effort", "think"),
    ("use /v1/completions", "send the text to /api/generate with raw"),
    (r"messages\[\d+\]\.content\[\d+\]\.image_url", "images"),
    *((name, f"options.{name}") for name in _SAME),
)
"""A chat's fields -> this API's."""
_DURATION = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)((ns|us|µs|ms|s|m|h)((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))*)?")
_OFF = {"typical_p": 1, "tfs_z": 1, "mirostat": 0}
PICTURE = "[An image was here. This model reads text only.]"
"""In its place, because it stays in the client's history, and a refusal would end the talk for good."""


def chat_body(body: OllamaChatBody, sees: bool = False) -> ChatBody:
    """`sees`: the model reads images. Raises InvalidRequest."""
    fields: dict[str, object] = {"messages": _messages(body.messages, sees), "tools": body.tools or None}
    return converted(_shared(body) | fields, ChatBody)


def generate_body(body: OllamaGenerateBody, sees: bool = False) -> ChatBody | CompletionBody:
    """A text to go on with where it is `raw` or has a suffix, else a chat of one message. `sees`: as for a chat. Raises
    InvalidRequest."""
    for name in ("template", "context"):
        if getattr(body, name):
            remedy = "send the text as it is with raw" if name == "template" else "send the conversation to /api/chat"
            raise InvalidRequest(f"{name} is not supported: {remedy}.", name)
    if body.raw or body.suffix:
        for name, remedy in (("system", "write it into the prompt"), ("images", "leave them out"), ("think", "leave it out")):
            if getattr(body, name):
                raise InvalidRequest(f"{name} does not go with raw or suffix: {remedy}.", name)
        body = replace(body, think=None)
        return converted(_shared(body) | {"prompt": body.prompt, "suffix": body.suffix}, CompletionBody)
    messages: list[dict[str, object]] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": _content(body.images or (), body.prompt, sees)})
    return converted(_shared(body) | {"messages": messages}, ChatBody)


def is_unload(body: AskedBody | LoadedBody) -> bool:
    """Whether `keep_alive` is 0: the client wants no model in memory. Raises InvalidRequest unless it is seconds, or a duration in
    Go's words."""
    given = body.keep_alive
    if isinstance(given, str) and not _DURATION.fullmatch(given):
        raise InvalidRequest(f"keep_alive is {given[:60]!r}: it must be seconds, or a duration such as '5m'.", "keep_alive")
    return not re.search(r"[1-9]", str(given)) and given is not None


def _shared(body: AskedBody) -> dict[str, object]:
    is_unload(body)  # checks the field
    fields: dict[str, object] = {"model": model_of(body.model), "stream": body.stream} | _sampling(body.options or Options())
    if isinstance(body.think, bool):
        fields["enable_thinking"] = body.think
    elif body.think:
        fields["reasoning_effort"] = body.think
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise InvalidRequest(f"format is {body.format[:60]!r}: it must be 'json' or a schema.", "format")
    return fields


def _sampling(options: Options) -> dict[str, object]:
    for name, off in _OFF.items():
        if (value := getattr(options, name)) not in (None, off):
            raise InvalidRequest(f"options.{name} is {value}: this server samples without it, leave it out.", f"options.{name}")
    fields = {name: getattr(options, name) for name in _SAME}
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = options.num_predict
    return fields | {"repetition_penalty": options.repeat_penalty}


def _content(images: Sequence[str], text: str, sees: bool) -> str | list[dict[str, object]]:
    """A message's content: its images, as base64, before its text."""
    if not sees or not images:
        return "\n".join([*[PICTURE] * len(images), text])
    parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": f"data:;base64,{each}"}} for each in images]
    return [*parts, {"type": "text", "text": text}]


def _messages(messages: Sequence[OllamaMessage], sees: bool) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    open_calls: list[tuple[str, str]] = []  # (name, id) of calls without a result
    for place, message in enumerate(messages):
        content = _content(message.images or (), message.content or "", sees)
        shown: dict[str, object] = {"role": message.role, "content": content}
        if message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call-{place}-{number}" for number, call in enumerate(message.tool_calls)]
            open_calls += [(call.function.name, id_) for call, id_ in zip(message.tool_calls, ids)]
            shown["tool_calls"] = [_call(call.function, id_) for call, id_ in zip(message.tool_calls, ids)]
        if message.role == "tool":
            shown["tool_call_id"] = message.tool_call_id or _answered(open_calls, message.tool_name)
        found.append(shown)
    return found


def _call(function: CalledFunction, id_: str) -> dict[str, object]:
    return {"id": id_, "function": {"name": function.name, "arguments": function.arguments}}


def _answered(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """The id of the call that a result answers, which is taken from `open_calls`; "" where there is none."""
    for call in open_calls:
        if name in (None, call[0]):
            open_calls.remove(call)
            return call[1]
    return ""


# ---- bodies --------------------------------------------------------------------------------------------------------
# Bodies of Ollama's API as typed structs (github.com/ollama/ollama, docs/api.md). An answer is streamed unless `stream` is
# false.
# `keep_alive` is checked and changes nothing: the launcher decides which models stay in memory. Of `options`, those that tune
# Ollama's own runner (`num_ctx`, `num_gpu`, `num_thread`, ...) change nothing either.

Object = dict[str, Any]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. `num_predict`: at most so many, below 0 without a limit."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is an object; its text, which other APIs send, is read too."""

    name: str
    arguments: Object | str | None = None


class Called(msgspec.Struct, frozen=True, kw_only=True):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_name`: of a tool's result, in place of the call's id."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class AskedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both routes. `format`: "json" or a schema. `think`: whether the model reasons, or "low", "medium", "high"."""

    model: str | None = None
    stream: bool = True
    format: str | Object | None = None
    think: bool | str | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class OllamaChatBody(AskedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] = []
    tools: list[Object] | None = None


class OllamaGenerateBody(AskedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate. `raw`: the prompt is the whole text, without a template. `suffix`: what follows the answer."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    template: str | None = None
    context: list[int] | None = None


class LoadedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both routes of vectors, which change nothing but the model's name."""

    model: str | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class OllamaEmbedBody(LoadedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed. `truncate` is accepted: an input that is too long is refused by name whatever it says."""

    input: str | list[str] = []
    dimensions: int | None = None
    truncate: bool | None = None


class OllamaEmbeddingsBody(LoadedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, the older route."""

    prompt: str = ""


class NamedBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show. `name` is the older field."""

    model: str | None = None
    name: str | None = None
