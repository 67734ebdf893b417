"""OpenAI types: the request bodies of OpenAI's API as typed structs, strict about names and types.

Owns the list of supported fields, some of them vLLM's; `fields` decides about all others. Answers nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from vnext.runtime.protocol.sampling_params import StructuredOutputsParams


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling fields of a body: those of UncheckedParams but `logprobs`, of which each API has its own. None stands for a
    field's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_n_sigma: float | None = None
    n: int | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    num_speculative_tokens: int | None = None
    prompt_cache_retention: str | None = None
    guidance_scale: float | None = None
    negative_prompt: str | list[int] | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema by OpenAI's names. It is kept whether `strict` or not; `name` and `description` are for other servers."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structures` and `triggers` belong to the type structural_tag, which is vLLM's."""

    type: str
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class GenerationBody(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share. None stands for a field's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is one text, one token list, or a list of either. `suffix` is what follows the answer."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


Given = int | float | bool | str | None


class ImageUrl(msgspec.Struct, frozen=True):
    """`detail` is not looked at: an image has as many tiles as the model's files say."""

    url: str
    fps: float | None = None


class InputAudio(msgspec.Struct, frozen=True):
    """`format` is not looked at: a file says itself what it is."""

    data: str
    format: str = "wav"
    fps: None = None

    @property
    def url(self) -> str:
        return f"data:audio/{self.format};base64,{self.data}"


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    video_url: ImageUrl | None = None
    audio_url: ImageUrl | None = None
    input_audio: InputAudio | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the text of a JSON object; of a history, whatever a client has made of it."""

    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def text(self) -> str:
        given = self.arguments or "{}"
        return given if isinstance(given, str) else msgspec.json.encode(given).decode()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`parameters` is a JSON schema, to which forced calls are held, and with `strict` those that the model
    chooses."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    function: Function


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    mm_processor_kwargs: dict[str, Given | dict[str, Given]] | None = None
    media_io_kwargs: dict[str, Given | dict[str, Given]] | None = None


class UsageShown(NamedTuple):
    """Where a stream shows usage: in an event of its own before the end, and so far in each chunk."""

    at_end: bool
    in_each: bool


NO_USAGE = UsageShown(False, False)


def usage_shown(body: GenerationBody) -> UsageShown:
    """What the stream options of a body ask for."""
    if (options := body.stream_options) is None or not options.include_usage:
        return NO_USAGE
    return UsageShown(True, bool(options.continuous_usage_stats))
