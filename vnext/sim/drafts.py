"""Drafts a second time: how many a step takes, row by row, and what a simulated rank drafts.

The engine's forms are vnext/state/drafting.py and vnext/runtime/batch/draft_rows.py. A simulated drafter knows the model's
answer, and some of its drafts are lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import xxhash

from vnext.sim.checks.plain_state import PlainState
from vnext.sim.toy import fails, forced
from vnext.state.config import SchedulerConfig
from vnext.state.params import Constraint
from vnext.state.state import blocks_for

ONE = 1024
TRIAL_EVERY = 32
FEW = 8
RIGHT_PERCENT = (0, 100, 50, 80)


def most_of(config: SchedulerConfig) -> int:
    """The most drafts of a row in a step."""
    assert config.speculation is not None
    return min(config.speculation.num_speculative_tokens, (config.long_prefill_token_threshold or ONE) - 1)


def most_together(config: SchedulerConfig) -> int:
    """The most drafts of a step: with recurrent layers a rank has a page for each."""
    assert config.speculation is not None
    one = config.speculation.num_speculative_tokens
    return min(max(config.state_pages // 4, one), config.max_num_seqs * one) if config.state_pages else 10**9


def draft_room(seen: PlainState) -> list[int]:
    """The most drafts that a plan may give each row: none unless one token alone is to be computed."""
    config = seen.state.config
    if config.speculation is None:
        return [0] * len(seen)
    most, room, rows = most_of(config), [], seen.rows
    for id_, known, placeholders, limit, computed in zip(rows.id, rows.known, rows.placeholders, rows.limit, rows.computed):
        left, own = limit - 1 - (known + placeholders), seen.state.requests[id_].sampling.num_speculative_tokens
        single = computed == known + placeholders - 1 and left >= 0
        room.append(min(left, most, own if own >= 0 else most) if single else 0)
    return room


def with_drafts(seen: PlainState, tokens: list[int]) -> list[int]:
    """The rows' tokens in a decision that preempts nothing, with the drafts of the rows that are served."""
    config = seen.state.config
    if config.speculation is None:
        return tokens
    budget, pages, taken, size = config.max_num_batched_tokens - sum(tokens), 0, [], config.block_size
    budget = min(budget, most_together(config))
    for row, (count, wanted) in enumerate(zip(tokens, _wanted(seen))):
        drafts = min(wanted, budget) if count == 1 else 0
        budget -= drafts
        if config.takes_snapshots:
            drafts = min(drafts, -(seen.rows.computed[row] + 1) % size)
        taken.append(count + drafts)
        pages += max(blocks_for(seen.rows.computed[row] + taken[-1], config.block_size) - seen.rows.blocks[row], 0)
    return taken if pages * config.group_count <= seen.state.pool.free else tokens


def _wanted(seen: PlainState) -> list[int]:
    """Drafts are worth their time down to the first whose odds are no better than its share of a step's time, and together no less
    than what a step of drafts costs; some rows try nevertheless."""
    speculation, rooms = seen.state.config.speculation, draft_room(seen)
    assert speculation is not None
    count, more_cost = len(seen), speculation.row_cost_many or speculation.row_cost
    cost = sum(speculation.row_cost if row < FEW else more_cost for row in range(count))
    row_cost = more_cost if count > FEW else speculation.row_cost
    share = min(ONE * count * row_cost // (1000 + cost), ONE)
    odds = [[each for each in _odds(rate, room) if each > share] for rate, room in zip(seen.rates, rooms)]
    price = sum(map(len, odds)) * row_cost + speculation.step_cost
    is_worth = not speculation.step_cost or sum(map(sum, odds)) * (1000 + cost) > ONE * count * price
    trial = 1 + (most_of(seen.state.config) - 1) * (ONE - share) // ONE if speculation.step_cost else 1
    trial_every, wanted = TRIAL_EVERY << (4 * share // ONE), []
    for row, (worth, room) in enumerate(zip(odds, rooms)):
        tries = trial if (seen.rows.known[row] + seen.rows.placeholders[row]) % trial_every == 0 else 0
        wanted.append(min(max(len(worth) if is_worth else 0, tries), room))
    return wanted


def _odds(rate: int, room: int) -> list[int]:
    odds = [rate]
    while len(odds) < room:
        odds.append(odds[-1] * rate // ONE)
    return odds[:room]


def drafts_behind(config: SchedulerConfig, seed: int, position: int, most: int) -> list[bool]:
    """The drafts behind a request's tokens up to this position, and whether each is the model's own token.

    The same for every rank and at any time. Mostly there are as many as may be. Some drafters always lie, some never.
    """
    if not most or config.speculation is None:
        return []
    count = most if _word(seed, position, 2) % 4 else _word(seed, position, 3) % (most + 1)
    percent = RIGHT_PERCENT[config.speculation.num_speculative_tokens % len(RIGHT_PERCENT)]
    return [_word(seed, place, 1) % 100 < percent for place in range(position, position + count)]


def grammar_drafts(config: SchedulerConfig, constraint: Constraint | None, answer: Sequence[int], most: int) -> list[bool]:
    """As `drafts_behind`, of an engine that drafts what toy grammars force: behind an answer, and whether each is kept. The last
    one before a failure is not."""
    if constraint is None:
        return []
    drafts = forced(constraint, answer, config.eos_token_ids)[:most]
    failed = [fails(constraint, (*answer, *drafts[:at]), config.vocab_size, config.eos_token_ids) for at in range(len(drafts) + 1)]
    return [not (one or other) for one, other in pairwise(failed)]


def _word(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(repr(numbers).encode())
