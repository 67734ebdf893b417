"""Blocks from one rank to another: through shared memory and over TCP, and what a peer may do to an answer (nothing)."""

from __future__ import annotations

import errno
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.core_drive import Engine
from vnext.runtime.hosts import wire
from vnext.runtime.hosts.handover import receiving, tcp
from vnext.runtime.hosts.handover.page_files import PageFiles, PageFolder
from vnext.runtime.hosts.handover.publishing import Publisher, Shelf
from vnext.runtime.hosts.handover.receiving import Receiver
from vnext.runtime.hosts.handover.source import HandoverFailed, split_address
from vnext.runtime.hosts.handover.tcp import BlockServer
from vnext.runtime.hosts.handover.tickets import Ticket, decode_ticket, encode_ticket
from vnext.runtime.protocol.messages import BlocksPublished, BlocksRead
from vnext.runtime.rank.tier import HostPages, RankTier
from vnext.runtime.transport.ring.broadcast import FetchBlocks
from vnext.sched.handover import next_hand_over
from vnext.sched.tiering import next_promotion
from vnext.state.events import TierOpened

SECRET = b"a secret of all hosts"
PAGE_BYTES, PAGES = 64, 16
PROMPT = list(range(1, 14))
Identity = dict[str, object]
MODEL: Identity = {"model": "a"}


class Two:
    """The rank of a prompt and the rank of its answer. The pages of the first are numbered."""

    def __init__(self, folder: Path, address: str = "", secret: bytes = SECRET, room_bytes: int = 2**20) -> None:
        self.sent = np.arange(PAGES * PAGE_BYTES, dtype=np.uint32).astype(np.uint8).reshape(PAGES, PAGE_BYTES) ^ 7
        self.came = np.zeros_like(self.sent)
        self.folder = folder
        files = PageFiles(folder, MODEL, PAGE_BYTES)
        self.server = BlockServer(split_address(address), secret, {files.identity: files.raw}) if address else None
        self.publisher = Publisher(0, str(folder), Shelf(files, lambda: [self.sent], room_bytes), self.server)
        self.ticket = Ticket(folder="" if address else str(folder), addresses=(self.server.address,) if self.server else ())
        self.left, self.names = Engine(), ()

    def publish(self) -> BlocksPublished:
        """The prompt is computed, and its three blocks leave."""
        id_ = self.left.arrive(PROMPT, max_tokens=1)
        self.left.plan()
        event = next_hand_over(self.left.state, {id_})
        self.publisher.fold(event, self.left.fold(event))
        self.left.commit(9)
        return _awaited(self.publisher.reports)

    def receive(self, identity: Identity = MODEL, secret: bytes = SECRET, ticket: Ticket | None = None, sealed: bytes = b"") -> BlocksRead:
        """An engine whose request has the ticket gets what there is; pages that came are equal to those that left."""
        receiver = Receiver(0, secret, lambda folder: PageFolder(Path(folder), identity, PAGE_BYTES))
        memory = HostPages(lambda: [self.came], PageFolder(Path(), identity, PAGE_BYTES).file_bytes)
        tier = RankTier(0, None, memory, receiver)
        engine = Engine()
        engine.fold(TierOpened(capacity=0))
        id_ = engine.arrive(PROMPT, max_tokens=2)
        event = next_promotion(engine.state, {id_})
        tier.expect(FetchBlocks(transfer=0, ticket=encode_ticket(ticket or self.ticket, sealed or secret)))
        tier.fold(event, engine.fold(event))
        report = _awaited(tier.reports)
        pages = engine.state.tier.transfers[0].pages
        assert (self.came[list(pages[: report.count])] == self.sent[:3][: report.count]).all()
        assert not self.came[list(pages[report.count :])].any() and len(report.checksums) == 16 * report.count
        tier.close()
        return report

    def file(self, place: int) -> Path:
        """The file of a block that left."""
        found = {path.name: path for path in self.folder.rglob("*") if len(path.name) == 32 and path.parent.name == path.name[:2]}
        id_ = self.left.arrive(PROMPT, max_tokens=1)
        names = next(entry.block_hashes for entry in self.left.state.waiting if entry.id == id_)
        return found[names[place].hex()]


