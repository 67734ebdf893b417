"""The table of fields: what each door (a route with a body) makes of every field that some door, here or elsewhere, has.

A door accepts the fields of its struct. Of the others `verdict` refuses those that would change an answer, with what to send
instead, and passes those that change nothing. docs/fields.md shows the table. Reads no body: `fields` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import UncheckedParams
from vnext.server.context.openai_types import ChatBody, CompletionBody, GenerationBody

SPELLINGS = tuple(
    tuple(row.split())
    for row in (
        "max_tokens max_output_tokens max_completion_tokens max_new_tokens n_predict num_predict max_length",
        "min_tokens min_new_tokens",
        "stop stop_sequences",
        "repetition_penalty repeat_penalty",
        "response_format text.format output_config.format output_format "
        "structured_outputs guided_json guided_json_object json_schema",
        "structured_outputs.regex regex",
        "structured_outputs.grammar grammar ebnf",
        "logprobs top_logprobs",
        "reasoning_effort reasoning.effort output_config.effort",
        "enable_thinking thinking.type",
        "thinking_token_budget thinking.budget_tokens thinking_budget",
        "include_reasoning thinking.display",
        "tools functions",
        "tool_choice function_call",
        "parallel_tool_calls tool_choice.disable_parallel_tool_use",
        "system instructions",
        "prompt input inputs",
        "messages input inputs",
        "previous_response_id conversation",
        "input conversation",
    )
)
"""Names of one thing at several doors; some are other servers' only. `a.b` is a member of the field `a`. Of the names that a door
has, a client is told the first."""

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention cache_control "
    "prediction verbosity spaces_between_special_tokens media_io_kwargs mm_processor_kwargs kv_transfer_params "
    "speed models normalize normalized guided_decoding_backend "
    "context_management max_tool_calls inference_geo diagnostics betas billing_policy fallbacks "
    "fallback_credit_token access_programs user_profile_id workspace_id".split()
)
"""Documented fields of OpenAI's, Anthropic's, vLLM's and other servers' APIs that change no answer at a door without them. The
prefix cache finds shared beginnings itself, so `prompt_cache_key` says nothing that it needs."""
OF_ANSWERS = frozenset(
    {*GenerationBody.__struct_fields__} - {"model", "priority", "cache_salt", "request_id", "truncate_prompt_tokens"}
    | {"max_completion_tokens", "max_output_tokens", "stop_sequences", "logprobs", "top_logprobs", "best_of"}
)
"""How an answer is made from its prompt: they change nothing at a door that answers none, but counts tokens or embeds them."""
_LEAVE, _AS_CHAT = "leave it out", "send it to /v1/chat/completions"
_CHAT, _COMPLETION = ({*kind.__struct_fields__} - {"model"} for kind in (ChatBody, CompletionBody))
REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys({name.partition(".")[0] for row in SPELLINGS for name in row} | _COMPLETION, _LEAVE)
    | dict.fromkeys(_CHAT & OF_ANSWERS, f"{_LEAVE}, or {_AS_CHAT}")
    | dict.fromkeys(_CHAT - _COMPLETION, _AS_CHAT)
    | dict.fromkeys(
        "prompt_embeds repetition_detection vllm_xargs mcp_servers container compaction audio web_search_options documents "
        "num_beams typical_p mirostat dry_multiplier xtc_probability no_repeat_ngram_size "
        "guidance_scale cfg_scale negative_prompt negative_prompt_ids moderation background image messages[].audio "
        "include truncation thread dimensions encoding_format pooling query return_documents return_token_strs text_1 text_2 "
        "tokens top_n".split(),
        _LEAVE,
    )
    | dict.fromkeys(("extra_body", "options", "parameters", "sampling_params"), "send its members themselves")
    | dict.fromkeys(("system", "instructions"), "send it as a message")
    | dict.fromkeys(("lora_request", "lora_path", "adapter"), "send the adapter's name as model")
    | dict.fromkeys(("messages[].prefix", "messages[].partial"), "send continue_final_message beside the messages")
    | {
        "previous_response_id": "send it to /v1/responses",
        "messages[].function_call": "send it as tool_calls",
        "prompt": "send it to /v1/completions",
        "request_id": "send it as the header X-Request-Id",
        "logits_processors": "the server runs no client's code, but a chat has logit_bias, allowed_token_ids and bad_words",
        "chat_template": "start the server with --chat-template",
    }
)
"""Field that would change an answer, here or on the server it is meant for -> the remedy, at a door that has neither it nor
another name for it."""
USUAL: Mapping[str, Any] = MappingProxyType(
    {field.name: field.default for field in msgspec.structs.fields(UncheckedParams) if field.name != "max_tokens"}
    | dict.fromkeys(("add_generation_prompt", "include_reasoning", "parallel_tool_calls"), True)
    | dict.fromkeys(("best_of", "num_beams", "beam_width", "length_penalty", "typical_p", "repeat_penalty", "guidance_scale"), 1)
    | dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "no_repeat_ngram_size"), 0)
    | {"encoding_format": "float", "truncation": "disabled", "modalities": ["text"]}
    | {"response_format": {"type": "text"}, "text": {"format": {"type": "text"}}}
)
"""What a field asks for where it is left out: with this value it changes nothing, wherever it is sent."""
_NOTHING = (None, False, "", "none", "auto", [], {})


def verdict(name: str, fields: Collection[str]) -> str | None:
    """What to do instead of sending `name` to a door that has `fields`, not this one; "" where it changes nothing there, None where
    the table does not know it."""
    rows = (row for row in SPELLINGS if any(name in (each, _field(each)) for each in row))
    named = [next((each for each in row if _field(each) in fields), None) for row in rows]
    if known := [each for each in dict.fromkeys(named) if each is not None]:
        return f"send {' or '.join(known)}"
    if name in IGNORED or (name in OF_ANSWERS and not {"max_tokens", "max_output_tokens"} & {*fields}):
        return ""
    return REFUSED.get(name)


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a field that a door lacks has the value that it has where it is left out."""
    usual = USUAL.get(name)
    return any(_same(value, each) for each in (usual, *_NOTHING)) and not (usual is True and value is False)


def _field(spelling: str) -> str:
    return spelling.partition(".")[0]


def _same(value: Any, other: Any) -> bool:
    """Whether both are equal and of one type: True is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
