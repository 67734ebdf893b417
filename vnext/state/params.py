"""Sampling: everything that turns one request's logits into tokens, in the form that an event stores.

Owns the table of sampling parameters, `Drawn`. Five things derive from it: the parameters of a request
(vnext/runtime/protocol/sampling_params.py), the bodies of the API, the defaults of a checkpoint, the columns of a batch and the
arguments of the kernels. Knows nothing of texts: the server handles stop strings and `n`. It sends one request for each
of the n answers and aborts a request whose text has reached a stop string.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

TOKEN_ID_MAX = 2**31 - 1
SEED_MAX = 2**64 - 1
LOGPROBS_MAX = 20
WEIGHT_MAX = 100  # of a client, in turns
RETENTION_MAX_S = 2**31 - 1
ALL_TOKENS = 2**31 - 1
"""The tokens of a retention that keeps a whole request."""
NO_LOGPROBS = -1
ENGINE_DRAFTS = -1
SPECULATIVE_TOKENS_MAX = 64
"""The most drafts of a request in a step: a commit counts them in a byte, and more never pay."""
POOLINGS = ("", "last", "mean", "cls", "max")
"""How the last hidden states of a prompt become an embedding: not at all, that of the last token, their mean, that of the
first token, the largest of each number."""
NO_POOLING, LAST, MEAN, CLS, MAX = range(5)


class Parameter(NamedTuple):
    """One number that controls how a request is sampled. Its default switches a filter or a penalty off.

    `role`: "scale" is the temperature, a "filter" drops tokens, a "penalty" changes logits. `low` and `high` bound the
    values that a client may ask for; `rule` states the bounds where "lie between" does not fit. Values below `least` are
    stored as 0. `dtype` is that of the batch's column. `tried` is a common value that switches the parameter on.
    `in_checkpoint`: generation_config.json may set it.
    """

    role: Literal["scale", "filter", "penalty"]
    low: float
    high: float
    tried: float
    rule: str = ""
    least: float = float("-inf")
    dtype: Literal["float32", "int64"] = "float32"
    in_checkpoint: bool = False


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """The table of sampling parameters, one per line. A filter is a lower bound on a token's weight
    (vnext/sampling/weights.py).
    """

    temperature: Annotated[float, Parameter("scale", 0, 100.0, 1.0, least=1e-5, in_checkpoint=True)] = 1.0
    """0 is greedy. Dividing logits by less than `least` overflows, and such a temperature is greedy in all but name."""
    top_k: Annotated[
        int, Parameter("filter", -1, float("inf"), 50, "be at least 1, or 0 or -1 to switch it off", 1, "int64", True)
    ] = 0
    top_p: Annotated[float, Parameter("filter", 5e-324, 1, 0.9, "be more than 0 and at most 1", in_checkpoint=True)] = 1.0
    min_p: Annotated[float, Parameter("filter", 0, 1, 0.05, in_checkpoint=True)] = 0.0
    repetition_penalty: Annotated[float, Parameter("penalty", 0.01, 100.0, 1.1, in_checkpoint=True)] = 1.0
    presence_penalty: Annotated[float, Parameter("penalty", -2.0, 2.0, 0.5)] = 0.0
    frequency_penalty: Annotated[float, Parameter("penalty", -2.0, 2.0, 0.5)] = 0.0
    top_n_sigma: Annotated[float, Parameter("filter", -1, 100, 1.0, least=5e-324)] = 0.0
    """From llama.cpp: drops tokens whose logit is more than this many standard deviations below the largest logit."""


GRAMMAR_ROW_MAX = 1_100
"""Items that a grammar may have at one position: llguidance's work for a position grows with more than their square, and each
rank does it. A request that needs more ends with an error. 1,024 tools and objects of 270 optional properties need fewer."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What an answer may consist of. Every rank folds it over the request's tokens; the scheduler never reads it.

    `grammar` is the text of a serialised llguidance grammar, "" for none. `reasoning_end` are the tokens that end the
    model's reasoning; the grammar begins after them, or at once where there are none. `reasoning_begin` are the tokens that
    begin it: an answer that begins otherwise has none, and keeps to the grammar from its first token; () where the prompt has
    begun it. After `reasoning_max` tokens of reasoning, its beginning included, `reasoning_end` is the only continuation; -1
    sets no limit. `allowed` are the only tokens of an answer, () for all. `banned` are sequences that an answer never
    completes: the last token of one may not follow the others. `not_first` are tokens that no answer begins with. `times`, () or
    (first, latest): tokens from `first` on are times, which obey Whisper's rules, and the answer begins with one up to `latest`.
    Log-probabilities are those among what may come where there are times or the answer is `judged` so, else those among all tokens.
    `begun`: tokens at the prompt's end that count as the answer's first.
    """

    grammar: str = ""
    reasoning_end: tuple[int, ...] = ()
    reasoning_max: int = -1
    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    reasoning_begin: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    times: tuple[int, ...] = ()
    judged: bool = False
    begun: tuple[int, ...] = ()


class Guidance(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Classifier-free guidance: what an answer would be without the prompt pushes it away. The logits of a token are u + scale *
    (c - u), in float32: c those behind the prompt, u those behind the negative prompt; the answer follows both. The longer of the
    two are the request's own tokens, and `beside` (int32 bytes) the other's: the prompt's if it `is_prompt`."""

    scale: float
    beside: bytes
    is_prompt: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one request is sampled and when it ends. Logs store the fields in this order, so new fields go at the end.

    `seed` is the request's root key (uint64). It is always present, because a request without a seed gets one in its
    event. Fields of `Drawn` have its types and defaults. `logprobs` is the number of alternatives reported beside each
    sampled token, `prompt_logprobs` that beside each prompt token, `NO_LOGPROBS` for none. `logit_bias` is sorted by
    token. `pooling` is an index of `POOLINGS`: which hidden states of the prompt become its embedding. `adapter` is the digest
    of the files of the LoRA adapter that the request is computed with, "" for none. `num_speculative_tokens` bounds the drafts of
    a step, -1 leaves that to the engine. `retention`: for each (tokens, seconds), the blocks of so many of the request's first
    tokens, its answer's included, stay in the prefix cache for so long after it, as far as pins have room. `guidance`: if any.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = NO_LOGPROBS
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_n_sigma: float = 0.0
    constraint: Constraint | None = None
    prompt_logprobs: int = NO_LOGPROBS
    pooling: int = NO_POOLING
    adapter: str = ""
    num_speculative_tokens: int = ENGINE_DRAFTS
    retention: tuple[tuple[int, int], ...] = ()
    guidance: Guidance | None = None


