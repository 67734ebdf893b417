"""Connections between hosts: only who knows the secret gets one, and only whole, unchanged frames in order pass."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from vnext.runtime.hosts import wire as wires
from vnext.runtime.hosts.wire import MAC_BYTES, Wire, WireBroken, WireRefused, connected

SECRET = b"one secret"


def pair() -> tuple[socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    return one, other


def met(master_secret: bytes = SECRET, host_secret: bytes = SECRET) -> list[Any]:
    """What each side gets of a handshake: its wire, or its error."""
    sockets, found = pair(), [None, None]

    def meet(place: int, secret: bytes, role: Any) -> None:
        try:
            found[place] = connected(sockets[place], secret, role, 20.0)
        except (WireBroken, WireRefused) as error:
            found[place] = error

    threads = [threading.Thread(target=meet, args=each) for each in ((0, master_secret, "master"), (1, host_secret, "host"))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return found


def taken(wire: Wire, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += wire.receive()
    return found


def test_frames_pass_both_ways_whole_and_in_order() -> None:
    master, host = met()
    sent = [b"", b"x", bytes(range(256)) * 4000, b"last"]
    for one, other in ((master, host), (host, master)):
        thread = threading.Thread(target=lambda send: [send(each) for each in sent], args=(one.send,))
        thread.start()
        assert taken(other, 4) == sent
        thread.join(60)
    master.close()
    with pytest.raises(WireBroken, match="the other side has ended the connection"):
        while True:
            host.receive()
    host.close()


def test_another_secret_is_refused_on_both_sides_in_one_sentence() -> None:
    for error in met(host_secret=b"another"):
        assert isinstance(error, WireRefused) and str(error).startswith("the two hosts have different secrets: give")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(("1.0", "2.0"))
    plain = wires.Greeting
    monkeypatch.setattr(wires, "Greeting", lambda version, nonce: plain(next(versions), nonce))
    monkeypatch.setattr(wires, "_take", lambda connection, wanted, end_s, take=wires._take: take(connection, plain, end_s))
    errors = sorted(map(str, met()))
    assert errors == [
        "the other host has vnext 1.0 and this one 2.0: install one version on all hosts",
        "the other host has vnext 2.0 and this one 1.0: install one version on all hosts",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a handshake of 542393671 bytes is none of vnext's"),
        (b"\x03\x00\x00\x00abc", "the other side does not speak vnext's protocol"),
        (b"\x03\x00", "the other side has ended the connection in the handshake"),
    ],
)
def test_a_stranger_gets_no_wire(words: bytes, sentence: str) -> None:
    stranger, other = pair()
    stranger.sendall(words)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(WireBroken, match=sentence):
        connected(other, SECRET, "master", 20.0)
    stranger.close()


def test_a_stranger_who_trickles_is_turned_away() -> None:
    stranger, other = pair()

    def trickle() -> None:
        with suppress(OSError):
            stranger.sendall(b"\x00\x08\x00\x00")
            for _ in range(100):
                stranger.sendall(b"x")
                time.sleep(0.05)
        stranger.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(WireBroken, match="too slow in the handshake|timed out"):
        connected(other, SECRET, "master", 0.5)
    thread.join(60)


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    """Who does not know the secret answers the other's nonce with the same one, and its proof with the same proof."""
    stranger, other = pair()

    def mirror() -> None:
        with suppress(OSError):
            while data := stranger.recv(4096):
                stranger.sendall(data)

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises((WireBroken, WireRefused), match="different secrets"):
        connected(other, SECRET, "host", 20.0)
    other.close()
    thread.join(60)


def changed(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda first, second: changed(first), "changed on its way, left out or repeated"),
        (lambda first, second: second, "changed on its way, left out or repeated"),
        (lambda first, second: first + first, "changed on its way, left out or repeated"),
        (lambda first, second: b"\xff\xff\xff\xff" + bytes(MAC_BYTES), "a frame of 4294967295 bytes is over the bound"),
        (lambda first, second: first + second[:-3], "the other side has ended the connection"),
    ],
    ids=["changed", "left out", "repeated", "too long", "half a message"],
)
def test_a_spoilt_frame_ends_the_connection(spoil: Any, sentence: str) -> None:
    master, host = met()
    key, (one, other) = master._key, pair()
    recorded = Wire(one, key, "master")
    recorded.send(b"first message")
    recorded.send(b"second message")
    one.shutdown(socket.SHUT_WR)
    data = b""
    while more := other.recv(4096):
        data += more
    size = 4 + MAC_BYTES + len(b"first message")
    master._socket.sendall(spoil(data[:size], data[size:]))
    master._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(WireBroken, match=sentence):
        while True:
            assert b"second message" not in host.receive()
    assert not host.is_open
    for each in (master, host, recorded):
        each.close()
    other.close()
