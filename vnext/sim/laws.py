"""Laws of a decision and of an event: relations between a state, an event and the state after it.

The laws of a single state are in vnext/state/laws.py. These need the state before as well, so they run in the simulator
and in tests, beside the code that decides. order.py implements the order of the simulator's policies a second time, so
that an error in a policy is found too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from vnext.sim.checks import fitting
from vnext.sim.checks.accounting import Entry
from vnext.sim.checks.microbatch_laws import left_out
from vnext.sim.checks.plain_state import PlainState, in_sight
from vnext.sim.drafts import with_drafts
from vnext.sim.order import policy_keys
from vnext.sim.toy import allowed, is_finished
from vnext.state.config import SchedulerConfig
from vnext.state.errors import LawBroken
from vnext.state.events import (
    AdapterEvicted,
    AnyEvent,
    EngineRecovered,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    generated_by,
)
from vnext.state.facilities.tier import transferring
from vnext.state.outputs import Output
from vnext.state.pool import pinned_pages
from vnext.state.state import Waiting, blocks_for
from vnext.state.store.columns_numpy import group_hash
from vnext.state.traits import everyone_leaves


def decision_laws(before: PlainState, plan: StepPlanned | None, after: PlainState) -> None:
    """All laws of one decision. Raises LawBroken."""
    share = fair_share(before)
    if plan is None:
        work_is_conserved(before, share)
        return
    scored_prompts_are_computed(before, plan, after)
    caution_is_kept(before, plan)
    ranges_continue(before, after)
    victims_are_the_worst(before, plan)
    victims_are_needed(before, plan, share)
    budget_is_used(before, plan, after, share)
    nobody_is_passed_over(before, plan, after)
    hits_are_the_longest(before, plan, after)


def constraint_laws(config: SchedulerConfig, entries: Mapping[int, Entry], news: tuple[Output, ...]) -> None:
    """G1: each committed token is one that the answer before it allows. G2: after a finished grammar it is an end token.
    Raises LawBroken."""
    for id_, count in Counter(output.id for output in news if output.token >= 0).items():
        entry = entries[id_]
        if (constraint := entry.arrival.sampling.constraint) is None:
            continue
        for place in range(len(entry.tokens) - count, len(entry.tokens)):
            before, token = entry.tokens[:place], entry.tokens[place]
            if is_finished(constraint, before, config.eos_token_ids) and token not in config.eos_token_ids:
                raise LawBroken("G2", f"request {id_} goes on with {token} after its grammar's end")
            if token not in allowed(constraint, before, config.vocab_size, config.eos_token_ids):
                raise LawBroken("G1", f"request {id_} goes on with {token}, which its constraint forbids")


def event_laws(before: PlainState, event: AnyEvent, after: PlainState) -> None:
    """The laws of any one event. Raises LawBroken."""
    windows_hold_what_they_see(after)
    preemption_counts_are_new(before, event, after)
    arrivals_come_in_order(after)
    hashed_blocks_are_indexed(before, after)
    evictions_are_free(before, event)
    caution_lasts(before, event, after)
    if isinstance(event, EngineRecovered):
        return memory_is_gone(before, after)
    if isinstance(event, RequestArrived):
        arrivals_bring_their_tokens(event, after)
    if isinstance(event, RequestArrived) or before.rows.id == after.rows.id:
        return
    rows: Sequence[int]
    if isinstance(event, StepPlanned):
        rows, later = event.preempted, fitting.given_back(after)
    else:
        rows, later = [row for row, id_ in enumerate(before.rows.id) if id_ not in after.rows.id], set()
    if rows:
        tails_leave_first(before, rows, after, later)
        endings_are_not_indexed(before, event, rows, after, later)


# ---- decisions ---------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """The running rows' fair share: the rows to preempt, in order, and the tokens of each row (0 for preempted rows)."""

    victims: list[int]
    tokens: list[int]


def fair_share(seen: PlainState) -> Share:
    """The decision of preemption.py and the compiled columns, implemented a second time.

    Rows are served in order, each with all that it may take of the remaining budget. While a row lacks pages, the worst
    row by policy is preempted, and its pages and tokens become available to the rows behind. Where that leaves nothing of a
    microbatch, all rows are served. A step that preempts begins any number of inputs.
    """
    share = _served(seen, others := left_out(seen))
    if share.victims and seen.state.config.inputs_a_step:
        share = _served(seen, others, any_inputs=True)
    return _served(seen, set(), any_inputs=True) if others and share.victims and not any(share.tokens) else share


