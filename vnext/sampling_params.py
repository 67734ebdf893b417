"""Sampling parameters as a client writes them, and their way into the `Sampling` of an event.

Owns the public names (those of vLLM), their allowed ranges and one sentence for each that is broken. Used by the HTTP
edge and by the library. Knows nothing of HTTP; what only the edge acts on (stop strings, `n`, special tokens) stays
here and never reaches an event.
"""

from __future__ import annotations

import math

import msgspec

from vnext.state.params import LOGPROBS_MAX, NO_LOGPROBS, SEED_MAX, Sampling

CHOICES_MAX = 128
TEMPERATURE_MAX = 100.0
TEMPERATURE_GREEDY_BELOW = 1e-5  # dividing logits by less than this overflows; it is greedy in all but name
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0
PENALTY_MAX = 2.0
LOGIT_BIAS_MAX, LOGIT_BIAS_COUNT_MAX = 100.0, 1024
STOP_COUNT_MAX, STOP_CHARACTERS_MAX = 16, 1024
STOP_TOKEN_COUNT_MAX = 128
SEED_MIN = -(2**63)

_WORD = 2**64


class InvalidRequest(Exception):
    """A client's mistake. `message` is one sentence with the value and the allowed range, `param` the field's path."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers to one prompt are sampled and when they end.

    `n` answers a prompt; `temperature` 0 is greedy; `top_k` -1 or 0, `top_p` 1 and `min_p` 0 are off; `seed` None draws
    a fresh one; `logprobs` is the number of alternatives beside each token (None: nothing is reported); `max_tokens`
    None goes up to the model's length; `stop` is one string or several, the first to be completed ends the answer; no
    stop string is looked for in the first `min_tokens` tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple whatever way it was written."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What requests get that do not say otherwise, by the names of SamplingParams. None: as SamplingParams has it."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def sampling(self) -> dict[str, float]:
        """Those that are set, without the length of an answer, which is each API's own matter."""
        fields = msgspec.structs.asdict(self).items()
        return {name: value for name, value in fields if value is not None and name != "max_tokens"}


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for the first field of a wrong type or out of range. Token ids are below `vocab_size`."""
    _check_types(params)
    _check_range("n", params.n, 1, CHOICES_MAX)
    _check_range("temperature", params.temperature, 0, TEMPERATURE_MAX)
    if params.top_k < -1:
        raise InvalidRequest(f"top_k is {params.top_k}: it must be at least 1, or 0 or -1 to switch it off.", "top_k")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"top_p is {params.top_p}: it must be more than 0 and at most 1.", "top_p")
    _check_range("min_p", params.min_p, 0, 1)
    if params.seed is not None:
        _check_range("seed", params.seed, SEED_MIN, SEED_MAX)
    _check_penalties(params)
    _check_lengths(params)
    _check_tokens(params, vocab_size)
    _check_stops(params)


def to_sampling(
    params: SamplingParams, seed: int, prompt_length: int, model_length: int, usual_max_tokens: int | None = None
) -> Sampling:
    """The `Sampling` of one answer to a prompt of `prompt_length` tokens, for params that `validate` let pass.

    `seed` is the answer's own key (see `answer_seed`). `usual_max_tokens` bounds answers whose length was left open.
    Raises InvalidRequest when prompt and answer do not fit into `model_length` tokens together.
    """
    max_tokens = _tokens_allowed(params, prompt_length, model_length, usual_max_tokens)
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=0.0 if params.temperature < TEMPERATURE_GREEDY_BELOW else params.temperature,
        top_k=_top_k(params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=NO_LOGPROBS if params.logprobs is None else params.logprobs,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_token_ids=tuple(sorted(set(params.stop_token_ids))),
        ignore_eos=params.ignore_eos,
    )


def answer_seed(seed: int, index: int) -> int:
    """The uint64 key of answer `index`: the given seed for the first, and an unrelated one for every other.

    Distinct answers to one seed never share their noise: for a fixed seed the mixing is a bijection of `index`.
    """
    root = seed % _WORD
    return root if index == 0 else _mix((_mix(root) + index) % _WORD)


def _mix(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    word = (word + 0x9E3779B97F4A7C15) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return word ^ (word >> 31)


def _top_k(top_k: int) -> int:
    return max(0, min(top_k, 2**31 - 1))


def _tokens_allowed(params: SamplingParams, prompt_length: int, model_length: int, usual: int | None) -> int:
    room = model_length - prompt_length
    if room < 1:
        raise InvalidRequest(
            f"The prompt has {prompt_length} tokens, a request may have {model_length} with its answer: shorten it.",
            "prompt",
        )
    if params.max_tokens is None:
        return room if usual is None else min(room, usual)
    if params.max_tokens > room:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens} and the prompt has {prompt_length} tokens, together more than the "
            f"{model_length} that a request may have: ask for at most {room}.",
            "max_tokens",
        )
    return params.max_tokens


def _check_types(params: SamplingParams) -> None:
    try:
        msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        name = path.rpartition("`$.")[2].rstrip("`")
        raise InvalidRequest(f"{name} has a wrong type: {message[:1].lower()}{message[1:]}.", name) from error


def _check_range(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:  # false for a NaN too
        raise InvalidRequest(f"{name} is {value}: it must lie between {lowest} and {highest}.", name)


def _check_penalties(params: SamplingParams) -> None:
    _check_range(
        "repetition_penalty", params.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX
    )
    _check_range("presence_penalty", params.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    _check_range("frequency_penalty", params.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)


def _check_lengths(params: SamplingParams) -> None:
    if params.logprobs is not None:
        _check_range("logprobs", params.logprobs, 0, LOGPROBS_MAX)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens}: it must be at least 1.", "max_tokens")
    highest = math.inf if params.max_tokens is None else params.max_tokens
    if not 0 <= params.min_tokens <= highest:
        bound = "" if params.max_tokens is None else f" and at most max_tokens, which is {params.max_tokens}"
        raise InvalidRequest(f"min_tokens is {params.min_tokens}: it must be at least 0{bound}.", "min_tokens")


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
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


def _check_stops(params: SamplingParams) -> None:
    stops = params.stop_strings()
    _check_count("stop", len(stops), STOP_COUNT_MAX)
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise InvalidRequest(
                f"stop holds a string of {len(stop)} characters: each must have between 1 and {STOP_CHARACTERS_MAX}.",
                "stop",
            )


def _check_count(name: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise InvalidRequest(f"{name} has {count} entries: at most {count_max} are allowed.", name)


def _check_token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} names token {token}: token ids lie between 0 and {vocab_size - 1}.", name)
