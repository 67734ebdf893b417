"""Blocks that leave one engine and come to another: both logs, cut there, fold to the same request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.core_drive import Engine
from vnext.sched.handover import coming, leaving, next_hand_over
from vnext.sched.tiering import next_promotion
from vnext.state.errors import IllegalEvent
from vnext.state.events import BlocksHandedOver, BlocksReceived, PrefixCacheReset, PromotionEnded, RequestId, TierOpened

PROMPT = list(range(1, 14))


def handed_over(prompt: list[int] = PROMPT, **changes: object) -> tuple[Engine, BlocksHandedOver]:
    """The engine of a prompt, and the event by which its blocks leave; it is not folded."""
    engine = Engine()
    id_ = engine.arrive(prompt, max_tokens=1, **changes)
    assert next_hand_over(engine.state, {id_}) is None
    engine.plan()
    event = next_hand_over(engine.state, {id_})
    assert event is not None
    return engine, event


def expecting(prompt: list[int] = PROMPT, **changes: object) -> Engine:
    """An engine whose request's blocks are on their way."""
    engine = Engine()
    engine.fold(TierOpened(capacity=0))
    id_ = engine.arrive(prompt, max_tokens=2, **changes)
    assert next_promotion(engine.state) is None
    event = next_promotion(engine.state, {id_})
    assert event is not None
    engine.fold(event)
    return engine


def received(engine: Engine, count: int) -> BlocksReceived:
    transfer = engine.state.tier.transfers[0]
    names = b"".join(transfer.keys[transfer.hits : transfer.hits + count])
    return BlocksReceived(transfer=transfer.number, count=count, names=names, checksums=names)


@pytest.mark.parametrize("count", [1, 3])
def test_both_engines_fold_to_the_same_request(count: int):
    prefill, left = handed_over(cache_salt="a")
    decode = expecting(cache_salt="a")
    came = received(decode, count)
    one, other = leaving(prefill.state, left), coming(decode.state, came)
    assert other is not None and one.request == other.request and one.names[:count] == other.names
    decode.fold(came)
    assert decode.plan() == {0: 13 - 4 * count}, "the rest is computed here"


def test_of_a_prompt_of_full_blocks_the_last_one_stays():
    """The engine that it goes to computes the prompt's last token, whose logits are the first token's."""
    prompt = PROMPT[:12]
    prefill, left = handed_over(prompt)
    assert left.count == 2
    with pytest.raises(IllegalEvent, match="3 blocks of request 0, whose prompt has 2 to hand over"):
        prefill.fold(replace(left, count=3))
    decode = expecting(prompt)
    assert len(decode.state.tier.transfers[0].pages) == 2
    decode.fold(received(decode, 2))
    assert decode.plan() == {0: 4}


def test_another_tenants_prompt_is_another_request():
    prefill, left = handed_over(cache_salt="a")
    decode = expecting(cache_salt="b")
    one, other = leaving(prefill.state, left), coming(decode.state, received(decode, 3))
    assert one.request != other.request and not set(one.names) & set(other.names)


def test_a_stale_block_has_not_the_right_name():
    decode, (prefill, left) = expecting(), handed_over([9, *PROMPT[1:]])
    names = b"".join(leaving(prefill.state, left).names)
    right = received(decode, 3)
    for wrong in (replace(right, names=names), replace(right, names=right.names[:32]), replace(right, count=2), replace(right, checksums=b""),
                  replace(right, count=0, names=b"", checksums=b"")):  # fmt: skip
        with pytest.raises(IllegalEvent):
            decode.fold(wrong)
    decode.fold(right)


def test_blocks_leave_only_while_their_request_holds_them():
    engine, event = handed_over()
    for wrong in (replace(event, count=4), replace(event, count=0), replace(event, id=RequestId(1))):
        with pytest.raises(IllegalEvent):
            engine.fold(wrong)
    before = engine.state
    assert replace(engine.fold(event), sequence=before.sequence) == before, "nothing waits for them"
    engine.commit(9)
    with pytest.raises(IllegalEvent, match="does not run"):
        engine.fold(event)


def test_a_prompt_in_several_steps_leaves_behind_the_last():
    engine = Engine(max_num_batched_tokens=8)
    id_ = engine.arrive(PROMPT, max_tokens=1)
    engine.step()
    assert next_hand_over(engine.state, {id_}) is None
    engine.plan()
    assert next_hand_over(engine.state, {id_}) == BlocksHandedOver(id=id_, count=3)


def test_a_prompt_of_less_than_a_block_stays():
    engine = Engine()
    id_ = engine.arrive([1, 2, 3, 4], max_tokens=1)
    engine.plan()
    assert next_hand_over(engine.state, {id_}) is None


def test_what_comes_behind_a_reset_has_no_name():
    engine = expecting()
    event = received(engine, 2)
    engine.fold(PrefixCacheReset())
    with pytest.raises(IllegalEvent):
        engine.fold(event)
    engine.fold(PromotionEnded(transfer=0))
    assert engine.plan() == {0: 13}


def test_only_what_memory_lacks_comes():
    engine = Engine()
    engine.fold(TierOpened(capacity=0))
    engine.arrive(PROMPT[:9], max_tokens=1)
    engine.step()
    id_ = engine.arrive(PROMPT, max_tokens=2)
    event = next_promotion(engine.state, {id_})
    assert event is not None and event.count == 1
    engine.fold(event)
    engine.fold(received(engine, 1))
    assert engine.plan() == {id_: 1}