def _served(seen: PlainState, others: set[int], any_inputs: bool = False) -> Share:
    """The share of all rows but `others`. `any_inputs`: they may begin as many as they want."""
    size, groups = seen.state.config.block_size, seen.state.config.group_count
    want = [0 if row in others else most for row, most in enumerate(fitting.wanted(seen, any_inputs)[0])]
    budget, free = seen.state.config.max_num_batched_tokens, seen.state.pool.free
    tokens, pages = [0] * len(want), [0] * len(want)
    victims: list[int] = []
    best_first: list[int] = []
    holders: list[int] = []
    for row, most in enumerate(want):
        count = min(most, budget)
        need = max(blocks_for(seen.rows.computed[row] + count, size) - seen.rows.blocks[row], 0) * groups
        while need > free and row not in victims:
            if not victims:
                best_first, holders = rows_best_first(seen), seen.holders.copy()
            victims.append(worst := best_first.pop())
            for page in seen.held[worst]:
                holders[page] -= 1
                free += holders[page] == 0
            free, budget = free + pages[worst], budget + tokens[worst]
            tokens[worst] = pages[worst] = 0
        if row not in victims:
            tokens[row], pages[row], free, budget = count, need, free - need, budget - count
    return Share(victims, tokens if victims else with_drafts(seen, tokens))


def rows_best_first(seen: PlainState) -> list[int]:
    key_of = policy_keys(seen)
    return sorted(range(len(seen)), key=lambda row: key_of[seen.rows.id[row]])


def work_is_conserved(seen: PlainState, share: Share) -> None:
    """S6: a decision to do nothing means a full pipeline, or that no row and no waiting request could compute a token."""
    state = seen.state
    most = 1 if state.cautious else state.config.pipeline_depth
    if not state.requests or len(state.in_flight) >= most or state.paused in ("keep", "abort", "sleep"):
        return
    key_of = policy_keys(seen) if state.waiting else {}
    best = min(queue := going(seen), key=lambda entry: key_of[entry.id], default=None)
    if (state.paused or transferring(state)) and not queue and not seen.rows.id:
        return
    if not state.in_flight and (seen.rows.id or best is None or not fitting.needs_slot(seen, best)):
        raise LawBroken("S6", f"{len(state.requests)} requests live and the decision is to do nothing")
    if any(share.tokens):
        raise LawBroken("S6", f"{sum(share.tokens)} tokens could be computed and the decision is to do nothing")
    if best and not share.victims and len(seen) < state.config.max_num_seqs:
        _must_wait(seen, seen, best, state.config.max_num_batched_tokens)


def going(seen: PlainState) -> list[Waiting]:
    """The waiting requests that may be admitted: none whose blocks are being read, and in a pause those that were preempted or have
    tokens of their answer."""
    state, moving = seen.state, transferring(seen.state)
    prompts = {id_: len(request.prompt) for id_, request in state.requests.items()} if state.paused else {}
    return [
        entry for entry in state.waiting if entry.id not in moving
        if not state.paused or (state.paused == "wait" and (entry.preemption_count or len(entry.tokens) > prompts[entry.id]))
    ]  # fmt: skip


def budget_is_used(before: PlainState, plan: StepPlanned, after: PlainState, share: Share) -> None:
    """S6: every row takes its fair share, and every admitted request takes all that it may of the budget left then."""
    config, step = before.state.config, after.in_flight[-1]
    took, starts = dict(zip(step.ids, step.counts)), dict(zip(step.ids, step.starts))
    for id_, count in zip(before.rows.id, share.tokens):
        if took.get(id_, 0) != count:
            raise LawBroken("S6", f"request {id_} takes {took.get(id_, 0)} tokens where {count} are its share")
    most, budget = config.long_prefill_token_threshold or config.max_model_len, config.max_num_batched_tokens - sum(share.tokens)
    room = fitting.room_left(before, before)
    for place, tokens in plan.admitted:
        waiting = before.state.waiting[place]
        rest = waiting.known - (start := starts[waiting.id])
        limit = min(rest, most, budget)
        cut = fitting.up_to_edge(config, start, waiting.known, before.state.requests[waiting.id].prompt_length, limit)
        cut, room = fitting.up_to_input(before, waiting.id, waiting.tokens, start, cut, room, is_new=True)
        if tokens != (cut if config.chunked_prefill else rest):
            raise LawBroken("S6", f"request {waiting.id} begins with {tokens} of {rest} tokens, and {budget} were left")
        budget -= tokens


