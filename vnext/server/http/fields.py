"""Fields: what each route with a body makes of every field that some route, here or elsewhere, has, and of those it does not
know.

A route accepts the fields of its struct. Of the others `verdict` refuses those that would change an answer, with what to send
instead, and passes those that change nothing: with an empty value (null, false, "", "none", "auto", an empty list or object) or
the usual one each passes. A field that looks misspelt is refused too. Any other field is meant for another program: it passes,
with a log line at the level debug. docs/fields.md shows the table.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest, UncheckedParams
from vnext.server.context.openai_types import ChatBody, CompletionBody, GenerationBody

NESTED = ("stream_options", "messages")
LIKENESS_MIN, WORD_LIKENESS_MIN, JOINED_LIKENESS_MIN = 0.8, 0.7, 0.9
CANDIDATES_MAX = 5
UNKNOWN_MAX = 64  # names in one body: each takes some ten microseconds
VALUE_BYTES_MAX = 64  # every value that changes nothing is shorter

log = logging.getLogger("vnext.server")
SPELLINGS = tuple(
    tuple(row.split())
    for row in (
        "max_tokens max_output_tokens options.num_predict max_completion_tokens max_new_tokens n_predict num_predict max_length",
        "min_tokens min_new_tokens",
        "stop stop_sequences options.stop",
        "repetition_penalty options.repeat_penalty repeat_penalty",
        *(f"{name} options.{name}" for name in "temperature top_p top_k min_p seed presence_penalty frequency_penalty".split()),
        "response_format text.format output_config.format format output_format "
        "structured_outputs guided_json guided_json_object json_schema",
        "structured_outputs.regex guided_regex regex",
        "structured_outputs.grammar guided_grammar grammar ebnf",
        "structured_outputs.choice guided_choice",
        "structured_outputs.whitespace_pattern guided_whitespace_pattern",
        "structured_outputs.structural_tag structural_tag",
        "logprobs top_logprobs",
        "reasoning_effort reasoning.effort output_config.effort think",
        "enable_thinking thinking.type think",
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
"""Names of one thing at several routes; some are other servers' only. `a.b` is a member of the field `a`. Of the names that a route
has, a client gets the first."""

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention cache_control "
    "prediction verbosity spaces_between_special_tokens media_io_kwargs mm_processor_kwargs kv_transfer_params "
    "speed models normalize normalized keep_alive truncate guided_decoding_backend "
    "context_management max_tool_calls inference_geo diagnostics betas billing_policy fallbacks "
    "fallback_credit_token access_programs user_profile_id workspace_id".split()
)
"""Documented fields of OpenAI's, Anthropic's, vLLM's and other servers' APIs that change no answer at a route without them. The
prefix cache finds shared beginnings itself, so `prompt_cache_key` says nothing that it needs."""
OF_ANSWERS = frozenset(
    {*GenerationBody.__struct_fields__} - {"model", "priority", "cache_salt", "request_id", "truncate_prompt_tokens"}
    | {"max_completion_tokens", "max_output_tokens", "stop_sequences", "logprobs", "top_logprobs", "best_of"}
)
"""How an answer is made from its prompt: they change nothing at a route that answers none, but counts tokens or embeds them."""
LENGTHS = ("max_tokens", "max_output_tokens", "think")
"""Each route that answers has one of them."""
_LEAVE, _AS_CHAT = "leave it out", "send it to /v1/chat/completions"
_CHAT, _COMPLETION = ({*kind.__struct_fields__} - {"model"} for kind in (ChatBody, CompletionBody))
REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys({name.partition(".")[0] for row in SPELLINGS for name in row} | _COMPLETION, _LEAVE)
    | dict.fromkeys(_CHAT & OF_ANSWERS, f"{_LEAVE}, or {_AS_CHAT}")
    | dict.fromkeys(_CHAT - _COMPLETION, _AS_CHAT)
    | dict.fromkeys(
        "prompt_embeds repetition_detection vllm_xargs mcp_servers container compaction audio web_search_options documents "
        "num_beams typical_p mirostat dry_multiplier xtc_probability no_repeat_ngram_size "
        "cfg_scale negative_prompt_ids moderation background image messages[].audio "
        "include truncation thread dimensions encoding_format pooling query return_documents return_token_strs text_1 text_2 "
        "tokens top_n template context images raw".split(),
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
"""Field that would change an answer, here or on the server it is meant for -> the remedy, at a route that has neither it nor
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
_NOTHING: tuple[object, ...] = (None, False, "", "none", "auto", [], {})


