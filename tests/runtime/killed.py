"""Losses while requests run: outputs that are gathered, and what is done after so many tokens of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial

from tests.runtime.fake_engine import wait_until
from vnext.runtime.client.client_sync import SyncEngineClient
from vnext.runtime.protocol.messages import RequestOutput

Heard = dict[str, list[RequestOutput]]


def heard_of(outputs: Iterator[RequestOutput], at: dict[int, Callable[[], None]] | None = None) -> Heard:
    """All outputs by name; `at[n]` is called after the first n tokens: outputs are fewer where this process is slow."""
    found, count, due = defaultdict(list), 0, sorted((at or {}).items())
    for output in outputs:
        found[output.name].append(output)
        count += len(output.tokens) // 4
        while due and count >= due[0][0]:
            due.pop(0)[1]()
    assert not due, f"{count} tokens came"
    return found


def wait_until_gone(before: Collection[str]) -> None:
    """Of shared memory's files those that have come since. Other tests have files there for a while, and semaphores of
    multiprocessing, of which no engine has any, for longer."""
    came = {each for each in os.listdir("/dev/shm") if not each.startswith("sem.mp-")} - {*before}
    wait_until(lambda: came.isdisjoint(os.listdir("/dev/shm")))


def in_turn(client: SyncEngineClient, kills: dict[int, Callable[[], None]]) -> dict[int, Callable[[], None]]:
    """For `heard_of`: each of them kills ranks that serve. Outputs queue where this process is slow, and ranks that were killed twice
    are lost once."""

    def one(kill: Callable[[], None], count: int) -> None:
        wait_until(lambda: not count or (client.stats.recoveries, client.stats.recovering) == (count, ""))
        kill()

    return {at: partial(one, kill, count) for count, (at, kill) in enumerate(sorted(kills.items()))}
