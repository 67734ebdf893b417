"""Every law notices its own violation: a wrong state is built on purpose, and the law is named."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from core_drive import Engine
from msgspec.structs import replace

from vnext.state import laws, pool as pools
from vnext.state.config import Speculation
from vnext.state.errors import LawBroken
from vnext.state.facilities import recurrent_laws
from vnext.state.laws import ALL, CHEAP, check, check_cheap
from vnext.state.pool import Pool
from vnext.state.state import Encoding, Slot, Sought, State, Tier, Transfer
from vnext.state.store import columns, columns_numpy, extents, fields
from vnext.state.store.clients import Client, ClientClass, Clients
from vnext.state.store.disk_index import disk_index_of
from vnext.state.store.pins import no_pins
from vnext.state.store.prefix_index import PrefixIndex
from vnext.state.store.rows import Rows
from vnext.state.store.versions import VersionedArray, VersionedMap


def busy() -> State:
    """Three rows (two of them share a prefix of two blocks), one waiting request, one step in flight, freed blocks."""
    engine = Engine(pipeline_depth=2, max_num_seqs=3, page_count=12)
    engine.arrive([1] * 8, max_tokens=1)
    engine.step()
    for prompt in ([1] * 9, [1] * 8 + [2], [3] * 5, [4] * 3):
        engine.arrive(prompt, 6)
    engine.plan()
    assert engine.running == [1, 2, 3] and engine.waiting == [4] and engine.blocks(1)[:2] == engine.blocks(2)[:2]
    check(engine.state)
    return engine.state


def with_cell(state: State, field: int, row: int, value: int) -> State:
    cells = state.rows.cells.copy()
    cells[field, row] = value
    return replace(state, rows=Rows(cells))


def with_pool(state: State, **changes: object) -> State:
    changes = {name: VersionedArray(value) if isinstance(value, np.ndarray) else value for name, value in changes.items()}
    return replace(state, pool=replace(state.pool, **changes))


def with_step_in_flight(state: State, **changes: object) -> State:
    return replace(state, in_flight=(*state.in_flight[:-1], replace(state.in_flight[-1], **changes)))


def with_adapter(state: State, root: bytes = b"another root, 16") -> State:
    """An engine with two slots, of which the first holds the adapter of row 0's request."""
    request = state.requests[int(state.rows.id[0])]
    adapted = replace(request, root=root, sampling=replace(request.sampling, adapter="a"))
    requests, slots = state.requests.with_items([(request.id, adapted)]), (Slot("tenant", "a", 0), None)
    config = replace(state.config, max_loras=2)
    return replace(state, config=config, slots=slots, requests=requests)


def with_tier(state: State, **changes: object) -> State:
    """A disk with two blocks."""
    tier = Tier(capacity=2, disk=disk_index_of((b"x" * 16, b"y" * 16)))
    return replace(state, tier=replace(tier, **changes))


def with_clients(state: State, **changes: object) -> State:
    """One client, whose three requests run and whose fourth waits."""
    live = VersionedMap({(0, 0): Client(charged=0, rows=3, queue=(4,))})
    clients = Clients(live=live, idle={}, classes={0: ClientClass(live=1)})
    check(replace(state, clients=clients))
    return replace(state, clients=replace(clients, **changes))


def with_pins(state: State, ends: int = 2**30, page: int = -1, **changes: object) -> State:
    """One pin, of an indexed page that row 0 holds; its hold is not counted."""
    page = int(state.tables.arena.data[int(state.rows.table_at[0])]) if page < 0 else page
    pins = no_pins(state.pool.page_count).with_ends(np.array([page], np.int32), np.array([ends]))
    config = replace(state.config, pinned_kv_fraction=0.5)
    return replace(with_pool(state, pins=replace(pins, **changes)), config=config, clock=1)