def nobody_is_passed_over(before: PlainState, plan: StepPlanned, after: PlainState) -> None:
    """S3: the admitted requests are the best of the queue by policy, best first, and the next one does not fit."""
    queue, config = before.state.waiting, before.state.config
    if not going(before):
        return
    budget = config.max_num_batched_tokens - sum(after.in_flight[-1].counts)
    more = bool(going(after)) and not plan.preempted and len(after) < config.max_num_seqs and budget > 0
    more = more and not (before.state.cautious and (plan.admitted or _is_in_prompt(before)))
    if not plan.admitted and not more:
        return
    key_of = policy_keys(before)
    best_first = sorted((entry.id for entry in going(before)), key=key_of.__getitem__)
    admitted = [queue[place].id for place, _ in plan.admitted]
    if admitted != best_first[: len(admitted)]:
        raise LawBroken("S3", f"admitted are the requests {admitted} where the best are {best_first[: len(admitted)]}")
    if more:
        _must_wait(before, after, min(going(after), key=lambda entry: key_of[entry.id]), budget)


def _must_wait(before: PlainState, after: PlainState, best: Waiting, budget: int) -> None:
    if fitting.needs_slot(after, best):
        return
    if tokens := fitting.first_chunk(before, after, best, budget):
        raise LawBroken("S3", f"request {best.id} waits and {tokens} of its tokens would fit")


def hits_are_the_longest(before: PlainState, plan: StepPlanned, after: PlainState) -> None:
    """P1: an admitted request starts behind everything that the cache surely held of it."""
    if not plan.admitted or not before.state.config.prefix_caching:
        return
    starts = dict(zip(after.in_flight[-1].ids, after.in_flight[-1].starts))
    for place, _ in plan.admitted:
        waiting = before.state.waiting[place]
        start, tokens = starts[waiting.id], fitting.surely_hit(before, after, waiting)
        if start < tokens:
            raise LawBroken("P1", f"request {waiting.id} starts at {start} where the cache has {tokens} tokens of it")


def scored_prompts_are_computed(before: PlainState, plan: StepPlanned, after: PlainState) -> None:
    """P4: a request whose result needs every position of its prompt starts at the first, also after a preemption, and one with
    guidance at or before the position at which its other half begins."""
    starts = dict(zip(after.in_flight[-1].ids, after.in_flight[-1].starts))
    for place, _ in plan.admitted:
        id_ = before.state.waiting[place].id
        if starts[id_] > (most := fitting.readable_tokens(before, id_)):
            raise LawBroken("P4", f"request {id_} needs its prompt from {most} on and starts at {starts[id_]}")


def caution_is_kept(before: PlainState, plan: StepPlanned) -> None:
    """C3: while requests from before a recovery are under suspicion, a step is planned only when none is in flight. It admits
    at most one request, and none while another is still in its prompt."""
    state = before.state
    if not state.cautious:
        return
    most = 0 if _is_in_prompt(before) else 1
    if state.in_flight or len(plan.admitted) > most:
        raise LawBroken("C3", f"step {plan.step} admits {len(plan.admitted)} of {most}, {len(state.in_flight)} steps in flight")


def _is_in_prompt(seen: PlainState) -> bool:
    """Whether a row has more than one token to compute, however few of them a step may take."""
    rows = seen.rows
    return any(known + due - computed > 1 for known, due, computed in zip(rows.known, rows.placeholders, rows.computed))


def victims_are_the_worst(before: PlainState, plan: StepPlanned) -> None:
    """S4: the preempted requests are the worst rows by policy, worst first, and that step admits none."""
    if not plan.preempted:
        return
    worst = rows_best_first(before)[: -len(plan.preempted) - 1 : -1]
    if plan.admitted or list(plan.preempted) != worst:
        raise LawBroken("S4", f"rows {plan.preempted} give way where {worst} are the worst, or others are admitted")


def victims_are_needed(before: PlainState, plan: StepPlanned, share: Share) -> None:
    """S4: the step preempts no more rows than it needs to serve the others."""
    if list(plan.preempted) != share.victims:
        raise LawBroken("S4", f"rows {plan.preempted} give way where {share.victims} have to")


def ranges_continue(before: PlainState, after: PlainState) -> None:
    """S2: a running request's range starts where the last one ended; an admitted one's starts behind its hits."""
    step, size = after.in_flight[-1], before.state.config.block_size
    computed, ends = dict(zip(before.rows.id, before.rows.computed)), dict(zip(after.rows.id, after.rows.computed))
    for id_, start, count in zip(step.ids, step.starts, step.counts):
        if start + count != ends[id_]:
            raise LawBroken("S2", f"request {id_} computes up to {start + count} and counts {ends[id_]}")
        if id_ in computed and start != computed[id_]:
            raise LawBroken("S2", f"request {id_} starts at {start}, not at {computed[id_]}")
        if id_ not in computed and start % size:
            raise LawBroken("S2", f"request {id_} starts inside a block")


