"""Laws: conditions that hold in every state, each a small function with an entry in docs/laws.md.

`check_cheap` takes a few array sums and always runs in the engine. `check` is complete and runs in tests, in the
simulator and in `vnext-replay verify --laws`. A broken law is a bug of the engine, never of a client.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from vnext.state.block_hash import leading_hashes
from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.drafting import spare_tokens
from vnext.state.errors import LawBroken
from vnext.state.facilities import recurrent_laws, sought
from vnext.state.facilities.adapters import held
from vnext.state.facilities.encoding import encoding_is_bounded
from vnext.state.facilities.shortage import limits_are_lowered
from vnext.state.pool import free_blocks
from vnext.state.state import State, StepInFlight, root_of
from vnext.state.store import columns, extents, fields
from vnext.state.store.clients import IDLE_CLIENTS_MAX, ClientKey, key_of
from vnext.state.store.extents import Extents
from vnext.state.waiting_queue import queue_hash
from vnext.state.windows import first_kept, held_entries, row_table

WORD = 2**64 - 1


def check(state: State) -> None:
    """Check all laws of one state. Raises LawBroken."""
    for law in ALL:
        law(state)


def check_cheap(state: State) -> None:
    """Check CHEAP, the laws that cost a microsecond or two, in one pass; on failure, one by one. Raises LawBroken."""
    config, in_flight, counters = state.config, state.in_flight, state.counters
    all_hold = (
        _rows_hold(state)
        and state.rows.cells.shape[1] <= config.max_num_seqs
        and (not in_flight or _step_holds(config, in_flight[-1]))
        and len(in_flight) == state.planned - state.committed <= config.pipeline_depth
        and [scheduled.step for scheduled in in_flight] == list(range(state.committed, state.planned))
        and (not state.slots or held(state) <= _resident(state))
        and state.next_id == counters.finished + counters.aborted + len(state.requests)
    )
    if not all_hold:
        for law in CHEAP:
            law(state)
        raise LawBroken("S1", "the quick form of the cheap laws sees what none of them does")


def _rows_hold(state: State) -> bool:
    """Whether S2, M4 and D2 hold."""
    rows, config, in_flight = state.rows, state.config, state.in_flight
    speculation = config.speculation
    is_lawful = columns.impl.lawful(rows.cells, config.block_size, spare_tokens(config) if speculation else 0)
    if not is_lawful or (speculation is None) != (rows.drafting is None):
        return False
    if speculation is None:
        return not in_flight or in_flight[-1].drafts is None
    return not in_flight or _drafts_are_bounded(speculation, in_flight[-1])


def _step_holds(config: SchedulerConfig, scheduled: StepInFlight) -> bool:
    total, smallest, largest, samples = columns.impl.bounds(scheduled.entries, scheduled.samples)
    return (
        total == scheduled.tokens <= config.max_num_batched_tokens
        and smallest >= 1
        and (not config.long_prefill_token_threshold or largest <= config.long_prefill_token_threshold)
        and (config.chunked_prefill or samples == len(scheduled.samples))
    )


def _tables(state: State) -> np.ndarray:
    """The pages that all rows hold, one table after another (int32[n])."""
    config, rows = state.config, state.rows
    whole = _ranges(state.tables, rows.table_at, rows.blocks * config.group_count)
    return whole[held_entries(config, rows.computed_at_least, rows.blocks)] if config.windows else whole


def _ranges(values: Extents, at: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The values of several ranges, one after another (int32[sum of counts]); fast if there are few ranges."""
    data = values.arena.data
    return np.concatenate([data[:0], *(data[first : first + count] for first, count in zip(at.tolist(), counts.tolist()))])


def _hold(condition: bool, law: str, message: str) -> None:
    if not condition:
        raise LawBroken(law, message)


def free_and_held_are_all(state: State) -> None:
    """M1: free + held = total, and no page is queued twice."""
    pool, queued = state.pool, len(free_blocks(state.pool))  # of a page's places there, the one that is its own counts
    held, total = (pool.status.values() < 0).nonzero()[0], pool.page_count
    _hold(queued == pool.free, "M1", f"{queued} blocks queued, {pool.free} counted as free")
    _hold(len(held) + queued == total, "M1", f"{len(held)} held and {queued} free of {total}")
    kept = pool.prefix_index.named() - pool.prefix_index.count(held.tolist())
    _hold(kept == pool.kept, "M1", f"{kept} free blocks have a name, {pool.kept} are counted as kept")


