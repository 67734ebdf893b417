"""What clients send: the request bodies of OpenAI's API as typed structs, strict about names and types.

Owns which fields exist. Fields of that API that change nothing here are listed and ignored; what this engine cannot do
is listed too, so that `refuse_unsupported` says so by name; any other name is a client's mistake. Answers nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from vnext.sampling_params import InvalidRequest, SamplingParams
from vnext.server.errors import invalid_body

Ignored = msgspec.Raw
Unsupported = msgspec.Raw
_UNSET = msgspec.Raw()
_HARMLESS_VALUES = (None, False, "", "none", "auto", [], {})


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = _UNSET
    continuous_usage_stats: Ignored = _UNSET


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. None stands for a field's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: Ignored = _UNSET
    metadata: Ignored = _UNSET
    store: Ignored = _UNSET
    service_tier: Ignored = _UNSET
    safety_identifier: Ignored = _UNSET
    prompt_cache_key: Ignored = _UNSET
    prompt_cache_retention: Ignored = _UNSET
    prediction: Ignored = _UNSET
    verbosity: Ignored = _UNSET
    request_id: Ignored = _UNSET
    spaces_between_special_tokens: Ignored = _UNSET
    length_penalty: Ignored = _UNSET
    early_stopping: Ignored = _UNSET
    use_beam_search: Unsupported = _UNSET
    bad_words: Unsupported = _UNSET
    allowed_token_ids: Unsupported = _UNSET
    prompt_logprobs: Unsupported = _UNSET
    truncate_prompt_tokens: Unsupported = _UNSET
    structured_outputs: Unsupported = _UNSET
    guided_json: Unsupported = _UNSET
    guided_regex: Unsupported = _UNSET
    guided_choice: Unsupported = _UNSET
    guided_grammar: Unsupported = _UNSET
    logits_processors: Unsupported = _UNSET
    return_tokens_as_token_ids: Unsupported = _UNSET


UNSUPPORTED = tuple(
    "use_beam_search bad_words allowed_token_ids prompt_logprobs truncate_prompt_tokens structured_outputs guided_json "
    "guided_regex guided_choice guided_grammar logits_processors return_tokens_as_token_ids".split()
)
"""Of both APIs: what clients of other servers send, mostly with the value that asks for nothing."""


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is one text, one token list, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Unsupported = _UNSET
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`parameters` is a JSON schema, for the model to read: answers are not held to it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    function: Function


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Ignored = _UNSET
    annotations: Ignored = _UNSET
    reasoning: Ignored = _UNSET
    reasoning_content: Ignored = _UNSET
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Unsupported = _UNSET
    audio: Unsupported = _UNSET


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    functions: Unsupported = _UNSET
    function_call: Unsupported = _UNSET
    audio: Unsupported = _UNSET
    web_search_options: Unsupported = _UNSET
    echo: Unsupported = _UNSET
    add_special_tokens: Unsupported = _UNSET
    documents: Unsupported = _UNSET
    chat_template: Unsupported = _UNSET
    return_token_ids: Unsupported = _UNSET
    include_reasoning: Ignored = _UNSET


Body = TypeVar("Body", bound=msgspec.Struct)

_SHARED_FIELDS = tuple(set(GenerationBody.__struct_fields__) & set(SamplingParams.__struct_fields__))
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)


def decode_completion(data: bytes) -> CompletionBody:
    """Raises InvalidRequest with the field's path."""
    return decode_body(_completion_decoder, data, CompletionBody)


def decode_chat(data: bytes) -> ChatBody:
    """Raises InvalidRequest with the field's path."""
    return decode_body(_chat_decoder, data, ChatBody)


def sampling_params(body: GenerationBody, **defaults: Any) -> SamplingParams:
    """The shared sampling fields that are set, over `defaults`, over those of SamplingParams."""
    given = {name: value for name in _SHARED_FIELDS if (value := getattr(body, name)) is not None}
    return SamplingParams(**(defaults | given))


def include_usage(body: GenerationBody) -> bool:
    """Whether a stream ends with usage. Raises InvalidRequest for stream options without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")
    return bool(body.stream_options.include_usage)


def refuse_unsupported(body: msgspec.Struct, names: tuple[str, ...], path: str = "") -> None:
    """Raise InvalidRequest for the first of these fields that asks for something."""
    for name in names:
        raw = bytes(getattr(body, name))
        if raw and msgspec.json.decode(raw) not in _HARMLESS_VALUES:
            raise InvalidRequest(f"{path}{name} is not supported by this server: leave it out.", f"{path}{name}")


def decode_body(decoder: msgspec.json.Decoder[Body], data: bytes, kind: type[Body]) -> Body:
    """A body of that kind. Raises InvalidRequest with the field's path."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_body(error, kind.__struct_fields__) from error
