"""Bounds of waiting prompt tokens, the time after which to come back, and the time a request may take."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.server.answers import generation
from vnext.server.context.admission import MEMORY_S, RETRY_MAX_S, Quota, RequestLimiter, Throughput, retry_after_s
from vnext.server.context.errors import Overloaded


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_a_throughput_is_that_of_the_time_in_which_there_was_something() -> None:
    throughput, now_s = Throughput(), 1000.0
    assert throughput.per_second(now_s) == 0
    throughput.seen_s = now_s
    for _ in range(40):
        now_s += 0.5
        throughput.ended(50, now_s)
    assert throughput.per_second(now_s) == pytest.approx(100, rel=0.03)
    throughput.seen_s = now_s + 3600  # idle until then
    assert throughput.per_second(now_s + 3600) == pytest.approx(100, rel=0.03)
    assert throughput.per_second(now_s + 3600 + MEMORY_S) < 50  # nothing ends any more


def test_seconds_to_come_back_are_whole_and_bounded() -> None:
    assert [retry_after_s(amount, 10.0) for amount in (1, 10, 11, 595, 10**9)] == [1, 1, 2, 60, RETRY_MAX_S]
    assert retry_after_s(100, 0.0) == 1


def test_a_refusal_says_when_the_measured_throughput_has_made_room() -> None:
    clock = Clock()
    quota = Quota(100, 100, "{} are held", clock=clock)
    quota.take(100, "a")
    for _ in range(10):
        clock.now_s += 1
        quota.give(4, "a")
        quota.take(4, "b")
    with pytest.raises(Overloaded) as error:
        quota.take(20, "c")
    assert error.value.retry_after_s == 5  # 20 at 4 a second
    with pytest.raises(Overloaded) as error:
        quota.take(80, "b")  # 20 at its own part, which is two fifths
    assert error.value.retry_after_s == 13


def test_the_first_is_admitted_however_long_it_is() -> None:
    limiter = RequestLimiter(100, waiting_tokens_max=1000)
    waiting = limiter.prompts(5000, "a")
    with pytest.raises(Overloaded, match="5000 tokens of prompts are waiting and 1 more would pass the bound of 1000"):
        limiter.prompts(1, "b")
    waiting.begun(4900)
    other = limiter.prompts(900, "b")
    with pytest.raises(Overloaded, match="100 .* 700 more would pass your bound of 750"):
        limiter.prompts(700, "a")
    other.end()
    assert limiter.waiting_tokens == 100
    waiting.end()
    assert limiter.waiting_tokens == 0


def test_prompts_wait_until_their_first_token() -> None:
    with EdgeServer(waiting_tokens_max=40) as server:
        server.engine.running.clear()
        client, begun = server.openai(timeout=60), threading.Event()

        def read() -> None:
            for _ in client.completions.create(model="toy", prompt="b" * 30, max_tokens=400, stream=True):
                server.engine.running.clear() if not begun.is_set() else None
                begun.set()

        first = threading.Thread(target=read)
        first.start()
        wait_until(lambda: server.context.limiter.waiting_tokens == 30)
        status, answer, headers = server.post("/v1/completions", {"prompt": "c" * 30, "stream": True})
        assert status == 429 and answer["error"]["code"] == "overloaded" and headers["Retry-After"]
        assert "tokens of prompts are waiting" in answer["error"]["message"]
        server.engine.running.set()
        assert begun.wait(60)
        assert (server.context.limiter.waiting_tokens, server.context.limiter.live_count) == (0, 1)
        server.engine.running.set()
        first.join(60)
        assert server.post("/v1/completions", {"prompt": "say:a", "n": 3})[0] == 200
        assert server.context.limiter.waiting_tokens == 0 == server.context.limiter.live_count


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_request_that_takes_too_long_ends_and_leaves_nothing(path: str) -> None:
    with EdgeServer(request_timeout_s=0.2) as server:
        server.engine.running.clear()
        status, answer, _ = server.post(path, {"prompt": "abc"} if "compl" in path else {"input": "abc"})
        assert status == 504 and answer["error"]["code"] == "request_timeout" and "0.2 s" in answer["error"]["message"]
        assert server.engine.wait_aborts("client")
        wait_until(lambda: server.context.limiter.live_count == server.context.client.live_count == 0)
        server.engine.running.set()
        assert server.openai().completions.create(model="toy", prompt="say:a").choices[0].text == "a"


def test_a_stream_that_takes_too_long_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over behind its first token, however long that took."""
    timeouts: list[asyncio.Timeout] = []
    timeout = asyncio.timeout
    monkeypatch.setattr(generation.asyncio, "timeout", lambda delay: timeouts.append(timeout(delay)) or timeouts[-1])

    async def pass_time() -> None:
        [running] = [each for each in timeouts if each.when() is not None and each.when() > asyncio.get_running_loop().time() + 500]
        running.reschedule(0)

    with EdgeServer(request_timeout_s=1000.0) as server:
        server.engine.hold()
        stream = server.openai().completions.create(model="toy", prompt="a", stream=True, max_tokens=400)
        next(stream)
        server.in_loop(pass_time())
        with pytest.raises(openai.APIError, match="within 1000 s"):
            list(stream)
        assert server.engine.wait_aborts("client")
