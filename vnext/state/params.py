"""Sampling: everything that turns one request's logits into its tokens, as it stands in an event.

Owns the fields and their bounds. Knows nothing of texts: stop strings and `n` belong to the edge, which sends one
request for each of the n answers and aborts a request whose text has reached a stop string.
"""

from __future__ import annotations

import msgspec

TOKEN_ID_MAX = 2**31 - 1
SEED_MAX = 2**64 - 1
LOGPROBS_MAX = 20
NO_LOGPROBS = -1


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one request is sampled and when it ends.

    `seed` is the request's root key (uint64): always present, because an unseeded request gets one in its event.
    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch those filters off. `logprobs` is the
    number of alternatives reported beside each sampled token, `NO_LOGPROBS` for none. `logit_bias` is sorted by token.
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
