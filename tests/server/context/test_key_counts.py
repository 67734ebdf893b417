"""Limits of keys at several API servers of one port: what a key may do, it may do once, whichever of them it asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from edge_server import EdgeServer

from vnext.server.context.admission import KeyLimits
from vnext.server.context.api_keys import ApiKeys
from vnext.server.context.errors import RateLimited
from vnext.server.context.key_counts import shared
from vnext.server.settings import ServerSettings


def ask(server: EdgeServer, **body: Any) -> tuple[int, str]:
    status, answer, _ = server.post("/v1/completions", {"prompt": "say:a"} | body, Authorization="Bearer two")
    return status, answer.get("error", {}).get("message", "")


@pytest.mark.parametrize(("name", "amount", "words"), [
    ("key_requests_per_minute", 3, "its requests of a minute"), ("key_tokens_per_minute", 15, "its tokens of a minute"),
])  # fmt: skip
def test_a_budget_is_one_for_all(tmp_path: Path, name: str, amount: int, words: str) -> None:
    options: dict[str, Any] = {"api_server_count": 2, "shared_dir": str(tmp_path), "api_keys": ("one", "two"), name: amount}
    with EdgeServer(number=0, **options) as first, EdgeServer(number=3, **options) as second:
        statuses = [ask(each)[0] for each in (first, second, first)]
        assert statuses == [200, 200, 200], "5 tokens each, or a request"
        for server in (first, second):
            status, message = ask(server)
            assert status == 429 and words in message


def limits(folder: Path, place: int, number_of_keys: int = 3) -> list[KeyLimits]:
    counts = shared(str(folder), place, 2, number_of_keys)
    return [KeyLimits(0, 0, 4, count) for count in counts]


def test_answers_at_once_are_those_of_all_and_a_killed_servers_are_forgotten(tmp_path: Path) -> None:
    first, second = limits(tmp_path, 0), limits(tmp_path, 1)
    first[1].enter(3)
    second[2].enter(4)
    with pytest.raises(RateLimited, match="3 answers in progress and 2 more would pass its bound of 4"):
        second[1].enter(2)
    second[1].enter(1)
    again = limits(tmp_path, 0)  # what follows the first one, which was killed
    again[1].enter(3)
    with pytest.raises(RateLimited, match="4 answers in progress"):
        second[1].enter(1)
    again[1].leave(3)
    second[1].leave(1)
    again[1].enter(4)
    assert second[0]._count.answers == 0 and second[2]._count.answers == 4


def test_servers_with_other_lists_of_keys_count_apart(tmp_path: Path) -> None:
    """While one after another is started again behind a change of the file."""
    old, new = limits(tmp_path, 0), limits(tmp_path, 1, number_of_keys=4)
    old[1].enter(4)
    new[1].enter(4)


def test_one_server_alone_keeps_no_file(tmp_path: Path) -> None:
    ApiKeys(ServerSettings(api_keys=("one",), key_answers_max=1, shared_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("does", [lambda key: key.spend(1), lambda key: key.enter(1)], ids=["spend", "enter"])
def test_who_counts_waits_for_who_counts_elsewhere(tmp_path: Path, does: Callable[[KeyLimits], None]) -> None:
    """Each has a descriptor of its own, as processes have."""
    here, there = shared(str(tmp_path), 0, 2, 1)[0], shared(str(tmp_path), 1, 2, 1)[0]
    key = KeyLimits(10, 10, 10, there)
    counting = Thread(target=does, args=(key,), daemon=True)
    with here.lock:
        counting.start()
        counting.join(0.3)
        assert counting.is_alive() and not any(here.row)
    counting.join(60)
    assert not counting.is_alive() and any(here.row)