def with_wrong_sum(state: State) -> State:
    pinned = with_pins(state)
    ends = VersionedArray(pinned.pool.pins.ends.values().copy(), 5)
    return with_pool(pinned, pins=replace(pinned.pool.pins, ends=ends))


def changed(values: np.ndarray, place: int, value: int) -> np.ndarray:
    copy = values.copy()
    copy[place] = value
    return copy


def queue_twice(state: State) -> State:
    """The head of the queue stands in it a second time, with its place changed to the later one and back: a double free."""
    pool = state.pool
    queue, at = extents.own(pool.queue, 1), pool.queue.used
    block = extents.read(queue, pool.head, 1)
    queue = extents.write(queue, slice(at, at + 1), block)
    return with_pool(state, queue=queue, free=pool.free + 1)


def other_block(state: State) -> State:
    """Row 2's table names a block of row 0."""
    return with_first_block(state, extents.read(state.tables, int(state.rows.table_at[0]) + 2, 1).copy())


def no_block(state: State) -> State:
    """Row 2's table names a block that does not exist."""
    return with_first_block(state, np.array([state.config.page_count], dtype=np.int32))


def with_first_block(state: State, block: np.ndarray) -> State:
    at = int(state.rows.table_at[2])
    return replace(state, tables=extents.write(state.tables, slice(at, at + 1), block))


def with_drafting(state: State, tentative: int, drafts: int = 0) -> State:
    """An engine that speculates, with as many drafts in flight in each row and in each entry."""
    count, config = len(state.rows), replace(state.config, speculation=Speculation(num_speculative_tokens=3))
    rows = replace(state.rows, drafting=np.array([[tentative] * count, [512] * count]))
    steps = [replace(each, drafts=np.full(len(each.samples), drafts)) for each in state.in_flight]
    return replace(state, config=config, rows=rows, in_flight=tuple(steps))


def first_held(state: State) -> int:
    return int(np.flatnonzero(state.pool.ref)[0])


def first_free(state: State) -> int:
    return int(np.flatnonzero(state.pool.ref == 0)[0])


def bad_prompt(state: State) -> State:
    at = int(state.rows.tokens_at[0])
    return replace(state, tokens=extents.write(state.tokens, slice(at, at + 1), np.array([77], dtype=np.int32)))


def name_of_other(state: State) -> State:
    """Two keys trade their blocks on one side of the table only."""
    (first, block), (second, other) = list(state.pool.prefix_index.blocks().items())[:2]
    return with_pool(
        state,
        prefix_index=PrefixIndex(
            {**state.pool.prefix_index.blocks(), first: other, second: block}, state.pool.prefix_index.keys()
        ),
    )


def name_from_behind(state: State) -> State:
    """A key's block is counted from the end, where the other side has it."""
    key, block = next(iter(state.pool.prefix_index.blocks().items()))
    blocks = {**state.pool.prefix_index.blocks(), key: block - state.config.page_count}
    return with_pool(state, prefix_index=PrefixIndex(blocks, state.pool.prefix_index.keys()))


def name_of_a_tail(state: State) -> State:
    """Row 2's last block, half full, is offered for reuse."""
    block = int(extents.read(state.tables, int(state.rows.table_at[2] + state.rows.blocks[2]) - 1, 1)[0])
    return with_pool(state, prefix_index=state.pool.prefix_index.insert([(b"a tail", block)]))


def part_of_a_prompt(state: State) -> State:
    """Without chunked prefill a step computes whole prompts only."""
    samples = changed(state.in_flight[-1].samples, 0, False)
    return replace(with_step_in_flight(state, samples=samples), config=replace(state.config, chunked_prefill=False))


def shared_write(state: State) -> State:
    """Row 1 writes from its first position, into blocks that it shares with row 0, which writes there too."""
    entries = state.in_flight[-1].entries.copy()
    entries[2, :2], entries[3, :2] = 4, 5
    return with_step_in_flight(state, entries=entries)


