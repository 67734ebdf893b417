"""Bodies of OpenAI's Responses API as typed structs. `fields` decides about fields that are not named here."""

from __future__ import annotations

from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import StructuredOutputsParams
from vnext.server.context.openai_types import InputAudio


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an item's content, of any type. Other members change nothing here."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    input_audio: InputAudio | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of any type; without a type it is a message, or a reference if it has an id alone. `translation` checks the
    members of each type."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    status: str | None = None
    content: str | list[Content] | None = None
    summary: list[Content] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[Content] | dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        is_reference = self.id is not None and self.role is None and self.content is None
        return self.type or ("item_reference" if is_reference else "message")


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function, a custom tool, which takes a text, a namespace of such tools, or a tool that runs at OpenAI."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. The fields from `top_k` on are vLLM's."""

    input: str | list[Item] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_retention: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
