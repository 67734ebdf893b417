"""The disk tier in the state: transfers hold pages until they end, and nobody else waits for them."""

from __future__ import annotations

import pytest

from tests.core_drive import Engine
from vnext.log.log_plain import WIDTH_MAX
from vnext.log.snapshot import decode, encode, load, snapshot
from vnext.sched.explain import explain
from vnext.sched.ranking import rows_best_first
from vnext.sched.tiering import evictions, next_cancellation, next_promotion
from vnext.state.digest import digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    BlocksPromoted,
    EnginePaused,
    EngineRecovered,
    PrefixCacheReset,
    PromotionEnded,
    RequestAborted,
    TierChanged,
    TierOpened,
    WeightsChanged,
)

PROMPT = list(range(1, 14))


def names(engine: Engine) -> tuple[bytes, ...]:
    """The names of the only waiting request's blocks."""
    return engine.state.waiting[-1].block_hashes


def with_disk(capacity: int = 8, **config: int) -> Engine:
    """An engine that has just started, with the three full blocks of PROMPT on disk and its request waiting."""
    engine = Engine(**config)
    engine.fold(TierOpened(capacity=capacity))
    engine.arrive(PROMPT, max_tokens=2)
    engine.fold(TierChanged(stored=b"".join(names(engine))))
    return engine


def promoted(engine: Engine) -> BlocksPromoted:
    event = next_promotion(engine.state)
    assert event is not None
    engine.fold(event)
    return event


def test_a_request_starts_behind_what_was_read_from_disk():
    engine = with_disk()
    event = promoted(engine)
    assert (event.id, event.count) == (0, 3) and next_promotion(engine.state) is None
    assert engine.plan() == {} and engine.state.pool.page_count - engine.state.pool.free == 3
    assert [(wait.id, wait.why) for wait in explain(engine.state).waits] == [(0, "disk")]
    engine.fold(PromotionEnded(transfer=0, count=3))
    assert engine.plan() == {0: 1}, "all but the last token"


def test_the_last_token_of_a_prompt_is_computed_where_the_whole_prompt_is_on_disk():
    """Its logits are the first token's. With the blocks that are read, or those in memory, the last block is computed."""
    for in_memory in (0, 1):
        engine = Engine()
        engine.fold(TierOpened(capacity=8))
        for _ in range(in_memory):
            engine.arrive(PROMPT[:4], max_tokens=1)
            engine.step()
        engine.arrive(PROMPT[:12], max_tokens=2)
        engine.fold(TierChanged(stored=b"".join(names(engine))))
        event, hits = next_promotion(engine.state), in_memory
        assert event is not None and event.count == 2 - hits and len(names(engine)) == 3
        with pytest.raises(IllegalEvent, match=f"{3 - hits} blocks behind {hits} hits"):
            engine.fold(BlocksPromoted(transfer=event.transfer, id=event.id, count=3 - hits))
        engine.fold(event)
        engine.fold(PromotionEnded(transfer=event.transfer, count=event.count))
        assert engine.plan() == {event.id: 4}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_could_not_be_read_is_computed(count: int):
    engine = with_disk()
    promoted(engine)
    engine.fold(PromotionEnded(transfer=0, count=count))
    assert next_promotion(engine.state) is None, "one transfer a wait"
    assert engine.plan() == {0: 13 - 4 * count}


def test_others_overtake_a_request_that_waits_for_the_disk():
    engine = with_disk()
    promoted(engine)
    other = engine.arrive([50, 51], max_tokens=3)
    assert engine.plan() == {other: 2}
    engine.commit(7)
    engine.fold(PromotionEnded(transfer=0, count=3))
    assert engine.plan() == {other: 1, 0: 1}


def test_a_request_that_was_overtaken_is_not_the_worst():
    engine = with_disk(page_count=6, max_model_len=24)
    promoted(engine)
    other = engine.arrive([50, 51, 52], max_tokens=12)
    assert engine.plan() == {other: 3}
    engine.commit(7)
    engine.fold(PromotionEnded(transfer=0, count=3))
    engine.step(token=7)
    assert engine.running == [other, 0]
    engine.arrive([1] * 3, max_tokens=2)
    assert rows_best_first(engine.state) == [1, 0], "first come, first served: the row that joined last came first"


def test_a_transfer_gives_way_to_a_row_and_to_a_better_request():
    engine = with_disk(page_count=4, max_model_len=16)
    promoted(engine)
    assert next_cancellation(engine.state) is None
    other = engine.arrive([50] * 8, max_tokens=3)
    event = next_cancellation(engine.state)
    assert event == PromotionEnded(transfer=0)
    engine.fold(event)
    assert engine.plan() == {0: 13} and engine.waiting == [other]


