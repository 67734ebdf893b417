"""Admission: which waiting requests join the batch, and with how many tokens.

Each admission is tried on a scratch pool with the reducer's own functions. The plan therefore sees exactly what will
happen: hits, evictions, and blocks that one admitted request completes for the next. If the first request cannot fit
even after all evictions, it waits without a trial, because a queue blocked by memory would pay for one in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vnext.sched.ranking import places_best_first
from vnext.state import pool as pools
from vnext.state.allocate import allocate, fits, hit_tokens_of, prefix_hits
from vnext.state.config import SchedulerConfig
from vnext.state.facilities.adapters import may_run
from vnext.state.facilities.tier import transferring
from vnext.state.state import State, Waiting, blocks_for
from vnext.state.store.rows import wants


def admissions(state: State, running_tokens: int, running_pages: int) -> tuple[tuple[int, int], ...]:
    """(place in the queue, tokens) of the requests that fit after the running rows have taken their pages, best first."""
    config = state.config
    budget = config.max_num_batched_tokens - running_tokens
    room = admitted_max(state)
    if budget <= 0 or room <= 0 or not state.waiting:
        return ()
    places, pool = _admissible(state, room), state.pool
    if not places:
        return ()
    blocks, status = pool.prefix_index.blocks(), pool.status.values()
    if kept_out(config, blocks, status, state.waiting[places[0]], budget, pool.free - running_pages):
        return ()
    return _tried(state, places, budget, running_pages)


def _admissible(state: State, room: int) -> Sequence[int]:
    """Up to `room` places in the queue, best first, without those whose blocks are being read from disk: others overtake them."""
    if state.tier is None or not (moving := transferring(state)):
        return places_best_first(state, room)
    places = places_best_first(state, room + len(moving))
    return [place for place in places if state.waiting[place].id not in moving][:room]


def in_flight_max(state: State) -> int:
    """The number of steps that may be in flight: one while the state is cautious."""
    return 1 if state.cautious else state.config.pipeline_depth


def admitted_max(state: State) -> int:
    """The number of requests that a step may admit. A cautious state admits one, and the next one when that one has computed its
    tokens, so that a step which is fatal shows whose it was.
    """
    room = state.config.max_num_seqs - len(state.rows)
    if not state.cautious:
        return room
    return 0 if (wants(state.rows) > 1).any() else min(room, 1)


def _tried(state: State, places: Sequence[int], budget: int, running_pages: int) -> tuple[tuple[int, int], ...]:
    """The requests at these places in the queue that fit, tried one after another."""
    config = state.config
    pool, _ = pools.take(state.pool, running_pages)
    admitted: list[tuple[int, int]] = []
    for place in places:
        waiting = state.waiting[place]
        if not may_run(state, waiting.id):
            break  # until a slot holds its adapter
        hits = prefix_hits(config, pool, waiting)
        tokens = chunk(config, waiting.known - hit_tokens_of(config, hits), budget)
        if tokens == 0 or not fits(config, pool, hits, tokens):
            break
        admitted.append((place, tokens))
        budget -= tokens
        if budget == 0 or place == places[-1]:
            break  # no later request would look at the pool
        pool = allocate(config, pool, waiting, hits, tokens).pool
    return tuple(admitted)


def kept_out(
    config: SchedulerConfig, blocks: Mapping[bytes, int], status: np.ndarray, waiting: Waiting, budget: int, free: int
) -> bool:
    """Whether a trial on a pool with these indexed `blocks` and this `status` would certainly find too few pages.

    The request takes all its tokens at once if the budget has room for them, so it needs pages for all its known tokens
    except those that other requests already hold. The pages that running rows take first can only reduce the hits. False
    means that a trial is needed.
    """
    known, size = waiting.known, config.block_size
    if config.windows or known > min(budget, config.long_prefill_token_threshold or known):
        return False
    lacks = blocks_for(known, size) - free
    if lacks <= 0:
        return False
    for key in waiting.block_hashes[: (known - 1) // size]:
        block = blocks.get(key)
        if block is None:
            break
        lacks -= int(status[block]) < 0
    return lacks > 0


def chunk(config: SchedulerConfig, rest: int, budget: int) -> int:
    """The number of tokens of a request's first step, 0 if it must wait. Without chunking it is all or nothing."""
    if not config.chunked_prefill:
        return rest if rest <= budget else 0
    return min(rest, config.long_prefill_token_threshold or rest, budget)
