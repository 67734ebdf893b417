"""Admission: which waiting requests join the batch, and with how many tokens.

Each admission is tried on a scratch pool with the reducer's own functions, so what the plan says is what will be: hits,
evictions and blocks that one admitted request completes for the next are all seen. A first request that cannot fit
whatever is evicted waits without a trial: a queue that blocks hold up would pay for one in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vnext.sched.ranking import places_best_first
from vnext.state import pool as pools
from vnext.state.admitting import claim, fits, hit_tokens_of, prefix_hits
from vnext.state.config import SchedulerConfig
from vnext.state.state import State, Waiting, blocks_for


def admissions(state: State, running_tokens: int, running_pages: int) -> tuple[tuple[int, int], ...]:
    """(place in the queue, tokens), best first, of those that fit after the running rows took theirs."""
    config = state.config
    budget = config.batch_tokens_max - running_tokens
    room = config.running_max - len(state.rows)
    if budget <= 0 or room <= 0 or not state.waiting:
        return ()
    places, pool = places_best_first(state, room), state.pool
    blocks, status = pool.names.blocks(), pool.status.values()
    if kept_out(config, blocks, status, state.waiting[places[0]], budget, pool.free - running_pages):
        return ()
    return _tried(state, places, budget, running_pages)


def _tried(state: State, places: Sequence[int], budget: int, running_pages: int) -> tuple[tuple[int, int], ...]:
    """Those of these places in the queue that fit, tried one after the other."""
    config = state.config
    pool, _ = pools.take(state.pool, running_pages)
    admitted: list[tuple[int, int]] = []
    for place in places:
        waiting = state.waiting[place]
        hits = prefix_hits(config, pool, waiting)
        tokens = chunk(config, waiting.known - hit_tokens_of(config, hits), budget)
        if tokens == 0 or not fits(config, pool, hits, tokens):
            break
        admitted.append((place, tokens))
        budget -= tokens
        if budget == 0 or place == places[-1]:
            break  # nobody after this one would look at the pool
        pool = claim(config, pool, waiting, hits, tokens).pool
    return tuple(admitted)


def kept_out(
    config: SchedulerConfig, blocks: Mapping[bytes, int], status: np.ndarray, waiting: Waiting, budget: int, free: int
) -> bool:
    """Whether a trial on a pool of these named `blocks` and this `status` (Pool) would surely find no blocks for the request.

    It takes all its tokens at once if the budget has room for them, so it needs blocks for all it knows but those that
    others hold already; what running rows take first can make hits fewer, never more. False: try it.
    """
    known, size = waiting.known, config.block_size
    if config.windows or known > min(budget, config.prefill_threshold or known):
        return False
    lacks = blocks_for(known, size) - free
    if lacks <= 0:
        return False
    for key in waiting.keys[: (known - 1) // size]:
        block = blocks.get(key)
        if block is None:
            break
        lacks -= int(status[block]) < 0
    return lacks > 0


def chunk(config: SchedulerConfig, rest: int, budget: int) -> int:
    """Tokens of a request's first step, 0 if it must wait: without chunking it is all or nothing."""
    if not config.chunked_prefill:
        return rest if rest <= budget else 0
    return min(rest, config.prefill_threshold or rest, budget)