FIRST_LOGGED_COUNT = 14
"""The number of fields of Sampling in the first logs."""
LATER_TYPES = tuple(type(field.default) for field in msgspec.structs.fields(Sampling)[FIRST_LOGGED_COUNT:])
"""The types of the fields that were added since, as their defaults have them: no constraint is None, nor guidance."""


def _parameters() -> Mapping[str, Parameter]:
    hints = get_type_hints(Drawn, include_extras=True)
    return MappingProxyType({name: hints[name].__metadata__[0] for name in Drawn.__struct_fields__})


PARAMETERS = _parameters()
"""The table by name, in order."""
DEFAULTS: Mapping[str, float] = MappingProxyType(msgspec.structs.asdict(Drawn()))
FILTERS = tuple(name for name, each in PARAMETERS.items() if each.role == "filter")
PENALTIES = tuple(name for name, each in PARAMETERS.items() if each.role == "penalty")
CHOOSING = tuple(name for name, each in PARAMETERS.items() if each.role != "penalty")
"""The parameters that the choice of a token reads, after logits are adjusted."""
ROW_DTYPES: Mapping[str, str] = MappingProxyType(
    {name: PARAMETERS[name].dtype for name in CHOOSING} | {"seed": "int64", "position": "int64"}
)
"""The columns that a kernel reads to choose a token for each row, in argument order. `seed` has the bits of a uint64."""


def hits_max(sampling: Sampling, prompt: int, guided_hits: bool = True) -> int:
    """The most tokens that a request whose prompt has so many may take from the cache: none where its result needs positions
    inside the prompt, since the cache holds keys and values, no logits and no hidden states. With guidance, those before its
    other half begins, whose blocks hold nothing that the half needs: a block is named by the request's own tokens alone. Without
    `guided_hits`, as once, none then."""
    if sampling.prompt_logprobs != NO_LOGPROBS or sampling.pooling not in (NO_POOLING, LAST):
        return 0
    if sampling.guidance is None:
        return ALL_TOKENS
    return half_begins(sampling.guidance, prompt) if guided_hits else 0


def half_begins(guidance: Guidance, prompt: int) -> int:
    """The position of a prompt of so many tokens at which its other half begins, so that both end together."""
    return prompt - len(guidance.beside) // 4


def is_filtered(sampling: Sampling) -> bool:
    return any(getattr(sampling, name) != DEFAULTS[name] for name in FILTERS)


IN_PROMPT = 2**30
"""Added to the count of a penalised request's token if the token is in the prompt."""


def is_penalised(sampling: Sampling) -> bool:
    return any(getattr(sampling, name) != DEFAULTS[name] for name in PENALTIES)
