"""The engine core's part of a hand-over: when clients are told, and what they are told when ranks die."""

from __future__ import annotations

from tests.core_drive import Engine
from vnext.runtime.engine.handovers import HandOvers, ticket_of
from vnext.runtime.engine.owners import News
from vnext.runtime.engine.tiers import TierTransfers
from vnext.runtime.hosts.handover.tickets import decode_ticket
from vnext.runtime.protocol.messages import BlocksPublished, BlocksRead, HandoverPlace, ModelFacts, RankReady, RequestOutput
from vnext.runtime.transport.ring.broadcast import FetchBlocks, decode_events
from vnext.state.events import BlocksHandedOver, BlocksPromoted, BlocksReceived, PromotionEnded, TierOpened

PROMPT = list(range(1, 14))
LAST = RequestOutput(name="r0", tokens=bytes(4), finish="length", number=0)


class Told(list[RequestOutput]):
    """What clients have been sent."""

    def __call__(self, news: list[News]) -> None:
        self.extend(output for _, outputs in news for output in outputs)


def begun(world_size: int = 1, ticket: str = "T") -> tuple[Engine, HandOvers, Told]:
    """An engine that computes a prompt for another one."""
    engine, told, wanted = Engine(), Told(), set[int]()
    handovers = HandOvers(world_size, ticket, told, wanted)
    wanted.add(engine.arrive(PROMPT, max_tokens=1))
    assert handovers.next_event(engine.state) is None
    engine.plan()
    return engine, handovers, told


def leave(engine: Engine, handovers: HandOvers) -> None:
    event = handovers.next_event(engine.state)
    assert event == BlocksHandedOver(id=0, count=3) and handovers.next_event(engine.fold(event)) is None


def published(rank: int = 0) -> BlocksPublished:
    return BlocksPublished(rank=rank, id=0, count=3)


def test_the_last_output_waits_for_every_rank():
    engine, handovers, told = begun(world_size=2)
    leave(engine, handovers)
    handovers.answered(published(0), engine.state)
    handovers.answered(published(0), engine.state)
    assert handovers.without_kept([(None, [LAST])]) == [(None, [])] and told == []
    handovers.answered(published(1), engine.state)
    assert [output.ticket for output in told] == ["T"]
    assert handovers.without_kept([(None, [LAST])]) == [(None, [LAST])], "once"


def test_ranks_that_are_done_first_wait_for_the_last_output():
    engine, handovers, told = begun()
    leave(engine, handovers)
    handovers.answered(published(), engine.state)
    assert told == [] and handovers.without_kept([(None, [LAST])]) == [(None, [])]
    assert [output.ticket for output in told] == ["T"]


def test_an_aborted_request_waits_for_nobody():
    engine, handovers, told = begun()
    leave(engine, handovers)
    aborted = RequestOutput(name="r0", tokens=b"", finish="abort", number=0)
    assert handovers.without_kept([(None, [aborted])]) == [(None, [aborted])]
    handovers.answered(published(), engine.state)
    assert told == []


def test_ranks_that_die_cost_the_ticket_and_not_the_request():
    engine, handovers, told = begun()
    leave(engine, handovers)
    handovers.without_kept([(None, [LAST])])
    handovers.lose_ranks()
    assert [output.ticket for output in told] == [""]
    engine, handovers, told = begun()
    leave(engine, handovers)
    engine.recover()
    handovers.lose_ranks()
    assert handovers.next_event(engine.state) is None
    engine.plan()
    leave(engine, handovers)


def test_blocks_come_by_name_and_checksum_of_every_rank():
    engine, sent, tickets = Engine(), list[object](), dict[int, str]()
    transfers = TierTransfers(2, lambda message: sent.extend(decode_events(message)), TierOpened(capacity=0), tickets)
    engine.fold(transfers.next_event(engine.state))
    tickets[engine.arrive(PROMPT, max_tokens=2)] = "T"
    event = transfers.next_event(engine.state)
    assert event == BlocksPromoted(transfer=0, id=0, count=3) and sent == [FetchBlocks(transfer=0, ticket="T")] and not tickets
    engine.fold(event)
    transfers.answered(BlocksRead(rank=1, transfer=0, count=3, checksums=b"d" * 16 + b"e" * 16 + b"f" * 16), engine.state)
    transfers.answered(BlocksRead(rank=0, transfer=0, count=2, checksums=b"a" * 16 + b"b" * 16), engine.state)
    came = transfers.next_event(engine.state)
    names = b"".join(engine.state.tier.transfers[0].keys[:2])
    assert came == BlocksReceived(transfer=0, count=2, names=names, checksums=b"".join(16 * each for each in (b"a", b"d", b"b", b"e")))
    engine.fold(came)
    stats = transfers.stats(engine.state)["tier"]
    assert (stats.received, stats.absent, stats.damaged) == (2, 1, 0)
    transfers.ask(engine.state)
    assert len(sent) == 1, "nothing is written where there is no disk"


def test_nothing_that_comes_is_the_end_of_a_transfer():
    engine, tickets = Engine(), dict[int, str]()
    transfers = TierTransfers(1, lambda message: None, TierOpened(capacity=0), tickets)
    engine.fold(transfers.next_event(engine.state))
    tickets[engine.arrive(PROMPT, max_tokens=2)] = "T"
    engine.fold(transfers.next_event(engine.state))
    transfers.answered(BlocksRead(rank=0, transfer=0, count=0), engine.state)
    assert transfers.next_event(engine.state) == PromotionEnded(transfer=0)


def test_a_ticket_names_what_the_transport_needs():
    facts = ModelFacts(vocab_size=9, position_count_max=9, eos_token_ids=())
    ranks = [
        RankReady(model=facts, rank=rank, page_count_max=1, block_bytes=1, model_digest="", environment={}, handover=place)
        for rank, place in enumerate((HandoverPlace(folder="/f", address="h:1"), HandoverPlace(folder="/f", address="h:2")))
    ]
    found = {transport: decode_ticket(ticket_of(ranks, transport, b"s" * 16), b"s" * 16) for transport in ("auto", "shm", "tcp")}
    assert {transport: (ticket.folder, ticket.addresses) for transport, ticket in found.items()} == {
        "auto": ("/f", ("h:1", "h:2")), "shm": ("/f", ()), "tcp": ("", ("h:1", "h:2")),
    }  # fmt: skip
    assert ticket_of([RankReady(model=facts, rank=0, page_count_max=1, block_bytes=1, model_digest="", environment={})], "auto", b"") == ""
