"""Damaged and random frames between hosts: no thread and no process ends, the connection does, with one sentence."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from test_hosts import RESULT, WORD, come, executor, hosts, next_of, until  # noqa: F401  a fixture
from test_two_hosts import secret  # noqa: F401  a fixture
from test_wire import met, pair

from vnext.base.version import __version__
from vnext.runtime.hosts.agent import Agent
from vnext.runtime.hosts.frames import Beat, EndRanks, FromRank, HostHere, RanksEnded, RingMessage, encode
from vnext.runtime.hosts.handover.page_files import PageFolder
from vnext.runtime.hosts.handover.receiving import Receiver
from vnext.runtime.hosts.handover.source import HandoverFailed
from vnext.runtime.hosts.handover.tcp import Asked, BlockServer, TcpSource
from vnext.runtime.hosts.handover.tickets import Ticket, encode_ticket
from vnext.runtime.hosts.host_links import HostReader, HostWriter
from vnext.runtime.hosts.master import Hosts
from vnext.runtime.hosts.wire import Greeting, Proof, Refusal, WireBroken, WireRefused, connected
from vnext.runtime.processes.subprocesses import HostLost
from vnext.runtime.protocol.messages import encoder

ROUNDS, LONG_ROUNDS = 40, 3_000
pack = msgspec.msgpack.encode
HANDSHAKES = [pack(Greeting(__version__, b"x" * 32)), pack(Proof(b"x" * 32)), pack(Refusal("no")), pack(Greeting("2.0\n\x1b[31m", b"x" * 32))]
ODD = [b"", b"\xc0", b"\x91" * 4000, b"\x92\xa5vnext" + b"\x91" * 3000, b"\x93\xa5vnext\xa2\xff\xfe\xc4\x01a", b"\x92\xa7refusal\xa2a\n", b"\xc1" * 9]


@pytest.fixture(autouse=True)
def no_thread_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ended: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append((args.thread.name, args.exc_value)))
    yield
    assert not ended


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return LONG_ROUNDS if request.config.getoption("--long") else ROUNDS


def damaged(rng: random.Random, right: list[bytes]) -> bytes:
    """One of the right messages with bytes changed, added, cut, or nested in thousands of lists; or something odd."""
    found = bytearray(rng.choice([*right, *ODD] if rng.random() < 0.3 else right))
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(found) + 1)
        match rng.randrange(4):
            case 0:
                found[place : place + 1] = rng.randbytes(1)
            case 1:
                found[place:place] = rng.randbytes(rng.randrange(5))
            case 2:
                del found[place : place + rng.randrange(4)]
            case _:
                found[place:place] = b"\x91" * rng.choice((1, 2_000))
    return bytes(found)


def one_sentence(error: BaseException) -> None:
    assert str(error) and "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 400, repr(error)


@pytest.mark.parametrize("role", ["master", "host"])
def test_what_a_stranger_sends_is_no_wire(role: Any, rounds: int) -> None:
    """Also what is sent behind a right greeting."""
    rng = random.Random(f"{role} 1")
    for _ in range(rounds):
        stranger, other = pair()
        for data in [HANDSHAKES[0]] * (rng.random() < 0.5) + [damaged(rng, HANDSHAKES) for _ in range(2)]:
            stranger.sendall(len(data).to_bytes(4, "little") + data)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises((WireBroken, WireRefused)) as refused:
            connected(other, WORD, role, 20.0)
        one_sentence(refused.value)
        stranger.close()


def strangers_at(address: tuple[str, int], rng: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        with suppress(ConnectionError), socket.create_connection(address, 20) as stranger:
            data = damaged(rng, HANDSHAKES)
            stranger.sendall(len(data).to_bytes(4, "little") + data)


def test_strangers_end_no_master_no_server_of_blocks_and_no_stage(hosts: Hosts, rounds: int) -> None:  # noqa: F811
    rng = random.Random(2)
    strangers_at((hosts.address, hosts.port), rng, rounds)
    come(hosts).close()
    assert not hosts.is_blind
    server = BlockServer(("127.0.0.1", 0), WORD, {b"identity": lambda name: b"the block " + name})
    host, port = server.address.split(":")
    strangers_at((host, int(port)), rng, rounds)
    source = TcpSource(server.address, WORD, b"identity")
    source.ask([b"1"])
    assert source.fetch(b"1", buffer := bytearray(11)) and buffer == b"the block 1"
    source.close()
    server.close()
    listener = socket.create_server(("127.0.0.1", 0))
    writer = HostWriter(listener, WORD, 2)
    address = listener.getsockname()
    silent = socket.create_connection(address, 20)
    strangers_at(address, rng, rounds)
    began_s = time.monotonic()
    readers = [HostReader(connected(socket.create_connection(address, 20), WORD, "host", 20.0)) for _ in range(2)]
    assert time.monotonic() - began_s < 8, "a silent stranger keeps no reader waiting"
    writer.write(b"states")
    assert [reader.read() for reader in readers] == [b"states"] * 2
    for each in (writer, *readers, silent):
        each.close()


def test_what_a_proved_host_sends_ends_its_connection_alone(hosts: Hosts, rounds: int, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    rng = random.Random(3)
    right = [encode(HostHere(node=1, address="a")), encode(Beat()), encode(RanksEnded(generation=3, why="b"))]
    right += [encode(FromRank(generation=3, data=encoder.encode(RESULT))), encode(EndRanks(generation=3))]
    for _ in range(rounds // 2):
        wire = come(hosts)
        with suppress(WireBroken):
            for _ in range(4):
                wire.send(damaged(rng, right))
        wire.close()
    assert not hosts.is_blind
    wire, (ranks, _) = come(hosts), executor(hosts, 7)
    ranks.begin()
    assert ranks.started() is None
    with caplog.at_level(logging.WARNING):
        for _ in range(rounds):
            wire.send(encode(FromRank(generation=7, data=damaged(rng, [encoder.encode(RESULT)]))))
        wire.send(encode(FromRank(generation=7, data=encoder.encode(replace(RESULT, step=99)))))
        until(lambda: any(getattr(each, "step", 0) == 99 for each in ranks.receive()))
        wire.send(ODD[4])
        with pytest.raises(HostLost, match="is lost"):
            until(lambda: ranks.check())
    assert all("\n" not in record.message for record in caplog.records)
    wire.close()


def test_what_a_master_sends_is_the_loss_of_the_master(tmp_path: Path, rounds: int) -> None:
    """The agent connects again then."""
    rng = random.Random(4)
    right = [encode(EndRanks(generation=-1)), encode(RingMessage(generation=0, data=b"a")), encode(Beat())]
    for _ in range(rounds // 4):
        master, host = met()
        for _ in range(8):
            master.send(damaged(rng, right))
        master._socket.shutdown(socket.SHUT_WR)
        with pytest.raises(WireBroken) as lost:
            Agent(1, "", tmp_path, lambda *words: None).serve(host, lambda: True)
        one_sentence(lost.value)
        master.close()
        host.close()


def test_what_an_engine_sends_of_blocks_is_no_block(tmp_path: Path, rounds: int) -> None:
    rng = random.Random(5)
    server = BlockServer(("127.0.0.1", 0), WORD, {b"identity": lambda name: b"block"})
    host, port = server.address.split(":")
    for _ in range(rounds // 4):
        wire = connected(socket.create_connection((host, int(port)), 20), WORD, "host")
        with suppress(WireBroken):
            wire.send(damaged(rng, [pack(Asked(b"identity", (b"1", b"2")))]))
            until(wire.receive)
        wire.close()
    server.close()
    receiver = Receiver(0, WORD, lambda folder: PageFolder(Path(folder), {}, 64))
    right = encode_ticket(Ticket(addresses=("127.0.0.1:1",)), WORD)
    for _ in range(rounds * 10):
        text = damaged(rng, [right.encode()]).decode("utf-8", rng.choice(("replace", "surrogateescape")))
        if text != right:
            with pytest.raises(HandoverFailed) as refused:
                receiver.source(text)[0].ask([b"1"])
            assert "\n" not in str(refused.value)
