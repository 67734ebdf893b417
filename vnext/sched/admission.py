"""Admission: which waiting requests join the batch, and with how many tokens; of the others, what they wait for.

Each admission is tried on a scratch pool with the reducer's own functions. The plan therefore sees exactly what will
happen: hits, evictions, and blocks that one admitted request completes for the next. The schedule stops at the first verdict that
is a wait; explain.py goes on. If the first request cannot fit even after all evictions, it waits without a
trial, because a queue blocked by memory would pay for one in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from vnext.sched.ranking import places_best_first
from vnext.state import pool as pools
from vnext.state.allocate import allocate, fits, hit_tokens_of, new_page_count, prefix_hits, shared
from vnext.state.config import SchedulerConfig
from vnext.state.expected import InputRoom, Work, first_up_to_inputs
from vnext.state.facilities.adapters import may_run
from vnext.state.facilities.tier import transferring
from vnext.state.pool import Pool
from vnext.state.recurrent import first_tokens, lacking, source_of
from vnext.state.state import State, Waiting, blocks_for
from vnext.state.store.rows import wants

Why = Literal[
    "budget", "blocks", "sequences", "adapter", "order", "preempted", "room", "caution", "pause", "disk", "microbatch", "states",
    "inputs",
]  # fmt: skip
"""budget: requests before it use up the step's tokens, or leave too few for a prompt that may not be split
blocks: it is the best waiting request, and the cache has too few free pages for it
sequences: the batch has its maximum number of requests
adapter: it is the best waiting request, and no slot holds its LoRA adapter yet
order: a better request waits for one of the reasons above, and no request may overtake it
preempted: it is preempted in this step, as the worst running request when pages are missing
room: other requests are preempted in this step, which therefore admits none
caution: behind fatal steps, requests are admitted one at a time
pause: the engine is paused
disk: its blocks, or vectors of its inputs, are being read from disk; others overtake it
microbatch: its token is in flight, or it is the turn of others that decode
states: it is the best waiting request, and too few pages for the states of its recurrent layers are free
inputs: requests before it begin as many images' tiles and sounds as a step may encode, or its own is not encoded yet
"""
NOBODY = -1
NO_HITS = np.empty(0, dtype=np.int32)


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One request that computes nothing. It needs `need` where `have` are available: tokens, pages or requests, by `why`.

    `behind` is the request that it waits behind (order), otherwise NOBODY.
    """

    id: int
    why: Why
    need: int
    have: int
    behind: int = NOBODY


Verdict = tuple[int, int | Wait]
"""A place in the queue, and the tokens of its request or why it waits."""


def admissions(state: State, work: Work) -> tuple[tuple[int, int], ...]:
    """(place in the queue, tokens) of the requests that fit behind running rows that take what their `work` needs, best first."""
    config = state.config
    budget = config.max_num_batched_tokens - work.tokens_sum
    room = admitted_max(state)
    if budget <= 0 or room <= 0 or not state.waiting:
        return ()
    places, pool = admissible(state, room), state.pool
    if not places:
        return ()
    if kept_out(config, pool, state.waiting[places[0]], budget, pool.free - work.pages_sum):
        return ()
    admitted: list[tuple[int, int]] = []
    for place, verdict in verdicts(state, places, work):
        if isinstance(verdict, Wait):
            break
        admitted.append((place, verdict))
        budget -= verdict
        if budget == 0:
            break  # nobody else is tried
    return tuple(admitted)


def admissible(state: State, room: int) -> Sequence[int]:
    """Up to `room` places in the queue, best first, without those for which ranks read from disk: others overtake them."""
    moves = state.tier is not None or state.sought is not None
    if not moves or not (moving := transferring(state)):
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
    room: int = state.config.max_num_seqs - state.rows.cells.shape[1]
    if not state.cautious:
        return room
    return 0 if (wants(state.rows) > 1).any() else min(room, 1)


def verdicts(state: State, places: Sequence[int], work: Work) -> Iterator[Verdict]:
    """One verdict for each of these places in the queue, best first, behind running rows that take what their `work` needs. No
    request overtakes one that waits."""
    config, room = state.config, admitted_max(state)
    budget, inputs = config.max_num_batched_tokens - work.tokens_sum, work.room
    pool = pools.take(state.pool, work.pages_sum)[0] if budget > 0 else state.pool
    joins: tuple[Waiting, np.ndarray, int] | None = None  # whose blocks the pool does not have yet: mostly nobody looks at it again
    for number, place in enumerate(places):
        waiting = state.waiting[place]
        if joins is not None:
            pool = allocate(config, pool, *joins).pool
        if budget <= 0 or number >= room:
            spent = budget <= 0 and not 0 < room <= number  # a full batch is the better reason, unless it was full before
            yield from _bound(state, pool, places[number:], number, spent)
            return
        wait, hits, tokens, inputs = tried(state, pool, waiting, budget, inputs)
        if wait is not None:
            yield place, wait
            yield from ((each, _behind(state.waiting[each], wait)) for each in places[number + 1 :])
            return
        yield place, tokens
        budget -= tokens
        joins = waiting, hits, tokens


