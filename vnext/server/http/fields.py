"""Fields: decides by one table about fields of a body that its struct does not name.

A field with an empty value (null, false, "", "none", "auto", an empty list or object) always passes. A field that would
change an answer, but is not supported here, is refused with a sentence that states the remedy; so is a field that looks
misspelt. Any other field is meant for another program: it passes, with a log line at the level debug.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec

from vnext.sampling_params import InvalidRequest

_LEAVE = "leave it out"
_AS_MAX_TOKENS = "send it as max_tokens"
_ITSELF = "send its members themselves"
_AS_CHAT = "send it to /v1/chat/completions"
_AS_MESSAGE = "send it as a message"
_CONTINUE = "send continue_final_message beside the messages"

REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        "best_of prompt_embeds "
        "repetition_detection vllm_xargs "
        "mcp_servers container compaction suffix echo top_logprobs add_special_tokens "
        "audio web_search_options documents num_beams typical_p mirostat dry_multiplier xtc_probability "
        "no_repeat_ngram_size".split(),
        _LEAVE,
    )
    | dict.fromkeys(("max_new_tokens", "max_output_tokens", "n_predict", "num_predict", "max_length"), _AS_MAX_TOKENS)
    | dict.fromkeys(("extra_body", "options", "parameters", "sampling_params"), _ITSELF)
    | dict.fromkeys(("messages", "tools", "tool_choice", "enable_thinking", "thinking_token_budget"), _AS_CHAT)
    | dict.fromkeys(("regex", "ebnf", "grammar", "json_schema"), "send it in structured_outputs")
    | dict.fromkeys(("system", "instructions"), _AS_MESSAGE)
    | dict.fromkeys(("lora_request", "lora_path", "adapter"), "send the adapter's name as model")
    | dict.fromkeys(("messages[].audio", "moderation", "background"), _LEAVE)
    | dict.fromkeys(("messages[].prefix", "messages[].partial"), _CONTINUE)
    | {
        "conversation": "send previous_response_id, or its items as input",
        "thinking": "send it in chat_template_kwargs",
        "thinking_budget": "send it as thinking_token_budget",
        "min_new_tokens": "send it as min_tokens",
        "functions": "send them as tools",
        "function_call": "send it as tool_choice",
        "messages[].function_call": "send it as tool_calls",
        "prompt": "send it to /v1/completions",
        "input": "send it as prompt or as messages",
        "inputs": "send it as prompt or as messages",
        "chat_template": "start the server with --chat-template",
        "reasoning": "send reasoning_effort",
        "repeat_penalty": "send it as repetition_penalty",
        "stop_sequences": "send it as stop",
        "logits_processors": "the server runs no client's code; send logit_bias, allowed_token_ids or bad_words",
    }
)
"""Field that would change an answer, here or on the server it is meant for -> the remedy. A name in one API's struct applies
to the other APIs only: `echo` is refused in a chat."""
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prediction verbosity spaces_between_special_tokens media_io_kwargs mm_processor_kwargs kv_transfer_params "
    "speed models normalized".split()
)
"""Documented fields of OpenAI's, vLLM's and other servers' APIs that change no answer here. The prefix cache finds
shared beginnings itself, so `prompt_cache_key` says nothing that it needs."""
HARMLESS: Mapping[str, Any] = MappingProxyType(
    {
        "best_of": 1, "num_beams": 1, "typical_p": 1, "repeat_penalty": 1, "mirostat": 0, "dry_multiplier": 0, "xtc_probability": 0,
        "no_repeat_ngram_size": 0,
    }  # fmt: skip
)
"""Values of refused fields that change nothing, besides those of NOTHING."""
NOTHING = (None, False, "", "none", "auto", [], {})
NESTED = ("stream_options", "messages")
LIKENESS_MIN, WORD_LIKENESS_MIN, JOINED_LIKENESS_MIN = 0.8, 0.7, 0.9
CANDIDATES_MAX = 5
UNKNOWN_MAX = 64  # names in one body: each takes some ten microseconds
VALUE_BYTES_MAX = 64  # every value that changes nothing is shorter

log = logging.getLogger("vnext.server")


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
        if len(bytes(raw)) <= VALUE_BYTES_MAX:
            value = msgspec.json.decode(raw)
            if any(_same(value, nothing) for nothing in (*NOTHING, HARMLESS.get(name))):
                return
        param = f"{path}{name[:200]}"
        if remedy := REFUSED.get(re.sub(r"\d+", "", param)):
            raise InvalidRequest(f"{param} is not supported by this server: {remedy}.", param)
        if (kind, name) in self._passed:
            return
        if name not in IGNORED and (meant := _meant(name, kind.__struct_fields__)):
            raise InvalidRequest(f"{param} is not a field of this request. Did you mean {meant}?", param)
        self._passed.add((kind, name))
        if len(self._passed) > UNKNOWN_MAX:
            raise InvalidRequest(f"The body has more than {UNKNOWN_MAX} fields that this server does not know: leave them out.")


def _same(value: Any, other: Any) -> bool:
    """Whether both are equal and of one type: True is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _meant(name: str, fields: Iterable[str]) -> str | None:
    """The field that `name` is a misspelling of, such as topP, max-tokens or temprature; None for none. A name with a word more,
    or another one, is another program's field: temperature_last, thread_id."""
    words = _words(name[:64])
    plain = {field.replace("_", ""): field for field in fields}
    close = difflib.get_close_matches("".join(words), plain, n=CANDIDATES_MAX, cutoff=LIKENESS_MIN)
    return next((plain[each] for each in close if _is_like(words, plain[each].split("_"))), None)


def _words(name: str) -> list[str]:
    """Its words in lower case, however they are told apart."""
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
    of_field = next(field.type for field in msgspec.inspect.type_info(kind).fields if field.name == name)
    inner = [getattr(each, "item_type", each) for each in getattr(of_field, "types", (of_field,))]
    return next((each.cls for each in inner if isinstance(each, msgspec.inspect.StructType)), None)
