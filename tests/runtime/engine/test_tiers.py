"""The engine core's part of the disk tier: what it asks of ranks, and the events that it makes of their answers."""

from __future__ import annotations

import msgspec
import pytest

from tests.core_drive import Engine
from vnext.runtime.engine import tiers
from vnext.runtime.engine.tiers import WINDOW, TierTransfers, opening
from vnext.runtime.protocol.messages import BlocksRead, BlocksWritten, DiskFound, ModelFacts, RankReady
from vnext.runtime.transport.ring.broadcast import StoreBlocks, decode_events
from vnext.state.events import BlocksPromoted, PromotionEnded, SnapshotsChanged, TierChanged, TierOpened

PROMPT = list(range(1, 14))


class Asked(list[StoreBlocks]):
    """What was broadcast."""

    def __call__(self, message: bytes) -> None:
        self.extend(decode_events(message))


def served(engine: Engine, transfers: TierTransfers) -> list[object]:
    """Fold all events that there are, and have blocks written."""
    found = []
    while (event := transfers.next_event(engine.state)) is not None:
        engine.fold(event)
        found.append(event)
    transfers.ask(engine.state)
    return found


def opened(world_size: int = 1, capacity: int = 100, **config: int) -> tuple[Engine, TierTransfers, Asked]:
    engine, asked = Engine(**config), Asked()
    transfers = TierTransfers(world_size, asked, TierOpened(capacity=capacity))
    served(engine, transfers)
    return engine, transfers, asked


def written(wish: StoreBlocks, rank: int = 0, stored: bytes | None = None) -> BlocksWritten:
    return BlocksWritten(rank=rank, blocks=wish.blocks, stored=wish.blocks if stored is None else stored)


def test_blocks_are_written_when_they_are_complete_few_at_a_time():
    engine, transfers, asked = opened(page_count=32, max_num_batched_tokens=64)
    engine.arrive(list(range(1, 50)), max_tokens=1)
    keys = engine.state.waiting[0].block_hashes
    engine.plan()
    served(engine, transfers)
    assert [wish.blocks for wish in asked] == [b"".join(keys[:WINDOW])] and asked[0].pages == tuple(engine.blocks(0)[:WINDOW])
    assert served(engine, transfers) == [] and len(asked) == 1, "one at a time"
    transfers.answered(written(asked[0]), engine.state)
    assert served(engine, transfers) == [TierChanged(stored=b"".join(keys[:WINDOW]))]
    assert asked[1].blocks == b"".join(keys[WINDOW:])


def test_the_blocks_of_the_very_first_step_are_written_too():
    engine, asked = Engine(), Asked()
    transfers = TierTransfers(1, asked, TierOpened(capacity=9))
    engine.arrive(PROMPT, max_tokens=1)
    engine.plan()
    served(engine, transfers)
    assert len(asked[0].pages) == 3


def test_what_left_memory_before_its_turn_is_not_written():
    engine, transfers, asked = opened(page_count=4, max_model_len=16)
    for first in (1, 50):
        engine.arrive([first] * 9, max_tokens=1)
        engine.step(token=7)
        engine.arrive([first + 1] * 13, max_tokens=1)
        engine.step(token=7)
    served(engine, transfers)
    (wish,) = asked
    index = engine.state.pool.prefix_index
    assert [index.block_of(wish.blocks[at : at + 16]) for at in range(0, len(wish.blocks), 16)] == list(wish.pages)
    assert len(wish.pages) == len(index)


def test_a_block_counts_when_every_rank_has_it():
    engine, transfers, asked = opened(world_size=2)
    engine.arrive(PROMPT, max_tokens=1)
    engine.plan()
    served(engine, transfers)
    transfers.answered(written(asked[0], 1), engine.state)
    assert served(engine, transfers) == []
    transfers.answered(written(asked[0], 0, stored=asked[0].blocks[:32]), engine.state)
    assert served(engine, transfers) == [TierChanged(stored=asked[0].blocks[:32])]


