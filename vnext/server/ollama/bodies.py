"""Bodies of Ollama's API as typed structs (github.com/ollama/ollama, docs/api.md). An answer is streamed unless `stream` is false.

`keep_alive` changes nothing: the launcher decides which models stay in memory. Of `options`, those that tune Ollama's own runner
(`num_ctx`, `num_gpu`, `num_thread`, ...) change nothing either.
"""

from __future__ import annotations

from typing import Any

import msgspec

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
    """`arguments` is an object, not its text."""

    name: str
    arguments: Object = {}


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


class OllamaEmbedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed. `truncate` is accepted: an input that is too long is refused by name whatever it says."""

    input: str | list[str]
    model: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class NamedBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show. `name` is the older field."""

    model: str | None = None
    name: str | None = None
