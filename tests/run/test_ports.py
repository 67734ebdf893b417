"""Ports that tests hold: no program but the one that is told the number has them."""

from __future__ import annotations

import socket

import pytest

from tests.run.ports import held_port


def test_a_held_port_is_refused_until_its_server_listens_and_again_behind_it() -> None:
    here = ("127.0.0.1", held_port())
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(here)
        with socket.create_server(here), socket.create_connection(here):
            pass
    with socket.socket() as other, pytest.raises(OSError, match="in use"):  # as whoever asks for any port
        other.bind(here)
