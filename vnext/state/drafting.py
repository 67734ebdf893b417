"""Drafting: how many drafts a step takes of each row, as one pure function of the state.

A rank drafts tokens that may follow a request's last one, and the step computes them together with it. At each draft's
position the rank samples the request's own token, by its seed and position. A draft is kept while it equals that token, so
the answer is the one without drafts, bit for bit. Owns the expected number of drafts; plans carry only other numbers.

    last token      draft 1      draft 2      draft 3          positions computed: 4
    samples: a      b            c            d                kept: a, and b if draft 1 == a, c if also draft 2 == b, ...
"""

from __future__ import annotations

import numpy as np

from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.store.fields import RATE, RATE_ONE
from vnext.state.store.rows import Rows, wants

TRIAL_INTERVAL = 32
"""A request whose drafts do not pay tries one whenever its length is a multiple of this."""
MEMORY = 8
"""The weight of the past in RATE: a trial counts one part in eight."""


def draft_room(config: SchedulerConfig, rows: Rows) -> np.ndarray:
    """The most drafts that a step may take of each row (int64[R]): none unless its last token alone is to be computed."""
    assert config.speculation is not None
    most = config.speculation.num_speculative_tokens
    if config.long_prefill_token_threshold:
        most = min(most, config.long_prefill_token_threshold - 1)
    room = rows.limit - 1 - rows.known - rows.placeholders
    most_of_rows: np.ndarray = np.where(wants(rows) == 1, np.clip(room, 0, most), 0)
    return most_of_rows


def expected_drafts(config: SchedulerConfig, rows: Rows, tokens: np.ndarray) -> np.ndarray:
    """The drafts of the expected plan (int64[R]) beside the `tokens` (int64[R]) that rows compute without them.

    Rows take drafts in order while the step's budget lasts.
    """
    assert config.speculation is not None
    drafts = np.minimum(draft_room(config, rows), paying(config.speculation, rows))
    ends = np.cumsum(drafts)
    left = config.max_num_batched_tokens - int(tokens.sum())
    within: np.ndarray = np.clip(left - (ends - drafts), 0, drafts)
    return within


def paying(speculation: Speculation, rows: Rows) -> np.ndarray:
    """The number of drafts of each row that are likely enough to be kept to pay for themselves (int64[R]).

    The n-th draft is kept with probability RATE ** n. It pays if that is more than the share of a step's tokens that one more
    row costs: B rows at `row_cost` c per step time make B tokens in 1 + B * c, so a draft must bring c * B / (1 + B * c).
    """
    assert rows.drafting is not None
    rate, count = rows.drafting[RATE], len(rows)
    assert speculation.row_cost >= 0, "a state has the cost that was measured"
    least = RATE_ONE * count * speculation.row_cost // (1000 + count * speculation.row_cost)
    odds, drafts = rate.copy(), np.zeros(count, dtype=np.int64)
    for _ in range(speculation.num_speculative_tokens):
        drafts += odds > least
        odds = odds * rate // RATE_ONE
    due = (rows.known + rows.placeholders) % TRIAL_INTERVAL == 0
    some: np.ndarray = np.maximum(drafts, due)
    return some


def updated_rate(rate: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """RATE after a commit (int64[n] each): every draft up to the first one that was not kept is a trial."""
    trials = np.minimum(drafted, accepted + 1)
    for trial in range(int(trials.max(initial=0))):
        target = np.where(trial < accepted, RATE_ONE, 0)
        rate = np.where(trial < trials, rate + (target - rate) // MEMORY, rate)
    return rate
