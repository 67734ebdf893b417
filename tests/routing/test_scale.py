"""perf.scale in small: every request is routed and answered, the same counts each time, and exact views at the end."""

from __future__ import annotations

import random

import msgspec
import pytest

from perf.arrivals import Arrivals, Request, text_of
from perf.scale import Found, StepTime, simulated

STEP_TIME = StepTime(step_us=10_000, token_us=100)
COUNTED = [name for name in Found.__struct_fields__ if not any(word in name for word in ("decision", "fold", "cpu"))]


@pytest.fixture(scope="module")
def arrivals() -> Arrivals:
    """Conversations of six turns, a second and a half apart."""
    rng, requests = random.Random(0), []
    for conversation in range(12):
        at_ms, length = rng.randrange(2_000), 64
        for _ in range(6):
            length += 40
            requests.append(Request(at_ms, conversation, conversation % 2, length, 8))
            at_ms, length = at_ms + 1_500, length + 8
    return Arrivals(12.0, 64, sorted(requests, key=lambda each: each.at_ms))


def counts(found: Found) -> dict[str, object]:
    return {name: getattr(found, name) for name in COUNTED}


def test_replicas_behind_a_router(arrivals: Arrivals) -> None:
    found = simulated(arrivals, 3, "prefix", 9.0, STEP_TIME)
    assert counts(found) == counts(simulated(arrivals, 3, "prefix", 9.0, STEP_TIME))
    assert found.mismatches == 0 and found.requests > 50 and found.requests + found.unmeasured > 120
    other = simulated(arrivals, 3, "round_robin", 9.0, STEP_TIME)
    assert other.hit_rate < found.hit_rate - 0.1 and other.requests == found.requests
    assert 15 < found.wait_ms_p50 <= found.wait_ms_p99 < 500 and 1 <= found.p99_share <= found.largest_share < 2
    assert found.frames_per_s > 100 and found.events_per_s > found.frames_per_s and found.bytes_per_s > 30 * found.frames_per_s


def test_copies_begin_alike_and_go_on_each_in_its_own_way(arrivals: Arrivals) -> None:
    first, second = (text_of(3, 1, 64, 200, copy) for copy in (0, 1))
    assert (first[:64] == second[:64]).all() and (first[64:] != second[64:]).sum() > 100
    assert (text_of(3, 1, 64, 100) == first[:100]).all()
    assert msgspec.json.decode(msgspec.json.encode(arrivals), type=Arrivals) == arrivals
