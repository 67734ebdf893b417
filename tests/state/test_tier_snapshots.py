"""Snapshots of recurrent layers in the disk tier: what a transfer reads of a prefix, what becomes a hit, and who holds which page."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.log.log_plain import WIDTH_MAX
from vnext.log.snapshot import decode, encode, load, snapshot
from vnext.sched.tiering import evictions, next_cancellation, next_promotion
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    BlocksPromoted,
    EngineRecovered,
    PrefixCacheReset,
    PromotionEnded,
    SnapshotsChanged,
    TierChanged,
    TierOpened,
)

PROMPT = list(range(1, 42))
BLOCKS, EDGES = 10, (4, 8, 10)
"""Full blocks of PROMPT behind which one may begin, and those of them that end at a snapshot."""


def engine(**changes: object) -> Engine:
    usual = {"page_count": 128, "max_model_len": 128, "state_pages": 24, "snapshot_interval": 16}
    made = Engine(**usual | changes)
    made.fold(TierOpened(capacity=64, snapshots_max=8))
    return made


def arrived(made: Engine, blocks: int = BLOCKS, edges: tuple[int, ...] = EDGES) -> Engine:
    """PROMPT's request waits, and so many of its blocks and these of its snapshots are on disk."""
    made.arrive(PROMPT, max_tokens=1)
    keys = made.state.waiting[-1].block_hashes
    made.fold(TierChanged(stored=b"".join(keys[:blocks])))
    made.fold(SnapshotsChanged(stored=b"".join(keys[edge - 1] for edge in edges)))
    return made


def promoted(made: Engine) -> BlocksPromoted:
    event = next_promotion(made.state)
    assert event is not None
    made.fold(event)
    return event


def started(made: Engine) -> int:
    """Where the newest request begins to compute."""
    id_ = made.state.next_id - 1
    count = made.plan()[id_]
    return made.field(id_, "computed") - count


@pytest.mark.parametrize(
    ("blocks", "edges", "read", "start"),
    [(10, (4, 8, 10), (10, 10), 40), (10, (4, 8), (8, 8), 32), (9, (4, 8, 10), (8, 8), 32), (5, (4,), (4, 4), 16)],
)
def test_a_request_goes_on_from_the_last_snapshot_that_blocks_reach(
    blocks: int, edges: tuple[int, ...], read: tuple[int, int], start: int
) -> None:
    made = arrived(engine(), blocks, edges)
    event = promoted(made)
    assert (event.count, event.edge) == read and next_promotion(made.state) is None and made.plan() == {}
    made.fold(PromotionEnded(transfer=0, count=read[0] + 1))
    assert started(made) == start


@pytest.mark.parametrize("edges", [(), (10,)])
def test_blocks_without_a_snapshot_are_not_read(edges: tuple[int, ...]) -> None:
    made = arrived(engine(), 9, edges)
    assert next_promotion(made.state) is None and started(made) == 0


@pytest.mark.parametrize("count", [0, 3, 10])
def test_blocks_that_came_without_their_snapshot_are_no_hit(count: int) -> None:
    made = arrived(engine())
    promoted(made)
    made.fold(PromotionEnded(transfer=0, count=count))
    assert made.state.pool.states.free == 24 and started(made) == 0


def test_a_snapshot_alone_comes_back() -> None:
    made = engine(state_pages=4, max_num_seqs=1)
    for prompt in (PROMPT, [50] * 9, [60] * 9):
        made.arrive(prompt, 1)
        made.run_out()
    event = promoted(arrived(made))
    assert (event.count, event.edge) == (0, 10)
    with pytest.raises(IllegalEvent, match="ends with 2 blocks"):
        made.fold(PromotionEnded(transfer=0, count=2))
    made.fold(PromotionEnded(transfer=0, count=1))
    assert started(made) == 40


def test_blocks_alone_come_back_where_memory_has_the_snapshot() -> None:
    made = engine(page_count=12, max_model_len=48)
    for prompt in (PROMPT, *([first] * 13 for first in range(50, 53))):
        made.arrive(prompt, 1)
        made.run_out()
    kept = len(made.state.pool.states.prefix_index)
    event = promoted(arrived(made))
    assert event.edge == 0 and event.count > 0 and len(made.state.pool.states.prefix_index) == kept
    made.fold(PromotionEnded(transfer=0, count=event.count))
    assert started(made) == 40