def with_counts(state: State, counts: np.ndarray) -> State:
    """The newest step computes so many tokens of each of its requests."""
    entries = state.in_flight[-1].entries[:, : len(counts)].copy()
    entries[3] = counts
    return with_step_in_flight(
        state, entries=entries, tokens=int(counts.sum()), samples=state.in_flight[-1].samples[: len(counts)]
    )


def with_status(state: State, block: int, value: int) -> State:
    return with_pool(state, status=state.pool.status.set(np.array([block]), np.array([value])))


def sum_of_another(state: State) -> State:
    """The blocks' sum is one that other blocks would have."""
    return with_pool(state, status=VersionedArray(state.pool.status.values().copy(), state.pool.status.hash + 1))


def recurring() -> State:
    """Three rows with snapshots, of which the last one has started from that of the first."""
    engine = Engine(pipeline_depth=2, state_pages=16, snapshot_interval=8)
    for prompt in ([1] * 9, [2] * 5):
        engine.arrive(prompt, 9)
    for _ in range(2):
        engine.plan()
        engine.step(7)
    engine.arrive([1] * 10, 2)
    engine.plan()
    assert engine.running == [0, 1, 2] and engine.state.rows.recurrent[fields.NEWEST_EDGE].tolist() == [8, 4, 0]
    check(engine.state)
    return engine.state


def with_line(line: int, row: int, value: int) -> State:
    state = recurring()
    recurrent = state.rows.recurrent.copy()
    recurrent[line, row] = value
    return replace(state, rows=replace(state.rows, recurrent=recurrent))


def with_state_pool(change: Callable[[Pool], Pool]) -> State:
    state = recurring()
    return replace(state, pool=replace(state.pool, states=change(state.pool.states)))


def with_pinned_state(share: float) -> State:
    """A snapshot is pinned and its block is not, where pins may hold this share."""
    found = with_state_pool(lambda pool: pools.pin(pool, np.array([row_page(fields.NEWEST)], np.int32), np.array([2**30]), 16))
    return replace(found, config=replace(found.config, pinned_kv_fraction=share))


def with_copies(*pairs: tuple[int, int]) -> State:
    state = recurring()
    return with_step_in_flight(state, copies=replace(state.in_flight[-1].copies, before=np.array(pairs)))


def named(pool: Pool, page: int) -> Pool:
    return replace(pool, prefix_index=pool.prefix_index.insert([(b"another snapshot", page)]))


def row_page(line: int, row: int = 0) -> int:
    return int(recurring().rows.recurrent[line, row])


