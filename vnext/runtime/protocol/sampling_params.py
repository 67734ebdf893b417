"""Sampling parameters as a client writes them, and their translation into the `Sampling` of an event.

Owns the public names (those of vLLM), their allowed ranges and one error sentence for each range. The API server and the
library use it. Knows nothing of HTTP. Parameters that only the API server and the library act on (stop strings, `n`, special
tokens) never reach an event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from vnext.base.spelling import Suggesting, close_to
from vnext.state.events import pack_tokens
from vnext.state.params import (
    ALL_TOKENS,
    ENGINE_DRAFTS,
    LOGPROBS_MAX,
    NO_LOGPROBS,
    PARAMETERS as PARAMETERS,  # with the table of what it reads
    SEED_MAX,
    SPECULATIVE_TOKENS_MAX,
    TOKEN_ID_MAX,
    Constraint,
    Drawn,
    Guidance,
    Sampling,
)

CHOICES_MAX = 128
LOGIT_BIAS_MAX, LOGIT_BIAS_COUNT_MAX = 100.0, 1024
STOP_COUNT_MAX, STOP_CHARACTERS_MAX, STOPS_CHARACTERS_MAX = 256, 1024, 2**14  # each token's text is compared with all of them
STOP_TOKEN_COUNT_MAX = 128
ALLOWED_COUNT_MAX = 4_096
BAD_WORD_COUNT_MAX, BAD_WORD_CHARACTERS_MAX = 128, 256
SEED_MIN = -(2**63)
GUIDANCE_MAX = 100.0
BEAM_WIDTH_MAX = LOGPROBS_MAX // 2  # a beam needs twice as many candidates, see vnext/text/beams.py
LENGTH_PENALTY_MAX = 10.0

RETENTIONS_S = {"in_memory": 0, "in-memory": 0, "5m": 300, "1h": 3_600, "24h": 86_400}
"""The words of `prompt_cache_retention`, OpenAI's and those of Anthropic's `ttl`; 0 is the cache as it is."""

_WORD = 2**64
Struct = TypeVar("Struct", bound=msgspec.Struct)


class InvalidRequest(ValueError):
    """A client's mistake. `message` is one sentence with the value and the allowed range, `param` is the field's path, and
    `code` is the word that OpenAI's API gives programs, where it has one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextExceeded(InvalidRequest):
    """Too many tokens: `count` of them, or at least as many, where `most` are possible."""

    count, most = 0, 0


