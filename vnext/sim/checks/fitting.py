"""Fitting: what the cache had of a waiting request when a plan was decided, and whether its first chunk would have fitted.

A plan's own changes are taken back: pages that running rows took, names that they completed, pages that were given back
last. The engine's forms are in vnext/state/allocate.py and windows.py; this one goes page by page.
"""

from __future__ import annotations

import numpy as np

from vnext.sim.checks.microbatch_laws import wants
from vnext.sim.checks.plain_state import PlainState, in_sight
from vnext.state.config import SchedulerConfig
from vnext.state.events import unpack_tokens
from vnext.state.params import POOLINGS
from vnext.state.state import State, Waiting, blocks_for
from vnext.state.store.columns_numpy import group_hash
from vnext.state.store.fields import INPUT_BEGINS, LIVE, NEWEST, SPARE


def first_chunk(before: PlainState, after: PlainState, waiting: Waiting, budget: int, transfers: bool = False) -> int:
    """Tokens with which the request would have fitted behind all that the plan takes and admits; 0 if it would not. `transfers`:
    with the pages into which blocks are read from disk."""
    config, late = after.state.config, given_back(after)
    hits = longest_hit(after, _offered(before, after, waiting), offered_edges(before, after, waiting))
    start = len(hits) // config.group_count * config.block_size
    rest = waiting.known - start
    tokens = min(rest, config.long_prefill_token_threshold or rest, budget)
    tokens = up_to_edge(config, start, waiting.known, after.state.requests[waiting.id].prompt_length, tokens)
    tokens, _ = up_to_input(before, waiting.id, waiting.tokens, start, tokens, room_left(before, after), is_new=True)
    read = [each for each in after.state.tier.transfers if each.state >= 0] if transfers and after.state.tier else ()
    if not state_pages_fit(before, after, waiting, start // config.block_size, len(read)):
        return 0
    if tokens < rest and not config.chunked_prefill:
        return 0
    need = blocks_for(start + tokens, config.block_size) * config.group_count - len(hits)
    need += sum(page is not None and after.holders[page] == 0 and page not in late for page in hits)
    tier, more = after.state.tier, 0
    if transfers and tier is not None:
        more = sum(len(each.pages) for each in tier.transfers)
    return tokens if need <= after.state.pool.free - len(late) + more else 0


def surely_hit(before: PlainState, after: PlainState, waiting: Waiting) -> int:
    """Tokens of the prefix whose pages kept their names from before the plan until after it."""
    config, taken = before.state.config, set().union(*taken_pages(before, after))
    pairs = zip(named_pages(before, waiting), named_pages(after, waiting))
    stayed = [page if page == then and page not in taken else None for then, page in pairs]
    hits = longest_hit(before, stayed, offered_edges(before, after, waiting, stays=True))
    return len(hits) // config.group_count * config.block_size


def given_back(seen: PlainState) -> set[int]:
    """Pages that the newest plan, which has just been folded, gave back for good: its own requests could not take them."""
    config, step, found = seen.state.config, seen.in_flight[-1], set()
    size, groups = config.block_size, config.group_count
    base_of = {id_: count - drafts for id_, count, drafts in zip(step.ids, step.counts, step.drafts)}
    start_of = {id_: computed - base_of.get(id_, 0) for id_, computed in zip(seen.rows.id, seen.at_least)}
    for id_, computed, table in zip(seen.rows.id, seen.at_least, seen.tables if config.windows else ()):
        for place, page in enumerate(table):
            group, last = place % groups, place // groups * size + size - 1
            if in_sight(config, group, last, start_of.get(id_, computed)) and not in_sight(config, group, last, computed):
                found.add(page)
    return {page for page in found if seen.holders[page] == 0}


def _offered(before: PlainState, after: PlainState, waiting: Waiting) -> list[int | None]:
    """As named_pages, at the end of the admissions: before running rows name what they complete."""
    if before is after:
        return named_pages(after, waiting)
    by_rows, completed = taken_pages(before, after)
    return [
        page if page in completed or (page == then and page not in by_rows) else None
        for then, page in zip(named_pages(before, waiting), named_pages(after, waiting))
    ]


def named_pages(seen: PlainState, waiting: Waiting) -> list[int | None]:
    """The page that has the name of each page of the request's full blocks, block by block, as far as hits may go."""
    config, readable = seen.state.config, readable_tokens(seen, waiting.id)
    groups, most = config.group_count, min(waiting.known - 1, readable) // config.block_size
    return seen.state.pool.prefix_index.blocks_of(
        group_hash(key, group) for key in waiting.block_hashes[:most] for group in range(groups)
    )


def readable_tokens(seen: PlainState, id_: int) -> int:
    """How many tokens the cache could save the request: none where its result is made of their positions; with guidance those to
    whose left its other half has nothing."""
    request, guided_hits = seen.state.requests[id_], seen.state.config.guided_hits
    sampling, length = request.sampling, len(request.prompt) // 4
    if sampling.prompt_logprobs >= 0 or POOLINGS[sampling.pooling] in ("mean", "cls", "max"):
        return 0
    if sampling.guidance is not None:
        return length - len(sampling.guidance.beside) // 4 if guided_hits else 0
    return seen.state.config.max_model_len


def needs_slot(seen: PlainState, waiting: Waiting) -> bool:
    """Whether the request's adapter is in no slot."""
    adapter = seen.state.requests[waiting.id].sampling.adapter
    return bool(adapter) and adapter not in [slot.digest for slot in seen.state.slots if slot is not None]


def longest_hit(seen: PlainState, named: list[int | None], edges: list[bool] | None = None) -> list[int | None]:
    """The longest beginning of these pages of which the next query sees none that is missing; None where it sees none. `edges`: of
    each block, whether recurrent layers can go on behind it."""
    config = seen.state.config
    size, groups = config.block_size, config.group_count
    for count in range(len(named) // groups, 0, -1):
        if edges is not None and not edges[count - 1]:
            continue
        hit = [
            (page, in_sight(config, place % groups, place // groups * size + size - 1, count * size))
            for place, page in enumerate(named[: count * groups])
        ]
        if all(page is not None or not seen_ for page, seen_ in hit):
            return [page if seen_ else None for page, seen_ in hit]
    return []


def taken_pages(before: PlainState, after: PlainState) -> tuple[set[int], set[int]]:
    """Of the plan that was just folded: pages that running rows took, and those that admitted requests complete."""
    config, step, by_rows, completed = after.state.config, after.in_flight[-1], set(), set()
    held = {id_: len(table) for id_, table in zip(before.rows.id, before.tables)}
    ends = {id_: start + count for id_, start, count in zip(step.ids, step.starts, step.counts)}
    for id_, table in zip(after.rows.id, after.tables):
        if id_ in held:
            by_rows.update(table[held[id_] :])
        else:
            completed.update(table[: ends[id_] // config.block_size * config.group_count])
    return by_rows, completed


# ---- inputs --------------------------------------------------------------------------------------------------------
# How far prompts may go in a step that encodes few inputs, decided a second time, token by token. The engine's form is in
# vnext/state/expected.py.

Room = tuple[int, int] | None
"""How many inputs a step may still begin, and how many of their tokens it may compute; None without a bound."""
NO_BOUND = 2**62


def wanted(seen: PlainState, any_inputs: bool = False) -> tuple[list[int], Room]:
    """The number of tokens that each row could take in a step without others' tokens, and what others may begin. `any_inputs`: as
    if they may begin any number."""
    config, found = seen.state.config, []
    most, room = config.long_prefill_token_threshold or config.max_model_len, None if any_inputs else room_of(seen)
    for row, want in enumerate(wants(seen)):
        start, known = seen.rows.computed[row], seen.rows.known[row]
        tokens = up_to_edge(config, start, known, seen.rows.prompt[row], min(want, most))
        tokens, room = up_to_input(seen, seen.rows.id[row], seen.histories[row], start, tokens, room)
        found.append(tokens)
    return found, room


def room_of(seen: PlainState) -> Room:
    """What a step may begin of inputs: their tokens have a bound beside requests that have computed their prompts."""
    config = seen.state.config
    if not config.inputs_a_step:
        return None
    beside = any(computed >= prompt for computed, prompt in zip(seen.rows.computed, seen.rows.prompt))
    return config.inputs_a_step, config.input_tokens if config.input_tokens and beside else NO_BOUND


def up_to_input(
    seen: PlainState, id_: int, history: bytes, start: int, count: int, room: Room, is_new: bool = False
) -> tuple[int, Room]:
    """`count` tokens of a request from `start` on, up to where they would go beyond the room for inputs or begin one that is not
    encoded, and the room that is left. Who `is_new` begins the input that it starts in, too."""
    if room is None:
        return count, None
    known, (inputs, tokens) = unpack_tokens(history), room
    for place, token in enumerate(known[start : start + count].tolist()):
        begins = (token < INPUT_BEGINS or (token < 0 and is_new and place == 0)) and not was_found(seen, id_, known, start + place)
        if (begins and not (inputs and is_ready(seen, id_, known, start + place))) or (token < 0 and not tokens):
            return place, (inputs, tokens)
        inputs, tokens = inputs - begins, tokens - (token < 0)
    return count, (inputs, tokens)


def beginning(known: np.ndarray, place: int) -> int:
    """Where the input begins in which this token is."""
    while known[place] >= INPUT_BEGINS:
        place -= 1
    return place


def was_found(seen: PlainState, id_: int, known: np.ndarray, place: int) -> bool:
    """Whether ranks have read the vectors of the input in which this token of a request is."""
    sought = seen.state.sought
    return sought is not None and any(id_ == each and beginning(known, place) in places for each, places in sought.found)


def is_ready(seen: PlainState, id_: int, known: np.ndarray, place: int) -> bool:
    """Whether the input in which this token of a request is has all its units."""
    now, place = seen.state.encoding, beginning(known, place)
    return not seen.state.config.input_units or (now is not None and now.done == now.units and (now.id, now.place) == (id_, place))


def room_left(before: PlainState, after: PlainState) -> Room:
    """What the step may still begin behind all that the plan takes and admits."""
    room = wanted(before)[1]
    if before is after or room is None:
        return room
    step = after.in_flight[-1]
    for id_, start, count in zip(step.ids, step.starts, step.counts):
        if id_ not in before.rows.id:
            history = after.histories[after.rows.id.index(id_)]
            room = up_to_input(before, id_, history, start, count, room, is_new=True)[1]
    return room


# ---- recurrent checks ----------------------------------------------------------------------------------------------
# Where snapshots of recurrent layers cut a request's steps, and which of them the cache offered, each decided a second time.
# The engine's forms are in vnext/state/recurrent.py; these go token by token and page by page.


def up_to_edge(config: SchedulerConfig, computed: int, known: int, prompt: int, tokens: int) -> int:
    """`tokens` behind the `computed` ones, up to the first edge at which a snapshot is taken."""
    if not config.takes_snapshots:
        return tokens
    size = config.block_size
    edges = {(prompt - 1) // size * size, known // size * size}
    for count in range(1, tokens):
        if computed + count in edges or (computed + count) % config.snapshot_interval == 0:
            return count
    return tokens


def offered_edges(before: PlainState, after: PlainState, waiting: Waiting, stays: bool = False) -> list[bool]:
    """Of each full block of the request: whether the plan's admissions found a snapshot at its end. `stays`: whether it is there
    behind the plan, too."""
    then, now = before.state.pool.states, after.state.pool.states
    if then is None or now is None:
        return [True] * len(waiting.block_hashes)
    taken = _pages_of_new(before, after)
    found = []
    for key in waiting.block_hashes:
        page = then.prefix_index.block_of(key)
        found.append(page is not None and page not in taken and (not stays or now.prefix_index.block_of(key) == page))
    return found


def state_pages_fit(before: PlainState, after: PlainState, waiting: Waiting, hit_blocks: int, more: int) -> bool:
    """Whether one more request would have had its state pages, behind those that the plan admits, with so many `more`."""
    config, then, now = after.state.config, before.state.pool.states, after.state.pool.states
    if then is None or now is None:
        return True
    need = 3 if config.takes_snapshots else 1
    if hit_blocks:
        page = then.prefix_index.block_of(waiting.block_hashes[hit_blocks - 1])
        need += page is not None and int(then.ref[page]) == 0
    return need <= now.free + more


def snapshot_count(state: State) -> int:
    """The snapshots that may be hits; 0 without recurrent layers."""
    return 0 if state.pool.states is None else len(state.pool.states.prefix_index)


def _pages_of_new(before: PlainState, after: PlainState) -> set[int]:
    """The state pages of requests that the plan admits."""
    recurrent = after.state.rows.recurrent
    assert recurrent is not None, "the model has recurrent layers"
    new = [row for row, id_ in enumerate(after.rows.id) if id_ not in before.rows.id]
    return set(recurrent[[LIVE, NEWEST, SPARE]][:, new].reshape(-1).tolist()) if before is not after else set()