Break = Callable[[State], State]
BREAKS: list[tuple[str, Callable[[State], None], Break]] = [
    ("M1", laws.free_and_held_are_all, lambda s: with_pool(s, free=s.pool.free + 1)),
    ("M1", laws.free_and_held_are_all, queue_twice),
    ("M1", laws.free_and_held_are_all, lambda s: with_pool(s, kept=s.pool.kept + 1)),
    ("M1", laws.free_and_held_are_all, lambda s: with_pool(s, head=s.pool.head + 1, free=s.pool.free - 1)),
    ("M1", laws.free_and_held_are_all, lambda s: with_status(s, first_free(s), -1)),
    ("M2", laws.holders_are_counted, lambda s: with_status(s, first_held(s), -9)),
    ("M2", laws.holders_are_counted, lambda s: with_status(s, first_free(s), -1)),
    ("M2", laws.holders_are_counted, lambda s: with_status(s, first_held(s), 3)),
    ("M2", laws.holders_are_counted, other_block),
    ("M2", laws.holders_are_counted, no_block),
    ("M3", laws.writers_are_exclusive, shared_write),
    ("M3", laws.writers_are_exclusive, lambda s: with_cell(s, fields.BLOCKS, 0, 0)),
    ("M4", laws.capacity_covers, lambda s: with_cell(s, fields.BLOCKS, 0, int(s.rows.blocks[0]) + 1)),
    ("M4", laws.capacity_covers, lambda s: with_cell(s, fields.BLOCKS, 0, int(s.rows.blocks[0]) - 1)),
    ("M5", laws.queue_is_sorted_and_distinct, lambda s: replace(s, waiting=s.waiting * 2)),
    ("M5", laws.queue_is_sorted_and_distinct, lambda s: replace(s, waiting=(replace(s.waiting[0], id=1),))),
    ("M5", laws.queue_is_sorted_and_distinct, lambda s: with_cell(s, fields.ID, 0, 2)),
    ("M5", laws.queue_is_sorted_and_distinct, lambda s: replace(s, waiting=(replace(s.waiting[0], id=9), *s.waiting))),
    ("Y3", laws.queue_is_sorted_and_distinct, lambda s: replace(s, waiting=())),
    ("Y3", laws.queue_is_sorted_and_distinct, lambda s: replace(s, requests=s.requests.without([1]))),
    ("S1", laws.bounds_hold, lambda s: replace(s, config=replace(s.config, max_num_seqs=2))),
    ("S1", laws.bounds_hold, lambda s: with_counts(s, s.in_flight[-1].counts + 30)),
    ("S1", laws.bounds_hold, lambda s: with_counts(s, changed(s.in_flight[-1].counts, 0, 0))),
    ("S1", laws.bounds_hold, lambda s: with_counts(s, np.empty(0, dtype=np.int64))),
    ("S1", laws.bounds_hold, lambda s: with_step_in_flight(s, tokens=1)),
    ("S1", laws.bounds_hold, lambda s: replace(s, config=replace(s.config, long_prefill_token_threshold=1))),
    ("S1", laws.bounds_hold, part_of_a_prompt),
    ("S2", laws.progress_is_ordered, lambda s: with_cell(s, fields.COMPUTED, 0, 99)),
    ("S2", laws.progress_is_ordered, lambda s: with_cell(s, fields.HASHED_BLOCKS, 0, 3)),
    ("S2", laws.progress_is_ordered, lambda s: with_cell(s, fields.LIMIT, 0, int(s.rows.known[0]))),
    ("S2", laws.histories_begin_with_prompts, bad_prompt),
    ("P1", laws.full_blocks_are_hashed, lambda s: with_cell(s, fields.HASHED_BLOCKS, 0, 1)),
    ("P1", laws.full_blocks_are_hashed, name_of_a_tail),
    ("A2", laws.placeholders_match, lambda s: with_cell(s, fields.PLACEHOLDERS, 0, 2)),
    ("A2", laws.placeholders_match, lambda s: with_cell(s, fields.PLACEHOLDERS, 0, 0)),
    ("A2", laws.placeholders_match, lambda s: with_cell(s, fields.PREEMPTION_COUNT, 0, 1)),
    ("D1", laws.steps_continue, lambda s: with_drafting(s, 1)),
    ("D1", laws.steps_continue, lambda s: with_drafting(with_cell(s, fields.COMPUTED, 0, 1), 0)),
    ("D2", laws.drafts_are_bounded, lambda s: with_drafting(s, 0, drafts=5)),
    ("D2", laws.drafts_are_bounded, lambda s: with_drafting(s, 0, drafts=1)),
    ("D2", laws.drafts_are_bounded, lambda s: with_step_in_flight(s, drafts=np.zeros(len(s.in_flight[-1].samples), np.int64))),
    ("A3", laws.steps_are_in_order, lambda s: with_step_in_flight(s, step=7)),
    ("A3", laws.steps_are_in_order, lambda s: replace(s, in_flight=())),
    ("A3", laws.steps_are_in_order, lambda s: replace(s, config=replace(s.config, pipeline_depth=0))),
    (
        "P1",
        laws.prefix_index_is_mutual,
        lambda s: with_pool(
            s, prefix_index=PrefixIndex(dict(list(s.pool.prefix_index.blocks().items())[1:]), s.pool.prefix_index.keys())
        ),
    ),
    ("P1", laws.prefix_index_is_mutual, name_of_other),
    ("P1", laws.prefix_index_is_mutual, name_from_behind),
    ("Y1", laws.queue_hash_is_kept, lambda s: replace(s, waiting_hash=s.waiting_hash + 1)),
    ("Y1", laws.queue_hash_is_kept, lambda s: replace(s, waiting=(replace(s.waiting[0], preemption_count=1),))),
    ("Y1", laws.hashes_are_kept, sum_of_another),
    ("Y1", laws.hashes_are_kept, lambda s: with_cell(s, fields.TABLE_HASH, 0, 5)),
    ("Y1", laws.hashes_are_kept, other_block),
    ("Y3", laws.arrivals_are_accounted, lambda s: replace(s, next_id=s.next_id + 1)),
    ("Y3", laws.arrivals_are_accounted, lambda s: replace(s, counters=replace(s.counters, finished=0))),
    ("R1", laws.adapters_are_resident, lambda state: replace(with_adapter(state), slots=(None, None))),
    ("R2", laws.roots_are_of_one_adapter, lambda state: with_adapter(state, state.requests[int(state.rows.id[1])].root)),
    ("K3", laws.tier_is_bounded, lambda s: with_tier(s, capacity=1)),
    ("K3", laws.tier_is_bounded, lambda s: with_tier(s, disk=replace(with_tier(s).tier.disk, name_at=VersionedMap({0: b"y" * 16})))),
    ("K2", laws.tier_is_bounded, lambda s: with_tier(s, transfers=(Transfer(0, 4, 0, (), (11,)), Transfer(1, 4, 0, (), (10,))))),
    ("K2", laws.tier_is_bounded, lambda s: with_tier(s, transfers=(Transfer(0, 4, 0, (), (int(s.tables.arena.data[0]),)),))),
    ("K2", laws.tier_is_bounded, lambda s: with_tier(s, transfers=(Transfer(0, 4, 0, (), (11,)),))),
    ("M2", laws.holders_are_counted, with_pins),
    ("K5", laws.pins_are_bounded, lambda s: with_pins(s, count=2)),
    ("K5", laws.pins_are_bounded, lambda s: replace(with_pins(s), config=s.config)),
    ("K5", laws.pins_are_bounded, lambda s: with_pins(s, page=11)),
    ("K5", laws.pins_are_bounded, lambda s: with_pins(s, ends=2**20)),
    ("K5", laws.pins_are_bounded, lambda s: with_pins(s, displaced=1)),
    ("Y1", laws.pins_are_bounded, lambda s: with_wrong_sum(s)),
    ("S9", laws.limits_are_lowered, lambda s: replace(s, lowered_from=s.config.max_num_batched_tokens)),
    ("E1", laws.encoding_is_bounded, lambda s: replace(s, encoding=Encoding(0, 0, 3, 2, 0))),
    ("E1", laws.encoding_is_bounded, lambda s: replace(s, encoding=Encoding(0, 0, 0, 2, 0))),
    ("E1", laws.encoding_is_bounded, lambda s: replace(s, encoding=Encoding(0, 0, 1, 2, s.planned + 1))),
    ("E1", laws.encoding_is_bounded, lambda s: replace(s, encoding=Encoding(s.next_id, 0, 1, 2, 0))),
    ("E5", laws.sought.searches_wait, lambda s: replace(s, sought=Sought((s.next_id,)))),
    ("E5", laws.sought.searches_wait, lambda s: replace(s, sought=Sought((0, 0)))),
    ("E5", laws.sought.searches_wait, lambda s: replace(s, sought=Sought((0,), ((0, ()),)))),
    ("E5", laws.sought.searches_wait, lambda s: replace(s, sought=Sought((int(s.rows.id[0]),)))),
    ("S9", laws.limits_are_lowered, lambda s: replace(s, lowered_from=9, config=replace(s.config, max_num_batched_tokens=0))),
    ("F3", laws.clients_have_their_requests, lambda s: with_clients(s, live=VersionedMap())),
    ("F3", laws.clients_have_their_requests, lambda s: with_clients(s, live=VersionedMap({(0, 0): Client(0, 3)}))),
    ("F3", laws.clients_have_their_requests, lambda s: with_clients(s, classes={0: ClientClass(live=2)})),
    ("F3", laws.clients_have_their_requests, lambda s: with_clients(s, idle={(1, 5): 3})),
    ("F3", laws.clients_have_their_requests, lambda s: with_clients(s, idle={(0, 0): 3})),
    ("F3", laws.clients_have_their_requests, lambda s: with_clients(s, idle={(0, number): 1 for number in range(1, 258)})),
    ("M2", laws.holders_are_counted, lambda s: with_tier(s, transfers=(Transfer(0, 4, 0, (), (11,)),))),
    ("N1", recurrent_laws.snapshots_are_of_their_tokens, lambda _: with_line(fields.NEWEST_EDGE, 0, 4)),
    ("N1", recurrent_laws.snapshots_are_of_their_tokens, lambda _: with_line(fields.DUE, 0, 4)),
    ("N1", recurrent_laws.snapshots_are_of_their_tokens, lambda _: with_state_pool(lambda pool: named(pool, row_page(fields.SPARE)))),
    ("N2", recurrent_laws.state_pages_are_of_one_row, lambda _: with_line(fields.LIVE, 0, row_page(fields.LIVE, 1))),
    ("N2", recurrent_laws.state_pages_are_of_one_row, lambda _: with_line(fields.SPARE, 1, -1)),
    ("N2", recurrent_laws.state_pages_are_of_one_row, lambda _: with_state_pool(lambda pool: named(pool, row_page(fields.LIVE)))),
    ("N2", recurrent_laws.state_pages_are_of_one_row, lambda s: replace(s, config=replace(s.config, state_pages=4))),
    ("N3", recurrent_laws.copies_do_not_alias, lambda _: with_copies((1, 2), (3, 2))),
    ("N3", recurrent_laws.copies_do_not_alias, lambda _: with_copies((2, 2))),
    ("N3", recurrent_laws.copies_do_not_alias, lambda _: with_copies((1, 2), (2, 3))),
    ("N4", recurrent_laws.state_pages_are_conserved, lambda _: with_line(fields.NEWEST, 0, 15)),
    ("N4", recurrent_laws.state_pages_are_conserved, lambda _: with_state_pool(lambda pool: replace(pool, free=pool.free + 1))),
    ("N4", recurrent_laws.state_pages_are_conserved, lambda _: with_state_pool(lambda pool: replace(pool, kept=pool.kept + 1))),
    ("N4", recurrent_laws.state_pages_are_conserved, lambda _: with_state_pool(lambda pool: replace(pool, head=pool.head + 1))),
    ("N5", recurrent_laws.pinned_snapshots_are_of_pinned_blocks, lambda _: with_pinned_state(0.0)),
    ("N5", recurrent_laws.pinned_snapshots_are_of_pinned_blocks, lambda _: with_pinned_state(0.9)),
    ("W1", laws.weights_root_the_names, lambda s: replace(s, waiting=(replace(s.waiting[0], block_hashes=(bytes(16),)),))),
]


