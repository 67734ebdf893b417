"""Drafts a second time: how many a step takes, row by row, and what a simulated rank drafts.

The engine's forms are vnext/state/drafting.py and vnext/runtime/batch/draft_rows.py. A simulated drafter knows the model's
answer, and some of its drafts are lies.
"""

from __future__ import annotations

import xxhash

from vnext.sched.sim.checks.plain_state import PlainState
from vnext.state.config import SchedulerConfig
from vnext.state.state import blocks_for

ONE = 1024
TRIAL_EVERY = 32
RIGHT_PERCENT = (0, 100, 50, 80)


def draft_room(seen: PlainState) -> list[int]:
    """The most drafts that a plan may give each row: none unless one token alone is to be computed."""
    config = seen.state.config
    if config.speculation is None:
        return [0] * len(seen)
    most = min(config.speculation.num_speculative_tokens, (config.long_prefill_token_threshold or ONE) - 1)
    room = []
    for id_, known, placeholders, limit, computed in zip(seen.id, seen.known, seen.placeholders, seen.limit, seen.computed):
        left, own = limit - 1 - (known + placeholders), seen.state.requests[id_].sampling.num_speculative_tokens
        single = computed == known + placeholders - 1 and left >= 0
        room.append(min(left, most, own if own >= 0 else most) if single else 0)
    return room


def with_drafts(seen: PlainState, tokens: list[int]) -> list[int]:
    """The rows' tokens in a decision that preempts nothing, with the drafts of the rows that are served."""
    config = seen.state.config
    if config.speculation is None:
        return tokens
    budget, pages, taken = config.max_num_batched_tokens - sum(tokens), 0, []
    for row, (count, most) in enumerate(zip(tokens, draft_room(seen))):
        drafts = min(most, _paying(seen, row), budget) if count == 1 else 0
        budget -= drafts
        taken.append(count + drafts)
        pages += max(blocks_for(seen.computed[row] + taken[-1], config.block_size) - seen.blocks[row], 0)
    return taken if pages * config.group_count <= seen.state.pool.free else tokens


def _paying(seen: PlainState, row: int) -> int:
    """Drafts are worth their time down to the first whose odds are no better than its share of a step's time."""
    speculation, rate = seen.state.config.speculation, seen.rates[row]
    assert speculation is not None
    cost = len(seen) * speculation.row_cost
    share, odds, drafts = ONE * cost // (1000 + cost), rate, 0
    while drafts < speculation.num_speculative_tokens and odds > share:
        drafts, odds = drafts + 1, odds * rate // ONE
    trial_every = TRIAL_EVERY << (4 * share // ONE)
    return max(drafts, int((seen.known[row] + seen.placeholders[row]) % trial_every == 0))


def drafts_behind(config: SchedulerConfig, seed: int, position: int, most: int) -> list[bool]:
    """The drafts behind a request's tokens up to this position, and whether each is the model's own token.

    The same for every rank and at any time. Mostly there are as many as may be. Some drafters always lie, some never.
    """
    if not most or config.speculation is None:
        return []
    count = most if _word(seed, position, 2) % 4 else _word(seed, position, 3) % (most + 1)
    percent = RIGHT_PERCENT[config.speculation.num_speculative_tokens % len(RIGHT_PERCENT)]
    return [_word(seed, place, 1) % 100 < percent for place in range(position, position + count)]


def _word(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(repr(numbers).encode())
