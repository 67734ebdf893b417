"""The load generator: requests are sent when they are due, as many as there is room for, and failures are counted by kind."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from load_server import load_server

from vnext.commands.bench.load import generator
from vnext.commands.bench.load.client import Client
from vnext.commands.bench.load.generator import (
    Pace,
    Request,
    Timeline,
    at_once,
    constant,
    keep_sending,
    poisson,
    recorded,
    send_all,
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with load_server() as running:
        yield running


def request(prompt: str) -> Request:
    return Request(body=json.dumps({"prompt": prompt}).encode(), input_tokens=4)


def sent(url: str, prompts: list[str], pace: Pace, timeout_s: float = 60.0) -> list[Timeline]:
    async def send() -> list[Timeline]:
        async with Client(url, timeout_s=timeout_s) as client:
            return await send_all(client, [request(prompt) for prompt in prompts], pace, time.perf_counter())

    return asyncio.run(send())


def test_a_timeline_has_its_times_and_tokens(url: str) -> None:
    found = sent(url, ["go", "go"], Pace(times_s=[0.0, 0.2]))
    assert [(each.input_tokens, each.output_tokens, each.error) for each in found] == [(4, 3, "")] * 2
    assert found[1].intended_s - found[0].intended_s == pytest.approx(0.2)
    assert all(each.intended_s <= each.sent_s <= each.pieces[0].at_s <= each.pieces[-1].at_s <= each.ended_s for each in found)


def test_failures_are_counted_by_kind(url: str) -> None:
    found = sent(url, ["go", "refuse", "fail", "break"], Pace(times_s=at_once(4))) + sent(url, ["wait"], Pace(times_s=at_once(1)), 0.5)
    assert [each.kind for each in found] == ["", "HTTP status 400", "error event", "broken", "timeout"]
    assert all(each.error for each in found[1:])


def test_a_closed_loop_is_due_when_there_is_room(url: str) -> None:
    found = sent(url, ["wait", "go", "go"], Pace(times_s=at_once(3), concurrency=1, is_closed=True), 1.0)
    assert found[1].sent_s >= found[0].ended_s and found[2].sent_s >= found[1].ended_s
    assert [each.sent_s - each.intended_s for each in found] == [0.0] * 3
    open_loop = sent(url, ["wait", "go"], Pace(times_s=at_once(2), concurrency=1), 1.0)
    assert open_loop[1].sent_s - open_loop[1].intended_s > 0.5, "it was due at the start"


def test_senders_go_on_until_the_time_is_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with each look at the clock."""
    seconds = itertools.count()
    monkeypatch.setattr(generator, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))

    async def send() -> tuple[dict[str, int], list[float]]:
        async with Client(url) as client:
            return await keep_sending(client, [request("go"), request("refuse"), request("break")], 3, 60.0)

    found, took_s = asyncio.run(send())
    assert found.keys() == {"200", "400", "broken"} and len(took_s) == sum(found.values()) and 20 <= len(took_s) <= 33


def test_a_schedule_has_its_rate_and_its_seed() -> None:
    times = poisson(50, 100.0, seed=3)
    assert times == sorted(times) == poisson(50, 100.0, seed=3) != poisson(50, 100.0, seed=4)
    assert times[-1] == pytest.approx(0.5) and min(times) > 0
    assert at_once(3) == [0.0, 0.0, 0.0]
    assert constant(4, 2.0) == [0.5, 1.0, 1.5, 2.0]
    assert recorded([10.0, 12.0, 13.0], speed=2.0) == [0.0, 1.0, 1.5]


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    """A gamma distribution's spread over its mean is 1 / sqrt(shape)."""
    for shape in (0.25, 1.0, 16.0):
        gaps = np.diff(poisson(20_000, 10.0, seed=1, burstiness=shape))
        assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)