@pytest.mark.parametrize(("name", "law", "break_it"), BREAKS)
def test_a_broken_law_is_named(name: str, law: Callable[[State], None], break_it: Break) -> None:
    broken = break_it(busy())
    with pytest.raises(LawBroken, match=f"law {name} broken") as caught:
        law(broken)
    assert caught.value.law == name
    with pytest.raises(LawBroken):
        check(broken)


@pytest.mark.parametrize("law", ALL)
def test_every_law_has_a_state_that_breaks_it(law: Callable[[State], None]) -> None:
    assert any(broken is law for _, broken, _ in BREAKS)


def test_cheap_laws_are_laws() -> None:
    assert set(CHEAP) <= set(ALL)
    check_cheap(busy())


@pytest.mark.parametrize(("name", "law", "break_it"), [one for one in BREAKS if one[1] in CHEAP])
@pytest.mark.parametrize("form", [columns_numpy, columns._columns or columns_numpy], ids=["numpy", "compiled"])
def test_the_quick_form_sees_every_cheap_law(
    form: object, name: str, law: Callable[[State], None], break_it: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "impl", form)
    with pytest.raises(LawBroken, match=f"law {name} broken") as caught:
        check_cheap(break_it(busy()))
    assert "quick form" not in str(caught.value), "the law that the quick form saw names it"