def test_a_full_disk_ends_the_writing_and_nothing_else():
    engine, transfers, asked = opened()
    engine.arrive(PROMPT, max_tokens=3)
    engine.plan()
    served(engine, transfers)
    transfers.answered(written(asked[0], stored=b""), engine.state)
    assert served(engine, transfers) == []
    engine.commit(7)
    engine.arrive([60] * 9, max_tokens=1)
    assert engine.plan() and served(engine, transfers) == [] and len(asked) == 1
    assert transfers.stats(engine.state)["tier"].errors == 3


def read_back(engine: Engine, transfers: TierTransfers) -> BlocksPromoted:
    """A request whose three blocks are on disk alone begins its transfer."""
    engine.arrive(PROMPT, max_tokens=2)
    engine.fold(TierChanged(stored=b"".join(engine.state.waiting[0].block_hashes)))
    (event,) = served(engine, transfers)
    assert isinstance(event, BlocksPromoted)
    return event


def test_a_transfer_ends_with_what_all_ranks_have_read_and_a_damaged_block_leaves():
    engine, transfers, _ = opened(world_size=2)
    event = read_back(engine, transfers)
    keys = engine.state.waiting[0].block_hashes
    transfers.answered(BlocksRead(rank=0, transfer=event.transfer, count=3), engine.state)
    assert served(engine, transfers) == []
    transfers.answered(BlocksRead(rank=1, transfer=event.transfer, count=1, bad=keys[1]), engine.state)
    assert served(engine, transfers) == [PromotionEnded(transfer=event.transfer, count=1), TierChanged(gone=keys[1])]
    assert engine.plan() == {0: 9} and transfers.stats(engine.state)["tier"].damaged == 1


def test_a_disk_that_does_not_answer_is_given_up(monkeypatch):
    engine, transfers, _ = opened()
    event = read_back(engine, transfers)
    assert served(engine, transfers) == []
    monkeypatch.setattr(tiers, "PATIENCE_S", -1.0)
    assert served(engine, transfers) == [PromotionEnded(transfer=event.transfer)]
    transfers.answered(BlocksRead(rank=0, transfer=event.transfer, count=3), engine.state)
    assert served(engine, transfers) == [] and engine.plan() == {0: 13}
    assert transfers.stats(engine.state)["tier"].given_up == 1


def test_other_ranks_are_asked_anew():
    engine, transfers, asked = opened()
    engine.arrive(PROMPT, max_tokens=9)
    engine.plan()
    served(engine, transfers)
    transfers.begin_again(asked, ())
    transfers.answered(written(asked[0]), engine.state)
    assert served(engine, transfers) == []


def test_a_tier_ends_where_a_new_rank_has_no_disk():
    engine, transfers, asked = opened(world_size=2)
    read_back(engine, transfers)
    engine.recover()
    transfers.begin_again(asked, [ready(0, b""), ready(1, None)])
    assert served(engine, transfers) == [TierOpened(capacity=0)]
    assert not asked and engine.plan() == {0: 13}
    engine.commit(7)
    assert served(engine, transfers) == [] == asked and transfers.stats(engine.state)["tier"].capacity == 0
    transfers.begin_again(asked, [ready(0, b""), ready(1, b"")])
    assert served(engine, transfers) == []
    assert opening([ready(0, b"a" * 16), ready(1, None)], 10_000) is None


def ready(rank: int, names: bytes | None) -> RankReady:
    facts = ModelFacts(vocab_size=9, position_count_max=9, eos_token_ids=())
    disk = None if names is None else DiskFound(blocks=names, file_bytes=100)
    return RankReady(model=facts, rank=rank, page_count_max=1, block_bytes=1, model_digest="", environment={}, disk=disk)