def holders_are_counted(state: State) -> None:
    """M2: a page's holders are its occurrences in the block tables, in transfers and in pins. Pool.status makes it free if and
    only if it has none."""
    pool, blocks = state.pool, _tables(state)
    if state.pool.pins is not None:
        blocks = np.concatenate((blocks, state.pool.pins.first_to_leave()))
    if state.tier is not None and state.tier.transfers:
        blocks = np.concatenate((blocks, *(np.array(each.pages, dtype=np.int32) for each in state.tier.transfers)))
    there = len(blocks) == 0 or (int(blocks.min()) >= 0 and int(blocks.max()) < pool.page_count)
    _hold(there, "M2", f"a table has a block that is none of the {pool.page_count}")
    wrong = (np.bincount(blocks, minlength=pool.page_count) != pool.ref).nonzero()[0]
    _hold(len(wrong) == 0, "M2", f"holders of blocks {wrong[:8].tolist()} are not their occurrences in tables")


def writers_are_exclusive(state: State) -> None:
    """M3: a place that the newest step writes belongs to one scheduled row, in a page of its table that no other row writes."""
    if not state.in_flight:
        return
    scheduled, rows, size, groups = state.in_flight[-1], state.rows, state.config.block_size, state.config.group_count
    row_of = {id_: row for row, id_ in enumerate(rows.id.tolist())}
    table_at, blocks, data, written = rows.table_at.tolist(), rows.blocks.tolist(), state.tables.arena.data, []
    for id_, start, count in zip(scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist()):
        if id_ in row_of:
            row, last = row_of[id_], -(-(start + count) // size)
            _hold(
                start >= 0 and last <= blocks[row],
                "M3",
                f"request {id_} writes outside its table in step {scheduled.step}",
            )
            written += data[table_at[row] + start // size * groups : table_at[row] + last * groups].tolist()
    if len(set(written)) < len(written):
        twice = next(block for block in written if written.count(block) > 1)
        raise LawBroken("M3", f"block {twice} is written by two requests in step {scheduled.step}")


def capacity_covers(state: State) -> None:
    """M4: a row holds exactly the blocks that its computed tokens need.

    With drafts, a row keeps the blocks that it took for drafts which were not kept: its next drafts need them.
    """
    rows, size = state.rows, state.config.block_size
    spare = spare_tokens(state.config)
    covers = (rows.blocks >= -(-rows.computed // size)) & (rows.blocks <= -(-(rows.computed + spare) // size))
    _hold(bool(covers.all()), "M4", "a row holds too few or too many blocks")


def drafts_are_bounded(state: State) -> None:
    """D2: drafts are within the engine's number, in entries that sample behind a single token."""
    speculation = state.config.speculation
    _hold((speculation is None) == (state.rows.drafting is None), "D2", "the rows do not go with the configuration")
    for scheduled in state.in_flight:
        given = "" if scheduled.drafts is None else f" with the drafts {scheduled.drafts.tolist()}"
        _hold(_drafts_are_bounded(speculation, scheduled), "D2", f"step {scheduled.step} may not be{given}")


def _drafts_are_bounded(speculation: Speculation | None, scheduled: StepInFlight) -> bool:
    drafts = scheduled.drafts
    if speculation is None or drafts is None:
        return speculation is None and drafts is None
    if not drafts.any():
        return True
    few = (drafts >= 0) & (drafts <= speculation.num_speculative_tokens)
    fits = (drafts == 0) | (scheduled.counts == drafts + 1) & scheduled.samples
    return bool((few & fits).all())


def steps_continue(state: State) -> None:
    """D1: with every draft kept, a row's steps in flight compute one position after another up to `computed`, and TENTATIVE
    counts their drafts: what a commit takes back it takes back everywhere."""
    if state.rows.drafting is None:
        return
    ends, drafts_of = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for scheduled in state.in_flight:
        owners = zip(scheduled.ids.tolist(), scheduled.preemption_counts.tolist())
        drafts = [] if scheduled.drafts is None else scheduled.drafts.tolist()
        for owner, start, count, drafted in zip(owners, scheduled.starts.tolist(), scheduled.counts.tolist(), drafts):
            _hold(ends.get(owner, start) == start, "D1", f"request {owner[0]} continues at {start}, not at {ends.get(owner)}")
            ends[owner], drafts_of[owner] = start + count, drafts_of.get(owner, 0) + drafted
    columns_ = state.rows.id, state.rows.preemption_count, state.rows.computed, state.rows.drafting[fields.TENTATIVE]
    for id_, preemptions, computed, tentative in zip(*(column.tolist() for column in columns_)):
        due = ends.get((id_, preemptions), computed), drafts_of.get((id_, preemptions), 0)
        _hold(due == (computed, tentative), "D1", f"request {id_} counts {(computed, tentative)} where {due} are in flight")


def queue_is_sorted_and_distinct(state: State) -> None:
    """M5, Y3: a request is once in the queue, at its place, or once in the batch; together these are all live requests."""
    queued, running = [entry.id for entry in state.waiting], state.rows.id.tolist()
    _hold(queued == sorted(queued), "M5", "the queue is not in order of arrival")
    live = set(queued) | set(running)
    _hold(len(live) == len(queued) + len(running), "M5", "a request waits twice or waits and runs")
    _hold(len(live) == len(state.requests), "Y3", f"{len(live)} requests live, {len(state.requests)} remembered")


def bounds_hold(state: State) -> None:
    """S1: tokens of a step, rows and chunks respect their limits. Only the newest step is checked."""
    config = state.config
    _hold(len(state.rows) <= config.max_num_seqs, "S1", f"{len(state.rows)} rows")
    if not state.in_flight:
        return
    scheduled = state.in_flight[-1]
    total = int(scheduled.counts.sum())
    _hold(total <= config.max_num_batched_tokens, "S1", f"step {scheduled.step} is over the token budget")
    _hold(total == scheduled.tokens, "S1", f"step {scheduled.step} has {total} tokens and counts {scheduled.tokens}")
    _hold(len(scheduled.counts) > 0 and int(scheduled.counts.min()) >= 1, "S1", f"step {scheduled.step} has an empty chunk")
    if config.long_prefill_token_threshold:
        _hold(
            int(scheduled.counts.max()) <= config.long_prefill_token_threshold,
            "S1",
            f"step {scheduled.step} has a chunk over the threshold",
        )
    _hold(
        config.chunked_prefill or bool(scheduled.samples.all()),
        "S1",
        f"step {scheduled.step} computes a part of a prompt",
    )


def progress_is_ordered(state: State) -> None:
    """S2: hashed blocks <= computed <= known + placeholders, and nothing beyond the limit."""
    rows, size = state.rows, state.config.block_size
    ahead = rows.computed > rows.known + rows.placeholders
    early = rows.hashed_blocks * size > np.minimum(rows.computed, rows.known)
    ended = rows.known >= rows.limit
    if not (ahead | early | ended).any():
        return
    _hold(not ahead.any(), "S2", "a row computed more than it knows")
    _hold(not early.any(), "S2", "a row hashed too many blocks")
    _hold(not ended.any(), "S2", "a row is at its limit and still runs")


def full_blocks_are_hashed(state: State) -> None:
    """P1: a row has hashed its full blocks, whose tokens are all known and computed, and none of its other blocks has a hash."""
    rows, prefix_index = state.rows, state.pool.prefix_index
    if not state.config.prefix_caching or len(rows) == 0:
        return
    full = np.minimum(rows.computed, rows.known) // state.config.block_size
    _hold(
        bool((rows.hashed_blocks == full).all()),
        "P1",
        f"rows have hashed {rows.hashed_blocks.tolist()} of {full.tolist()} full blocks",
    )
    if len(prefix_index) == 0:
        return
    for block in _unfinished(state, full).tolist():
        _hold(prefix_index.hash_of(block) is None, "P1", f"block {block} has a name and is not complete")


def _unfinished(state: State, full: np.ndarray) -> np.ndarray:
    """The pages that the rows hold behind their `full` blocks (int64[R] -> int32[n])."""
    rows, groups = state.rows, state.config.group_count
    if not state.config.windows:
        return _ranges(state.tables, rows.table_at + full, rows.blocks - full)
    first = np.maximum(first_kept(state.config, rows.computed_at_least), full[:, None])
    parts = [
        row_table(state, row)[begin * groups + group :: groups]
        for row, begins in enumerate(first.tolist())
        for group, begin in enumerate(begins)
    ]
    return np.concatenate(parts)


def placeholders_match(state: State) -> None:
    """A2: a row's placeholders are the samples that steps in flight owe it at its current preemption count."""
    owed: dict[tuple[int, int], int] = {}
    for scheduled in state.in_flight:
        samples = scheduled.samples
        each = np.ones(len(samples), np.int64) if scheduled.drafts is None else scheduled.drafts + 1
        columns_ = scheduled.ids, scheduled.preemption_counts, each
        for id_, preemptions, count in zip(*(column[samples].tolist() for column in columns_)):
            owed[id_, preemptions] = owed.get((id_, preemptions), 0) + count
    rows = state.rows
    for id_, preemptions, placeholders in zip(rows.id.tolist(), rows.preemption_count.tolist(), rows.placeholders.tolist()):
        if placeholders != owed.get((id_, preemptions), 0):
            raise LawBroken(
                "A2",
                f"request {id_} has {placeholders} placeholders where {owed.get((id_, preemptions), 0)} tokens are due",
            )


def prefix_index_is_mutual(state: State) -> None:
    """P1: the two sides of the prefix index agree."""
    _hold(state.pool.prefix_index.is_mutual(), "P1", "a block is known by another name")


def hashes_are_kept(state: State) -> None:
    """Y1: the incremental hashes of block tables, holders and the order of free pages match their contents."""
    pool, rows = state.pool, state.rows
    _hold(
        pool.status.hash == columns.impl.array_hash(pool.status.values()),
        "Y1",
        "the sum of the blocks' status is another",
    )
    for row, kept in enumerate(rows.table_hash.tolist()):
        table = row_table(state, row).astype(np.int64)
        _hold(columns.impl.array_hash(table) == kept & WORD, "Y1", f"the sum of row {row}'s block table is another")


def queue_hash_is_kept(state: State) -> None:
    """Y1: the incremental hash of the queue matches the queue."""
    _hold(state.waiting_hash == queue_hash(state.waiting), "Y1", "the sum of the waiting queue is another")


def steps_are_in_order(state: State) -> None:
    """A3: steps in flight are exactly [committed, planned), within the pipeline's depth."""
    steps = [scheduled.step for scheduled in state.in_flight]
    _hold(steps == list(range(state.committed, state.planned)), "A3", f"steps in flight are {steps}")
    _hold(len(steps) <= state.config.pipeline_depth, "A3", f"{len(steps)} steps in flight")


def histories_begin_with_prompts(state: State) -> None:
    """S2: a row's known tokens begin with its prompt."""
    rows = state.rows
    if len(rows) == 0:
        return
    begins = _ranges(state.tokens, rows.tokens_at, rows.prompt).tobytes()
    prompts = [state.requests[id_].prompt for id_ in rows.id.tolist()]
    if begins == b"".join(prompts):
        return
    for id_, at, prompt in zip(rows.id.tolist(), rows.tokens_at.tolist(), prompts):
        found = extents.read(state.tokens, at, len(prompt) // 4).tobytes()
        _hold(found == prompt, "S2", f"request {id_} lost its prompt")
    raise LawBroken("S2", "a row's prompt has another length than its request's")


def adapters_are_resident(state: State) -> None:
    """R1: a slot holds the adapter of each running request, and no two slots hold the same one."""
    resident, count = _resident(state), sum(slot is not None for slot in state.slots)
    missing = sorted(held(state) - resident)
    _hold(not missing, "R1", f"requests run with the adapters {missing}, which are in no slot")
    _hold(len(state.slots) == state.config.max_loras, "R1", f"{len(state.slots)} slots of {state.config.max_loras}")
    _hold(len(resident) == count, "R1", "two slots hold one adapter")


def _resident(state: State) -> set[str]:
    return {slot.digest for slot in state.slots if slot is not None}


def roots_are_of_one_adapter(state: State) -> None:
    """R2: requests with different adapters, or with one and without, have different roots, so that they share no block."""
    adapter_of: dict[bytes, str] = {}
    for id_, request in state.requests.items() if state.slots else ():
        first = adapter_of.setdefault(request.root, request.sampling.adapter)
        _hold(first == request.sampling.adapter, "R2", f"request {id_} would share blocks with another adapter's")


def weights_root_the_names(state: State) -> None:
    """W1: the name of a request's first block comes from its own root and the version of the weights, so that no block of other
    weights is a hit."""
    if not state.config.prefix_caching:
        return
    size, rows = state.config.block_size, state.rows
    for entry in state.waiting:
        root = root_of(state, state.requests[entry.id])
        right = leading_hashes(root, entry.tokens, size, 1)
        _hold(entry.block_hashes[:1] == right, "W1", f"request {entry.id} waits with names that other weights have")
    for row in (rows.hashed_blocks == 0).nonzero()[0].tolist():
        id_ = int(rows.id[row])
        root = root_of(state, state.requests[id_])
        _hold(rows.block_hash(row) == root, "W1", f"request {id_} names its blocks as other weights do")


def tier_is_bounded(state: State) -> None:
    """K3: the disk tier holds no more blocks or snapshots than its capacity, and each once. K2: a request has at most one transfer,
    and the pages that it fills have no name and no other owner."""
    if state.tier is None:
        return
    prefix_index = state.pool.prefix_index
    for tier in filter(None, (state.tier, state.tier.snapshots)):
        disk = tier.disk
        _hold(len(disk) <= tier.capacity, "K3", f"{len(disk)} blocks or snapshots on a disk tier of {tier.capacity}")
        mirrored = all(disk.name_at.get(stamp) == name for name, stamp in disk.stamp_of.items())
        _hold(mirrored and len(disk.name_at) == len(disk), "K3", "the two sides of the disk index disagree")
    owners = [each.request for each in state.tier.transfers]
    _hold(len(set(owners)) == len(owners), "K2", "a request has two transfers at once")
    filled = [page for each in state.tier.transfers for page in each.pages[each.hits :]]
    _hold(all(prefix_index.hash_of(page) is None for page in filled), "K2", "a page that is being read has a name")
    _hold(all(state.pool.ref[page] == 1 for page in filled), "K2", "a page that is being read is shared")


def pins_are_bounded(state: State) -> None:
    """K5: pins hold at most their share of the pages. Each is of a page that may be a hit, and ends later than the clock."""
    if (pins := state.pool.pins) is None:
        return
    ends, most = pins.ends.values(), state.config.pinned_pages_max
    pages = np.flatnonzero(ends)
    _hold(len(pages) == pins.count, "K5", f"{len(pages)} pages are pinned, {pins.count} are counted")
    _hold(pins.count <= most, "K5", f"{pins.count} pages are pinned of {most} at most")
    named = state.pool.prefix_index.count(pages.tolist())
    _hold(named == pins.count, "K5", f"{pins.count - named} pinned pages have no name")
    late = pins.count and pins.next_end() <= state.clock
    _hold(not late, "K5", f"a pin lasts beyond its end, and the clock has ticked {state.clock}")
    over = pins.expired + pins.displaced + pins.yielded + pins.dropped
    _hold(pins.pinned == pins.count + over, "K5", f"{pins.pinned} pages were pinned, {over} pins are over and {pins.count} are not")
    _hold(pins.ends.hash == columns.impl.array_hash(ends), "Y1", "the sum of the pins' ends is another")


def clients_have_their_requests(state: State) -> None:
    """F3: every live request is counted once, as a row or in the queue of its client."""
    if state.clients is None:
        return
    if (alone := state.clients.alone) is not None:
        others = {key_of(each) for _, each in state.requests.items()} - {alone}
        nothing = not (len(state.clients.live) or state.clients.idle or state.clients.classes)
        return _hold(nothing and not others, "F3", f"client {alone} is alone, and {others or state.clients} is there too")
    rows: Counter[ClientKey] = Counter(key_of(state.requests[id_]) for id_ in state.rows.id.tolist())
    queues: dict[ClientKey, tuple[int, ...]] = {}
    for entry in state.waiting:
        key = key_of(state.requests[entry.id])
        queues[key] = (*queues.get(key, ()), entry.id)
    found = {key: (client.rows, client.queue) for key, client in state.clients.live.items()}
    right = {key: (rows[key], queues.get(key, ())) for key in {**rows, **queues}}
    _hold(found == right, "F3", f"clients have {found} where {right} lives")
    counts = {priority: group.live for priority, group in state.clients.classes.items()}
    _hold(counts == Counter(priority for priority, _ in right), "F3", f"live clients by priority are {counts}")
    few = len(state.clients.idle) <= IDLE_CLIENTS_MAX and {priority for priority, _ in state.clients.idle} <= counts.keys()
    _hold(few and not state.clients.idle.keys() & right.keys(), "F3", f"idle clients are {state.clients.idle}")


def arrivals_are_accounted(state: State) -> None:
    """Y3: arrived = finished + aborted + live."""
    ended = state.counters.finished + state.counters.aborted
    _hold(state.next_id == ended + len(state.requests), "Y3", f"{state.next_id} arrived, {ended} ended, {len(state.requests)} live")


ALL = (
    bounds_hold, progress_is_ordered, capacity_covers, steps_are_in_order, arrivals_are_accounted, free_and_held_are_all,
    holders_are_counted, hashes_are_kept, writers_are_exclusive, queue_hash_is_kept, queue_is_sorted_and_distinct,
    full_blocks_are_hashed, placeholders_match, drafts_are_bounded, steps_continue, prefix_index_is_mutual, sought.searches_wait,
    histories_begin_with_prompts, adapters_are_resident, roots_are_of_one_adapter, weights_root_the_names, tier_is_bounded,
    pins_are_bounded, clients_have_their_requests, limits_are_lowered, encoding_is_bounded, *recurrent_laws.ALL,
)  # fmt: skip
CHEAP = (
    bounds_hold, progress_is_ordered, capacity_covers, steps_are_in_order, arrivals_are_accounted, adapters_are_resident,
)  # fmt: skip