def test_laws_are_documented(root) -> None:
    text = (root / "docs" / "laws.md").read_text()
    for law in ALL:
        for name in law.__doc__.split(":")[0].split(", "):
            assert re.search(rf"^\| (.*, )?{name}\b", text, re.MULTILINE), f"docs/laws.md does not mention {name}"


def test_another_pool_state_is_not_an_error() -> None:
    """The laws hold in an empty engine, and after everything has gone."""
    engine = Engine()
    check(engine.state)
    engine.arrive([1, 2, 3])
    engine.run_out()
    check(engine.state)


def test_the_quick_form_looks_at_every_step_in_flight() -> None:
    engine = Engine(pipeline_depth=3)
    engine.arrive([1, 2, 3], 9)
    engine.plan(), engine.plan()
    state = engine.state
    check_cheap(state)
    with pytest.raises(LawBroken, match="law A3 broken"):
        check_cheap(with_step_in_flight(state, step=7))


def test_what_is_just_lawful_is_lawful() -> None:
    """S2 says that a row computes no more than it knows and waits for: that much it may, as far as this law goes."""
    state = busy()
    rows = state.rows
    laws.progress_is_ordered(with_cell(state, fields.COMPUTED, 0, int(rows.known[0] + rows.placeholders[0])))
    with pytest.raises(LawBroken, match="at its limit"):
        full = with_cell(state, fields.COMPUTED, 0, int(rows.known[0] + rows.placeholders[0]))
        laws.progress_is_ordered(with_cell(full, fields.LIMIT, 0, int(rows.known[0])))


