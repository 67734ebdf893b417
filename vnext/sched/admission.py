"""Admission: which waiting requests join the batch, and with how many tokens.

Each admission is tried on a scratch pool with the reducer's own functions, so what the plan says is what will be: hits,
evictions and blocks that one admitted request completes for the next are all seen.
"""

from __future__ import annotations

from vnext.sched.ranking import places_best_first
from vnext.state import pool as pools
from vnext.state.admitting import claim, fits, hit_tokens_of, prefix_hits
from vnext.state.config import SchedulerConfig
from vnext.state.state import State


def admissions(state: State, running_tokens: int, running_pages: int) -> tuple[tuple[int, int], ...]:
    """(place in the queue, tokens), best first, of those that fit after the running rows took theirs."""
    config = state.config
    budget = config.batch_tokens_max - running_tokens
    room = config.running_max - len(state.rows)
    if budget <= 0 or room <= 0 or not state.waiting:
        return ()
    pool, _ = pools.take(state.pool, running_pages)
    admitted: list[tuple[int, int]] = []
    places = places_best_first(state, room)
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


def chunk(config: SchedulerConfig, rest: int, budget: int) -> int:
    """Tokens of a request's first step, 0 if it must wait: without chunking it is all or nothing."""
    if not config.chunked_prefill:
        return rest if rest <= budget else 0
    return min(rest, config.prefill_threshold or rest, budget)