def kind_of(value: Any) -> str:
    """What a value is, for a sentence."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def as_struct(kind: type[Struct], value: Struct | Mapping[str, Any], name: str) -> Struct:
    """The struct, also from a dictionary of its fields. Raises InvalidRequest."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {kind_of(value)}: give {kind.__name__}(...) or a dictionary of its fields.", name)
    fields = kind.__struct_fields__
    for key in value:
        if key not in fields:
            close = close_to(str(key), fields)
            remedy = f"did you mean {close}?" if close else f"its fields are {', '.join(fields)}."
            raise InvalidRequest(f"{name} has {key!r}, which {kind.__name__} does not know: {remedy}", name)
    try:
        return kind(**value)
    except TypeError as error:  # a required field is missing
        raise InvalidRequest(f"{name} cannot be {kind.__name__}: {str(error)[:1].lower()}{str(error)[1:]}.", name) from error


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=Suggesting
):
    """What an answer must look like; exactly one of the first six is set. The names are vLLM's.

    `json` is a JSON schema, `json_object` asks for any JSON object, `regex` matches the whole answer, `choice` lists the
    answers to choose from, `grammar` is Lark as llguidance reads it, or GBNF, and `structural_tag` constrains what follows a
    trigger within free text. The other fields control how JSON is written: with no whitespace between values, with whitespace
    of this pattern, and without names that the schema does not list.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    """Accepted and without effect: there is one backend."""


class UncheckedParams(Drawn, frozen=True, kw_only=True):
    """The fields of SamplingParams as a decoder has read them, for `validate_ranges`."""

    n: int = 1
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    structured_outputs: StructuredOutputsParams | None = None
    num_speculative_tokens: int | None = None
    prompt_cache_retention: str | None = None
    guidance_scale: float = 1.0
    negative_prompt: str | list[int] | None = None

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM` has: all of the answers so far, what is new since the output before, or the whole answers at
    the end, in one output. The names are vLLM's."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(UncheckedParams, frozen=True, kw_only=True, metaclass=Suggesting):
    """How the answers to one prompt are sampled and when they end.

    The table in `vnext.state.params.Drawn` explains the sampling numbers; `temperature` 0 is greedy, and the defaults of the
    others switch them off. `n` is the number of answers to a prompt; `seed` None draws a fresh seed; `logprobs` is the number
    of alternatives beside each token (None reports nothing), `prompt_logprobs` that beside each token of the prompt;
    `max_tokens` None allows the model's length, 0 only scores the prompt; `stop` is one string or several, and the first
    that is completed ends the answer; the first `min_tokens` tokens are not searched for stop strings.
    `allowed_token_ids` are the only tokens of an answer (None for all; without an end token among them it has
    the full length). `bad_words` are texts that an answer never completes, as the tokenizer writes them at its beginning and
    after a space (vnext/text/tokenizer.py). `structured_outputs` holds the answer to a schema or
    grammar. `num_speculative_tokens` bounds the request's drafts in a step and 0 forbids them; None is the engine's own number.
    Drafts change no answer (docs/drafts.md). `prompt_cache_retention` pins prompt and answer in the cache for "5m", "1h" or "24h"
    (docs/retention.md); "in_memory", "" and None pin nothing. A `guidance_scale` other than 1 keeps answers away from what follows
    `negative_prompt`, a text or tokens (None: the prompt's last token). `output_kind` is for `AsyncLLM`; `generate` has whole ones.

    They are checked as they are made, but for what depends on the model: its vocabulary and length. A dictionary serves as
    `structured_outputs`. Raises InvalidRequest, a ValueError, for the first field of a wrong type or out of range.
    """

    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        given: object = self.output_kind  # nothing judges what a program passes
        if not isinstance(given, RequestOutputKind):
            names = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise InvalidRequest(f"output_kind is {given!r}: it must be one of {names}.", "output_kind")
        shape: object = self.structured_outputs
        if isinstance(shape, Mapping):
            made = as_struct(StructuredOutputsParams, shape, "structured_outputs")
            msgspec.structs.force_setattr(self, "structured_outputs", made)
        validate(self, TOKEN_ID_MAX + 1)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=Suggesting):
    """How the likeliest answers to one prompt are searched (vnext/text/beams.py). `beam_width` answers are kept at each step;
    a `length_penalty` above 1 favours long ones. `temperature` is vLLM's and changes nothing: nothing is drawn. Raises
    InvalidRequest for the first field of a wrong type or out of range."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        validate_beams(self)


_drawn = attrgetter(*PARAMETERS)
_STORED = tuple(
    (name, each.least, *((0, TOKEN_ID_MAX) if each.dtype == "int64" else (0.0, math.inf))) for name, each in PARAMETERS.items()
)
"""How an event stores a parameter's value: (name, the least value, the zero for those below, the largest)."""
IN_CHECKPOINT = tuple(name for name, each in PARAMETERS.items() if each.in_checkpoint)


_FromCheckpoint = msgspec.defstruct("_FromCheckpoint", [(name, float | None, None) for name in IN_CHECKPOINT])


class SamplingDefaults(_FromCheckpoint, frozen=True, kw_only=True):  # type: ignore[valid-type,misc,call-arg]  # of the table
    """The defaults of requests that leave a parameter unset, by the names of SamplingParams. None keeps SamplingParams' own.
    `suppressed` are tokens that no transcript of a sound has, `suppressed_first` those that none begins with, `latest_first` the
    latest time that one with times begins with, in steps of 20 ms."""

    max_tokens: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    latest_first: tuple[int, ...] = ()

    def sampling(self) -> dict[str, float]:
        """The defaults that are set, without the answer's length, which each API handles itself."""
        return {name: value for name in IN_CHECKPOINT if (value := getattr(self, name)) is not None}


def validate(params: UncheckedParams, vocab_size: int) -> None:
    """Raise InvalidRequest for the first field of a wrong type or out of range. Token ids are below `vocab_size`."""
    _check_types(params)
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        _check_types(params.structured_outputs)
    validate_ranges(params, vocab_size)


def validate_ranges(params: UncheckedParams, vocab_size: int) -> None:
    """`validate` for params whose types a decoder has checked."""
    if not 1 <= params.n <= CHOICES_MAX:
        _check_range("n", params.n, 1, CHOICES_MAX)
    for (name, each), value in zip(PARAMETERS.items(), _drawn(params)):
        if not each.low <= value <= each.high:
            _check_range(name, value, each.low, each.high, each.rule)
    if params.seed is not None:
        _check_range("seed", params.seed, SEED_MIN, SEED_MAX)
    if params.num_speculative_tokens is not None:
        _check_range("num_speculative_tokens", params.num_speculative_tokens, 0, SPECULATIVE_TOKENS_MAX)
    if params.prompt_cache_retention and params.prompt_cache_retention not in RETENTIONS_S:
        raise InvalidRequest(
            f"prompt_cache_retention is {params.prompt_cache_retention!r}: it must be 'in_memory', '5m', '1h' or '24h'.",
            "prompt_cache_retention",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None:
            _check_range(name, count, 0, LOGPROBS_MAX)
    least = 1 if params.prompt_logprobs is None else 0
    if params.max_tokens is not None and params.max_tokens < least:
        only = ", or 0 with prompt_logprobs, to score a prompt only" if params.max_tokens == 0 else ""
        raise InvalidRequest(f"max_tokens is {params.max_tokens}: it must be at least {least}{only}.", "max_tokens")
    highest = math.inf if params.max_tokens is None else params.max_tokens
    if not 0 <= params.min_tokens <= highest:
        bound = "" if params.max_tokens is None else f" and at most max_tokens, which is {params.max_tokens}"
        raise InvalidRequest(f"min_tokens is {params.min_tokens}: it must be at least 0{bound}.", "min_tokens")
    if params.guidance_scale != 1.0:
        _check_range("guidance_scale", params.guidance_scale, 0, GUIDANCE_MAX)
    elif params.negative_prompt is not None:
        raise InvalidRequest("negative_prompt is only allowed with a guidance_scale other than 1.", "negative_prompt")
    if params.logit_bias or params.stop_token_ids or params.allowed_token_ids is not None:
        _check_tokens(params, vocab_size)
    if params.stop != []:
        _check_stops(params)
    if params.bad_words:
        _check_bad_words(params)


def validate_beams(params: BeamSearchParams) -> None:
    """Raise InvalidRequest for the first field out of range."""
    _check_range("beam_width", params.beam_width, 1, BEAM_WIDTH_MAX)
    _check_range("max_tokens", params.max_tokens, 1, math.inf, "be at least 1")
    _check_range("length_penalty", params.length_penalty, -LENGTH_PENALTY_MAX, LENGTH_PENALTY_MAX)


def to_sampling(
    params: UncheckedParams,
    seed: int,
    prompt_length: int,
    model_length: int,
    usual_max_tokens: int | None = None,
    constraint: Constraint | None = None,
) -> Sampling:
    """The `Sampling` of one answer to a prompt of `prompt_length` tokens, from params that have passed `validate`.

    `seed` is the answer's own key (see `answer_seed`). `usual_max_tokens` bounds answers whose `max_tokens` is unset.
    Raises InvalidRequest when prompt and answer together do not fit into `model_length` tokens.
    """
    room, wanted = model_length - prompt_length, max(params.max_tokens or 1, 1)
    if wanted > room:
        asked = f"you requested {prompt_length + wanted} tokens ({prompt_length} in the prompt, {wanted} in the completion)"
        param, count = ("prompt", prompt_length) if room < 1 else ("max_tokens", 0)
        raise context_exceeded(model_length, asked, "prompt or completion", param, count)
    if params.max_tokens is None:
        wanted = room if usual_max_tokens is None else max(min(room, usual_max_tokens), 1)
    return Sampling(
        seed=seed,
        max_tokens=wanted,
        **{
            name: zero if value < least else min(value, most)
            for (name, least, zero, most), value in zip(_STORED, _drawn(params))
        },
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=NO_LOGPROBS if params.logprobs is None else params.logprobs,
        min_tokens=min(params.min_tokens, wanted),
        stop_token_ids=tuple(sorted(set(params.stop_token_ids))),
        ignore_eos=params.ignore_eos,
        constraint=constraint,
        prompt_logprobs=NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs,
        num_speculative_tokens=ENGINE_DRAFTS if params.num_speculative_tokens is None else params.num_speculative_tokens,
        retention=((ALL_TOKENS, seconds),) if (seconds := RETENTIONS_S.get(params.prompt_cache_retention or "", 0)) else (),
    )


def guided(sampling: Sampling, params: UncheckedParams, prompt: bytes, negative: Sequence[int]) -> tuple[bytes, Sampling]:
    """The tokens of a request with the guidance of `params`, whose scale is not 1, and its `sampling`. `negative` are those of the
    negative prompt; the longer of the two prompts are the request's."""
    tokens, beside = sorted((prompt, other := pack_tokens([*negative])), key=len, reverse=True)
    guidance = Guidance(scale=float(params.guidance_scale), beside=beside, is_prompt=len(other) > len(prompt))
    return tokens, msgspec.structs.replace(sampling, guidance=guidance)


def restricted(sampling: Sampling, params: UncheckedParams, banned: tuple[tuple[int, ...], ...]) -> Sampling:
    """`sampling` with the lists of `params` in its constraint; `banned` are the tokens of its bad words."""
    if params.allowed_token_ids is None and not banned:
        return sampling
    allowed = tuple(sorted(set(params.allowed_token_ids or ())))
    constraint = msgspec.structs.replace(sampling.constraint or Constraint(), allowed=allowed, banned=banned)
    return msgspec.structs.replace(sampling, constraint=constraint)


def context_exceeded(model_length: int, asked: str, what: str, param: str, count: int = 0) -> ContextExceeded:
    """The error for a request with too many tokens, in OpenAI's words and with its code: clients look for both and then
    shorten `what`. `count`: the prompt's tokens, or at least as many; 0 where they are not what is too many."""
    error = ContextExceeded(
        f"This model's maximum context length is {model_length} tokens. However, {asked}. Please reduce the length of the {what}.",
        param,
        "context_length_exceeded",
    )
    error.count, error.most = count, model_length - 1  # an answer has a token
    return error


def answer_seed(seed: int, index: int) -> int:
    """The uint64 key of answer `index`: the given seed for the first answer, an unrelated key for every other.

    Answers of one seed never share their noise: for a fixed seed, the mixing is a bijection of `index`.
    """
    root = seed % _WORD
    return root if index == 0 else _mix((_mix(root) + index) % _WORD)


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    word = (word + 0x9E3779B97F4A7C15) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return word ^ (word >> 31)


@cache
def _plain_twin(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct of the same fields that checks only their types."""
    return msgspec.defstruct(kind.__name__, [(field.name, field.type) for field in msgspec.structs.fields(kind)])


def _check_types(params: msgspec.Struct) -> None:
    try:
        fields = msgspec.structs.asdict(params).items()
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in fields}
        msgspec.convert(plain, _plain_twin(type(params)))
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        name = path.rpartition("`$.")[2].rstrip("`")
        raise InvalidRequest(f"{name} has a wrong type: {message[:1].lower()}{message[1:]}.", name) from error


def _check_range(name: str, value: float, lowest: float, highest: float, rule: str = "") -> None:
    if not lowest <= value <= highest:  # false for a NaN too
        raise InvalidRequest(f"{name} is {value}: it must {rule or f'lie between {lowest} and {highest}'}.", name)


def _check_tokens(params: UncheckedParams, vocab_size: int) -> None:
    _check_count("logit_bias", len(params.logit_bias), LOGIT_BIAS_COUNT_MAX)
    for token, bias in params.logit_bias.items():
        _check_token("logit_bias", token, vocab_size)
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            raise InvalidRequest(
                f"logit_bias of token {token} is {bias}: it must lie between {-LOGIT_BIAS_MAX} and {LOGIT_BIAS_MAX}.",
                "logit_bias",
            )
    _check_count("stop_token_ids", len(params.stop_token_ids), STOP_TOKEN_COUNT_MAX)
    for token in params.stop_token_ids:
        _check_token("stop_token_ids", token, vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: name at least one token, or leave it out.", "allowed_token_ids")
        _check_count("allowed_token_ids", len(params.allowed_token_ids), ALLOWED_COUNT_MAX)
        for token in params.allowed_token_ids:
            _check_token("allowed_token_ids", token, vocab_size)


def _check_stops(params: UncheckedParams) -> None:
    stops = params.stop_strings()
    _check_count("stop", len(stops), STOP_COUNT_MAX)
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise InvalidRequest(
                f"stop holds a string of {len(stop)} characters: each must have between 1 and {STOP_CHARACTERS_MAX}.",
                "stop",
            )
    if (total := sum(map(len, stops))) > STOPS_CHARACTERS_MAX:
        raise InvalidRequest(f"stop has {total} characters: at most {STOPS_CHARACTERS_MAX} are allowed together.", "stop")


def _check_bad_words(params: UncheckedParams) -> None:
    _check_count("bad_words", len(params.bad_words), BAD_WORD_COUNT_MAX)
    for word in params.bad_words:
        if not word.strip() or len(word) > BAD_WORD_CHARACTERS_MAX:
            bounds = f"each must have between 1 and {BAD_WORD_CHARACTERS_MAX}, not only blanks"
            raise InvalidRequest(f"bad_words holds a text of {len(word)} characters: {bounds}.", "bad_words")


def _check_count(name: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise InvalidRequest(f"{name} has {count} entries: at most {count_max} are allowed.", name)


def _check_token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} names token {token}: token ids lie between 0 and {vocab_size - 1}.", name)