def test_adapters_in_their_slots_are_lawful() -> None:
    state = with_adapter(busy())
    check_cheap(state)
    laws.adapters_are_resident(state)
    laws.roots_are_of_one_adapter(state)
    for slots in ((state.slots[0],) * 2, state.slots[:1]):
        with pytest.raises(LawBroken, match="R1"):
            laws.adapters_are_resident(replace(state, slots=slots))


def test_the_block_of_two_writers_is_named() -> None:
    """Row 0 writes a block of its own before the one that row 1 writes too."""
    broken = shared_write(busy())
    entries = broken.in_flight[-1].entries.copy()
    entries[2, 0], entries[3, 0] = 0, 9
    broken = with_step_in_flight(broken, entries=entries)
    shared = extents.read(broken.tables, int(broken.rows.table_at[0]) + 1, 1)[0]
    with pytest.raises(LawBroken, match=f"block {shared} is written by two requests"):
        laws.writers_are_exclusive(broken)


def test_a_single_row_has_to_seal_its_full_blocks_too() -> None:
    engine = Engine()
    engine.arrive([1] * 9, 6)
    engine.plan()
    laws.full_blocks_are_hashed(engine.state)
    assert len(engine.state.rows) == 1
    with pytest.raises(LawBroken, match="P1"):
        laws.full_blocks_are_hashed(with_cell(engine.state, fields.HASHED_BLOCKS, 0, 1))