def test_a_transfer_gives_its_state_page_to_a_request_that_lacks_it() -> None:
    made = engine(state_pages=4)
    made.arrive([50] * 9, 1)
    made.run_out()
    promoted(arrived(made))
    assert next_cancellation(made.state) is None
    made.arrive([60] * 9, 1)
    assert next_cancellation(made.state) is None, "three pages are free"
    made.abort(made.state.next_id - 1)
    made.arrive([50] * 9, 1)
    event = next_cancellation(made.state)
    assert event == PromotionEnded(transfer=0), "it goes on from a snapshot, which must stay until it is copied"


def test_nothing_is_read_for_a_request_that_would_lack_state_pages() -> None:
    made = engine(state_pages=6)
    made.arrive([50] * 9, 9)
    made.plan()
    assert next_promotion(arrived(made).state) is None, "three pages are free, and it will need all three"


def test_a_recovery_and_a_reset_end_transfers_and_a_reset_forgets_snapshots() -> None:
    made = arrived(engine())
    promoted(made)
    made.fold(EngineRecovered(cause="rank 0 was killed"))
    assert made.state.pool.states.free == 24 and len(made.state.tier.snapshots.disk) == len(EDGES)
    event = promoted(made)
    made.fold(PrefixCacheReset())
    made.fold(PromotionEnded(transfer=event.transfer, count=event.count + 1))
    assert len(made.state.tier.snapshots.disk) == 0 and started(made) == 0


def test_a_log_s_snapshot_has_both_and_a_transfer_s_state_page() -> None:
    made = arrived(engine())
    promoted(made)
    loaded = load(decode(encode(snapshot(made.state), WIDTH_MAX)), made.state.config)
    assert digest(loaded) == digest(made.state) and loaded.tier.transfers == made.state.tier.transfers
    assert list(loaded.tier.snapshots.disk.oldest_first()) == list(made.state.tier.snapshots.disk.oldest_first())


def test_the_oldest_snapshots_leave_but_for_those_that_memory_has() -> None:
    made = engine()
    made.arrive(PROMPT, 1)
    keys = made.state.waiting[0].block_hashes
    made.run_out()
    made.fold(SnapshotsChanged(stored=keys[3] + b"".join(bytes([place]) * 16 for place in range(7))))
    tier, states = made.state.tier.snapshots, made.state.pool.states
    assert evictions(tier, states, 2) == ((bytes(16), bytes([1]) * 16), (keys[3],))


def test_what_is_refused() -> None:
    made = arrived(engine())
    before = digest(made.state)
    refused = (
        SnapshotsChanged(gone=b"x" * 16), SnapshotsChanged(stored=b"".join(bytes([place]) * 16 for place in range(6))),
        BlocksPromoted(transfer=0, id=0, count=10), BlocksPromoted(transfer=0, id=0, count=10, edge=9),
        BlocksPromoted(transfer=0, id=0, count=0, edge=0), BlocksPromoted(transfer=0, id=0, count=11, edge=11),
        BlocksPromoted(transfer=0, id=0, count=-1, edge=-1),
    )  # fmt: skip
    for event in refused:
        with pytest.raises(IllegalEvent):
            made.fold(event)
    assert digest(made.state) == before
    with pytest.raises(IllegalEvent, match="needs snapshots"):
        engine(snapshot_interval=0)
    plain = Engine()
    with pytest.raises(IllegalEvent, match="needs recurrent layers"):
        plain.fold(TierOpened(capacity=1, snapshots_max=1))
    plain.fold(TierOpened(capacity=9))
    plain.arrive(PROMPT[:13], 1)
    for event in (SnapshotsChanged(), BlocksPromoted(transfer=0, id=0, count=1, edge=1)):
        with pytest.raises(IllegalEvent, match="without recurrent layers"):
            plain.fold(event)