def test_an_aborted_request_leaves_its_blocks_to_the_cache():
    engine = with_disk()
    promoted(engine)
    engine.fold(RequestAborted(ids=(0,), reason="client"))
    engine.fold(PromotionEnded(transfer=0, count=3))
    id_ = engine.arrive(PROMPT, max_tokens=1)
    assert engine.state.pool.free == engine.state.pool.page_count and engine.plan() == {id_: 1}


def test_a_recovery_keeps_the_disk_and_lets_everybody_ask_again():
    engine = with_disk()
    promoted(engine)
    engine.fold(EngineRecovered(cause="rank 0 was killed"))
    assert engine.state.pool.free == engine.state.pool.page_count
    with pytest.raises(IllegalEvent, match="not in flight"):
        engine.fold(PromotionEnded(transfer=0, count=3))
    assert promoted(engine) == BlocksPromoted(transfer=1, id=0, count=3)


def test_a_reset_forgets_the_disk_and_what_is_being_read():
    engine = with_disk()
    promoted(engine)
    engine.fold(PrefixCacheReset())
    engine.fold(PromotionEnded(transfer=0, count=3))
    assert len(engine.state.tier.disk) == 0 and engine.plan() == {0: 13}


def test_blocks_of_other_weights_are_not_read():
    engine = with_disk()
    engine.fold(EnginePaused(mode="keep"))
    assert next_promotion(engine.state) is None
    engine.fold(WeightsChanged(version=1, digest="d1"))
    engine.fold(EnginePaused(mode=""))
    assert next_promotion(engine.state) is None and engine.plan() == {0: 13}


def test_no_weights_change_and_no_sleep_while_blocks_are_read():
    engine = with_disk()
    promoted(engine)
    engine.fold(EnginePaused(mode="keep"))
    for event, why in ((WeightsChanged(version=1, digest="d"), "old ones"), (EnginePaused(mode="sleep"), "no transfer in flight")):
        with pytest.raises(IllegalEvent, match=why):
            engine.fold(event)


def test_the_oldest_leave_the_disk_but_for_those_that_memory_has():
    engine = Engine()
    engine.fold(TierOpened(capacity=3, blocks=b"x" * 16 + b"y" * 16))
    engine.arrive(PROMPT, max_tokens=1)
    keys = names(engine)
    engine.step()
    engine.fold(TierChanged(stored=keys[0]))
    assert evictions(engine.state.tier, engine.state.pool, 0) == ((), ())
    assert evictions(engine.state.tier, engine.state.pool, 1) == ((b"x" * 16,), ())
    engine.fold(TierChanged(gone=b"x" * 16 + b"y" * 16, stored=b"z" * 16))
    assert evictions(engine.state.tier, engine.state.pool, 2) == ((b"z" * 16,), (keys[0],)), "a beginning that memory has counts as new"
    assert evictions(engine.state.tier, engine.state.pool, 3) == ((b"z" * 16, keys[0]), ())


def test_a_disk_has_what_events_say():
    engine = with_disk(capacity=3)
    refused = (
        TierChanged(stored=b"x" * 16), TierChanged(gone=b"x" * 16), TierChanged(kept=b"x" * 16), TierChanged(stored=b"x"),
        TierOpened(capacity=1, blocks=b"x" * 32), TierOpened(capacity=9, blocks=b"x" * 32),
        BlocksPromoted(transfer=1, id=0, count=1), BlocksPromoted(transfer=0, id=1, count=1),
        BlocksPromoted(transfer=0, id=0, count=4), BlocksPromoted(transfer=0, id=0, count=0), PromotionEnded(transfer=0),
    )  # fmt: skip
    before = digest(engine.state)
    for event in refused:
        with pytest.raises(IllegalEvent):
            engine.fold(event)
    assert digest(engine.state) == before
    promoted(engine)
    for event in (TierOpened(capacity=3), PromotionEnded(transfer=0, count=4), BlocksPromoted(transfer=1, id=0, count=1)):
        with pytest.raises(IllegalEvent):
            engine.fold(event)


def test_a_snapshot_has_the_disk_and_its_transfers():
    engine = with_disk()
    promoted(engine)
    loaded = load(decode(encode(snapshot(engine.state), WIDTH_MAX)), engine.state.config)
    assert digest(loaded) == digest(engine.state) and loaded.tier.transfers == engine.state.tier.transfers
    assert list(loaded.tier.disk.oldest_first()) == list(engine.state.tier.disk.oldest_first())
    assert loaded.waiting == engine.state.waiting


def test_an_engine_without_a_disk_refuses_its_events():
    engine = Engine()
    for event in (TierChanged(), BlocksPromoted(transfer=0, id=0, count=1), PromotionEnded(transfer=0)):
        with pytest.raises(IllegalEvent, match="no disk tier"):
            engine.fold(event)
    with pytest.raises(IllegalEvent, match="full attention"):
        Engine(windows=(4,)).fold(TierOpened(capacity=1))