def tried(
    state: State, pool: Pool, waiting: Waiting, budget: int, room: InputRoom
) -> tuple[Wait | None, np.ndarray, int, InputRoom]:
    """What the best waiting request gets of this pool, budget and `room` for inputs: why it waits, the blocks that it hits, its
    tokens, and the room that is left."""
    config = state.config
    if state.slots and not may_run(state, waiting.id):
        return Wait(id=waiting.id, why="adapter", need=1, have=0), NO_HITS, 0, room  # until a slot holds its adapter
    hits = prefix_hits(config, pool, waiting)
    hit = hit_tokens_of(config, hits)
    rest = waiting.known - hit
    tokens, left = chunk(config, rest, budget), room
    if config.takes_snapshots:
        tokens = first_tokens(state, waiting, hit, tokens)
    if tokens == 0:
        return Wait(id=waiting.id, why="budget", need=rest, have=budget), hits, 0, room
    if config.inputs_a_step:
        tokens, left = first_up_to_inputs(state, waiting, hit, tokens, room)
        if tokens == 0:
            return Wait(id=waiting.id, why="inputs", need=1, have=room.inputs), hits, 0, room
    states = pool.states
    if states and (lacks := lacking(config, states, source_of(states, waiting, len(hits) // config.group_count))):
        return Wait(id=waiting.id, why="states", need=states.free + lacks, have=states.free), hits, 0, room
    if not fits(config, pool, hits, tokens):
        return Wait(id=waiting.id, why="blocks", need=pages_of(config, pool, hits, tokens), have=pool.free), hits, 0, room
    return None, hits, tokens, left


def pages_of(config: SchedulerConfig, pool: Pool, hits: np.ndarray, tokens: int) -> int:
    """The free pages that an allocation takes, as allocate.fits counts them: missing ones, and hits that are free now."""
    held = shared(config, hits)
    revived = int((pool.status.at(held) >= 0).sum()) if len(held) else 0
    return new_page_count(config, hits, tokens) + revived


def _bound(state: State, pool: Pool, places: Sequence[int], admitted: int, spent: bool) -> Iterator[Verdict]:
    """Why nobody joins behind `admitted` requests: the step's tokens are spent, too many run, or a cautious state has admitted as
    many as it does at once."""
    config, seqs = state.config, state.config.max_num_seqs
    for place in places:
        waiting = state.waiting[place]
        if spent:
            rest = waiting.known - hit_tokens_of(config, prefix_hits(config, pool, waiting))
            yield place, Wait(id=waiting.id, why="budget", need=rest, have=0)
        elif len(state.rows) + admitted < seqs:
            yield place, Wait(id=waiting.id, why="caution", need=1, have=0)
        else:
            yield place, Wait(id=waiting.id, why="sequences", need=seqs + 1, have=seqs)


def _behind(waiting: Waiting, first: Wait) -> Wait:
    return Wait(id=waiting.id, why="order", need=0, have=0, behind=first.id)


def kept_out(config: SchedulerConfig, pool: Pool, waiting: Waiting, budget: int, free: int) -> bool:
    """Whether a trial on this pool, of which `free` pages are left, would certainly find too few.

    The request takes all its tokens at once if the budget has room for them, so it needs pages for all its known tokens
    except those that other requests already hold. The pages that running rows take first can only reduce the hits. False
    means that a trial is needed.
    """
    known = waiting.known
    if config.windows or config.takes_snapshots or config.inputs_a_step:
        return False
    if known > min(budget, config.long_prefill_token_threshold or known):
        return False
    return lacking_pages(config, pool, waiting, free) > 0


def lacking_pages(config: SchedulerConfig, pool: Pool, waiting: Waiting, free: int) -> int:
    """How many more pages than the free ones a request needs for all its known tokens beside those that others already hold; 0 or
    less where they suffice."""
    known, size = waiting.known, config.block_size
    lacks = blocks_for(known, size) - free
    if lacks <= 0:
        return lacks
    blocks, status = pool.prefix_index.blocks(), pool.status.values()
    for key in waiting.block_hashes[: (known - 1) // size]:
        block = blocks.get(key)
        if block is None:
            break
        lacks -= int(status[block]) < 0
    return lacks


def chunk(config: SchedulerConfig, rest: int, budget: int) -> int:
    """The number of tokens of a request's first step, 0 if it must wait. Without chunking it is all or nothing."""
    if not config.chunked_prefill:
        return rest if rest <= budget else 0
    return min(rest, config.long_prefill_token_threshold or rest, budget)