# ---- events ------------------------------------------------------------------------------------------------------


def windows_hold_what_they_see(seen: PlainState) -> None:
    """M2: a page's holders are the rows that may still see it, counted token by token, and pins."""
    if not seen.state.config.windows:
        return
    counts = [0] * len(seen.holders)
    for block in chain(chain.from_iterable(seen.held), pinned_pages(seen.state.pool).tolist()):
        counts[block] += 1
    if counts != seen.holders:
        wrong = [block for block, count in enumerate(counts) if count != seen.holders[block]]
        raise LawBroken("M2", f"holders of blocks {wrong[:8]} are not the rows that may see them")


def preemption_counts_are_new(before: PlainState, event: AnyEvent, after: PlainState) -> None:
    """A2: a preempted request returns with one preemption more and with every known token."""
    rows = preempted_by(before, event)
    queued: dict[int, Waiting] = {entry.id: entry for entry in after.state.waiting} if rows else {}
    for row in rows:
        id_, known, preemptions = before.rows.id[row], before.histories[row], before.rows.preemption_count[row]
        entry = queued.get(id_)
        if entry is None or (entry.tokens, entry.preemption_count) != (known, preemptions + 1):
            knew = f"request {id_} gave way with {len(known) // 4} tokens before preemption {preemptions}"
            raise LawBroken("A2", f"{knew} and is queued as {entry}")


def caution_lasts(before: PlainState, event: AnyEvent, after: PlainState) -> None:
    """C3: a state is as cautious as the last recovery says, until a plan leaves none of those requests waiting or still to come."""
    state, right = after.state, before.state.cautious
    if isinstance(event, EngineRecovered):
        right = event.cautious
    elif isinstance(event, StepPlanned) and min([state.next_id, *(entry.id for entry in state.waiting)]) >= right:
        right = 0
    if state.cautious != right:
        raise LawBroken("C3", f"the state is cautious below request {state.cautious} where it should be below {right}")


def memory_is_gone(before: PlainState, after: PlainState) -> None:
    """C1: behind a recovery nothing is in flight or runs, every page is free, and none and no slot holds anything; step
    numbers go on. C2: everybody waits, with every known token and, who ran, one preemption more."""
    old, state = before.state, after.state
    left = [name for name, there in (
        ("steps", state.in_flight), ("rows", len(after)), ("slots", any(state.slots)), ("snapshots", fitting.snapshot_count(state)),
        ("names", len(state.pool.prefix_index)), ("pages", max(after.holders) or state.pool.free < state.config.page_count),
    ) if there]  # fmt: skip
    if left or (state.planned, state.committed) != (old.planned, old.planned):
        raise LawBroken("C1", f"behind a recovery there are {left}, and step {state.planned} is next where {old.planned} is due")
    rows = zip(before.rows.id, before.histories, before.rows.preemption_count)
    due: dict[int, tuple[bytes, int]] = {id_: (tokens, preemptions + 1) for id_, tokens, preemptions in rows}
    due |= {entry.id: (entry.tokens, entry.preemption_count) for entry in old.waiting}
    found: dict[int, tuple[bytes, int]] = {entry.id: (entry.tokens, entry.preemption_count) for entry in state.waiting}
    if found != due:
        wrong = [id_ for id_ in due.keys() | found.keys() if due.get(id_) != found.get(id_)]
        raise LawBroken("C2", f"behind a recovery requests {wrong} are not what they were")


def arrivals_bring_their_tokens(event: RequestArrived, after: PlainState) -> None:
    """C4: who arrives waits with its prompt and the tokens that its client has, and with no preemption."""
    entry = after.state.waiting[-1]
    config, tokens = after.state.config, event.prompt + generated_by(event)
    right = event.id, tokens, 0, len(tokens) // 4 // config.block_size * config.prefix_caching
    found = entry.id, entry.tokens, entry.preemption_count, len(entry.block_hashes)
    if found != right or after.state.requests[event.id].prompt != event.prompt:
        raise LawBroken("C4", f"request {event.id} came with other tokens than those with which it waits: {entry}")