@pytest.mark.parametrize(("disk_bytes", "names"), [(10_000, "bcd"), (400, "cd"), (0, "")])
def test_an_engine_starts_with_what_all_ranks_have(disk_bytes: int, names: str):
    ranks = [ready(0, b"".join(letter * 16 for letter in (b"a", b"b", b"c", b"d"))), ready(1, b"d" * 16 + b"c" * 16 + b"b" * 16)]
    event = opening(ranks, disk_bytes)
    assert event == TierOpened(capacity=disk_bytes // 200, blocks=b"".join(letter.encode() * 16 for letter in names))
    assert opening([msgspec.structs.replace(each, disk=None) for each in ranks], disk_bytes) is None


# ---- snapshots of recurrent layers -----------------------------------------------------------------------------------

STATES = {"page_count": 64, "max_model_len": 128, "state_pages": 24, "snapshot_interval": 16}


def with_snapshots(world_size: int = 1) -> tuple[Engine, TierTransfers, Asked]:
    engine, asked = Engine(**STATES), Asked()
    transfers = TierTransfers(world_size, asked, TierOpened(capacity=100, snapshots_max=9))
    served(engine, transfers)
    return engine, transfers, asked


def test_a_snapshot_is_written_when_its_request_has_gone_beyond_it_or_has_ended():
    engine, transfers, asked = with_snapshots()
    engine.arrive(list(range(1, 38)), max_tokens=9)
    keys = engine.state.waiting[0].block_hashes
    found, seen = [], 0
    while engine.state.requests or seen < len(asked):
        for wish in asked[seen:]:
            seen += 1
            assert all(engine.state.pool.states.prefix_index.hash_of(page) in wish.snapshots for page in wish.state_pages)
            newest = engine.state.rows.recurrent[1].tolist()
            assert not set(wish.state_pages) & set(newest), "the newest one may give way yet"
            transfers.answered(BlocksWritten(0, wish.blocks, wish.blocks, wish.snapshots, wish.snapshots), engine.state)
        found += [event for event in served(engine, transfers) if isinstance(event, SnapshotsChanged)]
        engine.step()
        served(engine, transfers)
    names = [event.stored for event in found]
    assert names[:3] == [keys[3], keys[7], keys[8]] and len(names) == 4, "each interval, the prompt's edge, the answer's last"
    assert transfers.stats(engine.state)["tier"].snapshots == 4


def test_a_snapshot_counts_when_every_rank_has_it():
    engine, transfers, asked = with_snapshots(world_size=2)
    engine.arrive(PROMPT, max_tokens=1)
    engine.run_out()
    served(engine, transfers)
    (wish,) = asked
    assert wish.snapshots and len(wish.state_pages) == 1
    transfers.answered(BlocksWritten(0, wish.blocks, wish.blocks, wish.snapshots, wish.snapshots), engine.state)
    assert served(engine, transfers) == []
    transfers.answered(BlocksWritten(1, wish.blocks, wish.blocks, wish.snapshots, b""), engine.state)
    assert served(engine, transfers) == [TierChanged(stored=wish.blocks)]
    assert transfers.stats(engine.state)["tier"].errors == 1


def test_a_snapshot_that_is_not_as_it_was_written_leaves_and_its_blocks_stay():
    engine, transfers, _ = with_snapshots()
    engine.arrive(PROMPT, max_tokens=2)
    keys = engine.state.waiting[0].block_hashes
    engine.fold(TierChanged(stored=b"".join(keys)))
    engine.fold(SnapshotsChanged(stored=keys[2]))
    assert served(engine, transfers) == [BlocksPromoted(transfer=0, id=0, count=3, edge=3)]
    transfers.answered(BlocksRead(rank=0, transfer=0, count=3, bad=keys[2]), engine.state)
    assert served(engine, transfers) == [PromotionEnded(transfer=0, count=3), SnapshotsChanged(gone=keys[2])]
    assert len(engine.state.tier.disk) == 3 and engine.plan() == {0: 12}, "up to the edge where it takes a snapshot"


def test_snapshots_have_half_of_the_disk():
    disk = DiskFound(blocks=b"a" * 16, file_bytes=100, snapshots=b"a" * 16 + b"b" * 16, snapshot_bytes=400)
    ranks = [msgspec.structs.replace(ready(rank, b""), disk=disk) for rank in range(2)]
    opened = TierOpened(capacity=10, blocks=b"a" * 16, snapshots_max=2, snapshots=b"a" * 16 + b"b" * 16)
    assert opening(ranks, 4_000) == opened
    assert opening(ranks, 1_600) == msgspec.structs.replace(opened, capacity=4, snapshots_max=1, snapshots=b"b" * 16)