def verdict(name: str, fields: Collection[str]) -> str | None:
    """What to do instead of sending `name` to a route that has `fields`, not this one; "" where it changes nothing there, None
    where the table does not know it."""
    rows = (row for row in SPELLINGS if name != "options" and any(name in (each, _field(each)) for each in row))
    named = [next((each for each in row if _field(each) in fields), None) for row in rows]
    if known := [each for each in dict.fromkeys(named) if each is not None]:
        return f"send {' or '.join(known)}"
    if name in IGNORED or (name in OF_ANSWERS and not {*LENGTHS} & {*fields}):
        return ""
    return REFUSED.get(name)


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a field that a route lacks has the value that it has where it is left out."""
    usual = USUAL.get(name)
    return any(_same(value, each) for each in (usual, *_NOTHING)) and not (usual is True and value is False)


def _field(spelling: str) -> str:
    return spelling.partition(".")[0]


def _same(value: Any, other: Any) -> bool:
    """Whether both are equal and of one type: True is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def without_unknown(data: bytes | bytearray, kind: type[msgspec.Struct]) -> bytes:
    """The JSON object without the fields that are unknown to `kind` and the structs in it. Raises InvalidRequest for a
    refused field, DecodeError for invalid JSON."""
    judge = _Judge()
    known = judge.known(msgspec.Raw(data), kind, "")
    log.debug("passed over fields that mean nothing here: %s", judge)
    return bytes(known)


class _Judge:
    """One body's unknown fields. Mutable."""

    def __init__(self) -> None:
        self._passed: set[tuple[type[msgspec.Struct], str]] = set()

    def __str__(self) -> str:
        return ", ".join(sorted({ascii(name[:64]) for _, name in self._passed}))

    def known(self, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> msgspec.Raw:
        """The known fields of an object; the strict decoder refuses values that are no object."""
        if not bytes(raw).lstrip().startswith(b"{"):
            return raw
        kept = {}
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            if name not in kind.__struct_fields__:
                self._judge(kind, name, value, path)
            elif name in NESTED and (inner := _struct_in(kind, name)):
                kept[name] = self._inside(value, inner, f"{path}{name}")
            else:
                kept[name] = value
        return msgspec.Raw(msgspec.json.encode(kept))

    def _inside(self, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> msgspec.Raw:
        """A field's value: an object, or a list of them."""
        if not bytes(raw).lstrip().startswith(b"["):
            return self.known(raw, kind, f"{path}.")
        entries = msgspec.json.decode(raw, type=list[msgspec.Raw])
        known = [self.known(entry, kind, f"{path}[{place}].") for place, entry in enumerate(entries)]
        return msgspec.Raw(msgspec.json.encode(known))

    def _judge(self, kind: type[msgspec.Struct], name: str, raw: msgspec.Raw, path: str) -> None:
        if (kind, name) in self._passed:
            return
        if len(bytes(raw)) <= VALUE_BYTES_MAX and asks_for_nothing(name, msgspec.json.decode(raw)):
            return
        param, fields = f"{path}{name[:200]}", kind.__struct_fields__
        remedy = REFUSED.get(re.sub(r"\d+", "", param)) if path else verdict(name, fields)
        if remedy:
            raise InvalidRequest(f"{param} is not supported here: {remedy}.", param)
        if remedy is None and (meant := _meant(name, fields)):
            raise InvalidRequest(f"{param} is not a field of this request. Did you mean {meant}?", param)
        self._passed.add((kind, name))
        if len(self._passed) > UNKNOWN_MAX:
            raise InvalidRequest(f"The body has more than {UNKNOWN_MAX} fields that this server does not know: leave them out.")


def _meant(name: str, fields: Iterable[str]) -> str | None:
    """The field that `name` is a misspelling of, such as topP, max-tokens or temprature; None for none. A name with a word more,
    or another one, is another program's field: temperature_last, thread_id."""
    words = _words(name[:64])
    plain = {field.replace("_", ""): field for field in fields}
    close = difflib.get_close_matches("".join(words), plain, n=CANDIDATES_MAX, cutoff=LIKENESS_MIN)
    return next((plain[each] for each in close if _is_like(words, plain[each].split("_"))), None)


def _words(name: str) -> list[str]:
    """Its words in lower case, however they are separated."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower().strip("_").split("_")


def _is_like(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether both have the same words but for letters, or one has them without gaps."""
    one, other = "".join(words), "".join(others)
    if one == other:
        return True
    if len(words) != len(others):
        return len(words) == 1 and difflib.SequenceMatcher(None, one, other).ratio() >= JOINED_LIKENESS_MIN
    return all(difflib.SequenceMatcher(None, *pair).ratio() >= WORD_LIKENESS_MIN for pair in zip(words, others))


@cache
def _struct_in(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    """The struct that a field holds, alone or in a list."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    of_field = next(field.type for field in info.fields if field.name == name)
    inner = [getattr(each, "item_type", each) for each in getattr(of_field, "types", (of_field,))]
    return next((each.cls for each in inner if isinstance(each, msgspec.inspect.StructType)), None)
