"""Results of the ranks over a Unix socket: a stream is cut where it likes, and only so many ranks are taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vnext.runtime.transport.ring.results import ResultsReceiver, ResultsSender, head


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[ResultsReceiver]:
    made = ResultsReceiver(str(tmp_path / "results"), 1)
    yield made
    made.close()


def test_a_piece_that_looks_like_a_message_is_none(receiver: ResultsReceiver, tmp_path: Path) -> None:
    """The second piece of this message is itself a length and as many bytes."""
    message = head.pack(4) + b"four"
    with ResultsSender(str(tmp_path / "results")) as sender:
        assert receiver.wait(60)
        sender._socket.sendall(head.pack(len(message)))
        assert receiver.wait(60) and list(receiver.messages()) == []
        sender._socket.sendall(message)
        assert receiver.wait(60) and list(receiver.messages()) == [message]


def test_no_more_ranks_are_taken_than_there_are(receiver: ResultsReceiver, tmp_path: Path) -> None:
    with ResultsSender(str(tmp_path / "results")) as sender, ResultsSender(str(tmp_path / "results")) as stranger:
        assert receiver.wait(60)
        stranger.send(b"strange")
        sender.send(b"ours")
        assert receiver.wait(60) and list(receiver.messages()) == [b"ours"] and len(receiver.sockets) == 1


def test_what_was_sent_before_the_end_arrives_and_nothing_is_left(receiver: ResultsReceiver, tmp_path: Path) -> None:
    with ResultsSender(str(tmp_path / "results")) as sender:
        sender.send(b"last words")
    assert receiver.wait(60) and list(receiver.messages()) == [b"last words"] and list(receiver.messages()) == []
    receiver.close()
    assert not (tmp_path / "results").exists()