def preempted_by(before: PlainState, event: AnyEvent) -> Sequence[int]:
    """The rows that an event sends back to the queue."""
    if isinstance(event, StepPlanned):
        return event.preempted
    return range(len(before.rows.id)) if everyone_leaves(event) else ()


def arrivals_come_in_order(seen: PlainState) -> None:
    """L2: first come, first served: running requests came before all waiting ones, and rows are in order of arrival. Only a request
    for which ranks have read from disk is overtaken."""
    if seen.state.config.policy != "fcfs" or not seen.rows.id:
        return
    sought = seen.state.sought
    read = set() if sought is None else {*sought.searches, *(id_ for id_, _ in sought.found)}
    ids, queue = seen.rows.id, [entry for entry in seen.state.waiting if entry.transfer < 0 and entry.id not in read]
    if (ids != sorted(ids) and seen.state.tier is None and sought is None) or (queue and max(ids) > queue[0].id):
        raise LawBroken("L2", f"requests {ids} run while {[entry.id for entry in queue[:4]]} wait")


def hashed_blocks_are_indexed(before: PlainState, after: PlainState) -> None:
    """P1: a block that an event hashes is in the prefix index, in every group of layers, by its own page or an equal one.

    Of each row the last block that it hashed. Not asked of a name that the same event evicted with the page that had it.
    """
    config = after.state.config
    if not config.prefix_caching or before.rows.hashed_blocks == after.rows.hashed_blocks and before.rows.id == after.rows.id:
        return
    hashed_blocks = dict(zip(before.rows.id, before.rows.hashed_blocks))
    for row, (id_, count) in enumerate(zip(after.rows.id, after.rows.hashed_blocks)):
        if count <= hashed_blocks.get(id_, 0):
            continue
        key = after.state.rows.block_hash(row)
        for group in range(config.group_count):
            name = group_hash(key, group)
            if not in_sight(config, group, count * config.block_size - 1, after.rows.computed[row]):
                continue  # the page may have been given back by this very plan
            if (
                after.state.pool.prefix_index.block_of(name) is None
                and before.state.pool.prefix_index.block_of(name) is None
            ):
                raise LawBroken("P1", f"request {id_} hashed block {count - 1}, which has no name in group {group} of layers")


def evictions_are_free(before: PlainState, event: AnyEvent) -> None:
    """R3: no running request uses the adapter of a slot that is evicted."""
    if not isinstance(event, AdapterEvicted):
        return
    state = before.state
    slot = state.slots[event.slot]
    users = [id_ for id_ in before.rows.id if slot is not None and state.requests[id_].sampling.adapter == slot.digest]
    if users:
        raise LawBroken("R3", f"slot {event.slot} is evicted while requests {users} use its adapter")


def tails_leave_first(before: PlainState, gone: Sequence[int], after: PlainState, later: set[int]) -> None:
    """P1: the end of a prefix is evicted before its beginning.

    Requests free their blocks in turn, each its last one first. A block that several of them held is freed by the last of
    those. `later`: pages that others held a little longer, until they gave them back. Blocks that the same plan took again are
    not in the queue.
    """
    holders, freed = before.holders.copy(), []
    for row in gone:
        for block in reversed(before.held[row]):
            holders[block] -= 1
            if holders[block] == 0 and after.holders[block] == 0 and block not in later:
                freed.append(block)
    places = [after.places[block] for block in freed]
    if places != sorted(places):
        raise LawBroken("P1", f"blocks {freed} are queued at {places}, not in the order in which they were freed")


def endings_are_not_indexed(
    before: PlainState, event: AnyEvent, gone: Sequence[int], after: PlainState, later: set[int]
) -> None:
    """P1: the token that ends a request is in no named block.

    Otherwise what the cache offers would depend on the pipeline. `later`: pages that others may have taken, filled, named and
    given back in the same plan. Drafts that were kept before the end may have completed blocks.
    """
    counts = dict(zip(before.in_flight[0].owed, event.counts)) if isinstance(event, StepCommitted) else {}
    names, size, groups = after.state.pool.prefix_index, before.state.config.block_size, before.state.config.group_count
    if len(names) == 0:
        return
    for row in gone:
        kept = counts.get((before.rows.id[row], before.rows.preemption_count[row]), 1) - 1
        full = min(before.rows.computed[row], before.rows.known[row] + kept) // size
        for block in set(before.tables[row][full * groups :]).intersection(before.held[row]):
            if after.holders[block] == 0 and names.hash_of(block) is not None and block not in later:
                raise LawBroken("P1", f"request {before.rows.id[row]} has left, and its unfinished block {block} has a name")