def _awaited(reports: Callable[[], list]) -> object:
    """The one report to come."""
    end = time.monotonic() + 60
    while not (found := reports()):
        assert time.monotonic() < end, "no report"
        time.sleep(0.002)
    return found[0]


@pytest.fixture(params=["", "127.0.0.2:0"], ids=["shared memory", "tcp"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    both = Two(tmp_path / "blocks", request.param)
    yield both
    both.publisher.close()


def test_what_leaves_comes(two: Two):
    assert two.publish().count == 3
    first, again = two.receive(), two.receive()
    assert first.count == 3 and first == again and first.bad == b""


def test_a_flipped_byte_ends_a_transfer(two: Two):
    two.publish()
    path = two.file(1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    assert two.receive().count == 1


def test_half_a_hand_over_is_half_a_hit(two: Two):
    two.publish()
    two.file(2).unlink()
    assert two.receive().count == 2


def test_another_model_is_named_and_gives_nothing(two: Two, caplog: pytest.LogCaptureFixture):
    two.publish()
    assert two.receive({"model": "b"}).count == 0
    assert "differ in what a block's bits depend on" in caplog.text


def test_the_oldest_leave_a_full_store(tmp_path: Path):
    two = Two(tmp_path / "blocks", room_bytes=2 * PageFolder(Path(), MODEL, PAGE_BYTES).file_bytes)
    assert two.publish().count == 2, "as many as fit"
    assert two.receive().count == 2
    two.publisher.close()


def test_a_store_that_cannot_be_written_costs_the_hand_over(two: Two, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    def full(self: PageFiles, name: bytes, parts: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageFiles, "write", full)
    assert two.publish().count == 0 and two.receive().count == 0
    assert caplog.text.count("Blocks are not handed over") == 1


@pytest.fixture
def over_tcp(tmp_path: Path) -> Iterator[Two]:
    both = Two(tmp_path / "blocks", "127.0.0.2:0")
    both.publish()
    yield both
    both.publisher.close()


def test_another_secret_is_named_and_gives_nothing(over_tcp: Two, caplog: pytest.LogCaptureFixture):
    other = b"quite another secret"
    assert over_tcp.receive(secret=other).count == 0
    assert "the two hosts have different secrets" in caplog.text
    caplog.clear()
    assert over_tcp.receive(secret=other, sealed=SECRET).count == 0
    assert "ticket is of an engine with another secret" in caplog.text


def test_another_version_is_named_and_gives_nothing(over_tcp: Two, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    real = wire._take
    monkeypatch.setattr(wire, "_take", lambda *given: _older(real(*given)))
    assert over_tcp.receive().count == 0
    assert "install one version on all hosts" in caplog.text


def _older(message: object) -> object:
    return wire.Greeting("0.0.1", message.nonce) if isinstance(message, wire.Greeting) else message


def test_nobody_listens_and_the_next_one_does_not_ask(over_tcp: Two, monkeypatch: pytest.MonkeyPatch):
    over_tcp.server.close()
    receiver = Receiver(0, SECRET, lambda folder: PageFolder(Path(folder), MODEL, PAGE_BYTES))
    source, _ = receiver.source(encode_ticket(over_tcp.ticket, SECRET))
    with pytest.raises(HandoverFailed, match="no blocks come from 127.0.0.2"):
        source.ask(())
    with pytest.raises(HandoverFailed, match="just failed"):
        receiver.source(encode_ticket(over_tcp.ticket, SECRET))
    monkeypatch.setattr(receiving.time, "monotonic", lambda: 1e12)
    receiver.source(encode_ticket(over_tcp.ticket, SECRET))


def test_a_server_that_ends_half_way_is_half_a_hit(over_tcp: Two, caplog: pytest.LogCaptureFixture):
    def ends(name: bytes) -> bytes:
        if name.hex() == over_tcp.file(1).name:
            raise wire.WireBroken("this host was unplugged")
        return raw(name)

    ((identity, raw),) = over_tcp.server._reads.items()
    over_tcp.server._reads = {identity: ends}
    assert over_tcp.receive().count == 1
    assert "end half-way" in caplog.text


def test_a_stranger_gets_nothing_and_disturbs_nobody(over_tcp: Two, caplog: pytest.LogCaptureFixture):
    with socket.create_connection(split_address(over_tcp.server.address)) as stranger, caplog.at_level(logging.WARNING):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert over_tcp.receive().count == 3


def test_strangers_in_numbers_are_closed_and_disturb_nobody_later(over_tcp: Two):
    address = split_address(over_tcp.server.address)
    strangers = [socket.create_connection(address, 20) for _ in range(tcp.CONNECTIONS_MAX + 20)]
    assert strangers[-1].recv(1) == b"", "more than may be unproved at once"
    for stranger in strangers:
        stranger.close()
    for _ in range(600):
        if over_tcp.server._room._value == tcp.CONNECTIONS_MAX:
            break
        time.sleep(0.1)
    assert over_tcp.receive().count == 3


def test_a_server_without_a_free_descriptor_goes_on_later(over_tcp: Two):
    server, real = over_tcp.server, over_tcp.server._listener

    class Full:
        failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "Software caused connection abort")]

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                raise self.failures.pop()
            return real.accept()

    server._listener = Full()
    socket.create_connection(split_address(server.address)).close()  # ends the accept that waits
    assert over_tcp.receive().count == 3 and not Full.failures
    server._listener = real


def test_a_rank_that_the_other_engine_has_not_is_named(over_tcp: Two):
    receiver = Receiver(1, SECRET, lambda folder: PageFolder(Path(folder), MODEL, PAGE_BYTES))
    with pytest.raises(HandoverFailed, match="block size or ranks"):
        receiver.source(encode_ticket(over_tcp.ticket, SECRET))


@pytest.mark.parametrize(
    "text",
    [
        "", "{}x", '{"folder":1}', '{"folder":"/tmp"}', "{" * 5000, '{"addresses":["h:1"],"seal":"00"}',
        '{"folder":"/x","addresses":["127.0.0.1:9"],"seal":"\\u00e9"}', '{"seal":"\u00e9"}', '{"seal":"\\ud800"}', '{"seal":"\udcff"}',
        '{"other":' + "[" * 4000, "\x00", '{"folder":"\\u0000","seal":"0"}',
    ],
)  # fmt: skip
def test_a_ticket_that_is_none_is_refused(text: str):
    with pytest.raises(HandoverFailed, match="ticket"):
        decode_ticket(text, SECRET)


def test_no_bytes_of_a_ticket_do_more_than_fail():
    """A rank reads them, and ends by any other exception."""
    rng, whole = random.Random(7), encode_ticket(Ticket(folder="/x", addresses=("127.0.0.1:9",)), SECRET)
    for _ in range(3000):
        text = bytearray(whole.encode())
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        changed = text.decode(errors="surrogateescape")
        with suppress(HandoverFailed):
            assert decode_ticket(changed, SECRET) == decode_ticket(whole, SECRET), changed


def test_memory_of_another_host_cannot_be_read():
    receiver = Receiver(0, b"", lambda folder: PageFolder(Path(folder), MODEL, PAGE_BYTES))
    with pytest.raises(HandoverFailed, match="handover-address"):
        receiver.source(encode_ticket(Ticket(folder="/nowhere/at/all"), b""))


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port", "host:70000"])
def test_what_is_no_address_is_refused(address: str):
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
    assert split_address("[::1]:7000") == ("::1", 7000)
