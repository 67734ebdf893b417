"""Work before a request is admitted: judged by its size first, off the event loop, and bounded for all and for each client."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from edge_server import TOKENIZER, EdgeServer
from fake_engine import wait_until

from vnext.server.context import text_work
from vnext.server.context.admission import Quota, RequestLimiter
from vnext.server.context.errors import Overloaded
from vnext.server.context.server_context import TOKENS_LISTED_MIN, TOKENS_READ_MIN
from vnext.server.context.text_work import QUICK_CHARACTERS_MAX, SWITCH_INTERVAL_S, TextWork
from vnext.text.template import ChatTemplate
from vnext.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
LONG = "x" * (TOKENIZER.characters_per_token * TOKENS_READ_MIN + 1)


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(Tokenizer, name, lambda *_, **__: pytest.fail("it was read"))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": LONG}, "there are 28673 characters in the prompt, and a token stands for at most 7"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "there are 28673 characters"),
        ("/v1/completions", {"prompt": [5] * 5000}, "there are 5000 tokens in prompt."),
        ("/v1/completions", {"prompt": [[5], [5] * 5000], "echo": True}, "there are 5000 tokens in prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "characters in the messages"),
        ("/v1/chat/completions", {"messages": [USER] * 513}, "there are 513 messages"),
        ("/tokenize", {"prompt": "x" * (7 * TOKENS_LISTED_MIN + 1)}, "characters"),
        ("/detokenize", {"tokens": [5] * (TOKENS_LISTED_MIN + 1)}, "there are 65537 tokens in tokens"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_read(
    server: EdgeServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], words: str
) -> None:
    forbid(monkeypatch, "encode", "decode")
    status, answer, _ = server.post(path, body)
    error = answer["error"]
    assert status == 400 and error["code"] == "context_length_exceeded" and words in error["message"]
    assert "This model's maximum context length is 512 tokens" in error["message"]
    monkeypatch.undo()
    assert server.post("/v1/completions", {"prompt": "say:fine"})[1]["choices"][0]["text"] == "fine"


def test_a_prompt_that_is_a_little_too_long_is_refused_with_its_number_of_tokens(server: EdgeServer) -> None:
    _, answer, _ = server.post("/v1/completions", {"prompt": "x" * 600})
    assert "(600 in the prompt" in answer["error"]["message"]


def test_many_prompts_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone is short enough for the loop, all together are not."""
    threads = set()
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda *given: threads.add(threading.current_thread().name) or encode(*given))
    with EdgeServer() as server:
        server.post("/v1/completions", {"prompt": ["say:" + "a" * 400] * 8, "max_tokens": 1})
        assert server._thread.name not in threads and any(name.startswith("short texts") for name in threads)
        threads.clear()
        server.post("/v1/completions", {"prompt": "a" * 400})
        assert server._thread.name in threads  # and the fake engine, which answers


def test_one_request_gets_a_share_of_the_gate_and_one_client_too(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "encode")
    with EdgeServer() as server:
        status, answer, _ = server.post("/v1/completions", {"prompt": ["a"] * 4096})
        assert status == 400 and "prompt has 4096 entries: at most 2048 are allowed" in answer["error"]["message"]
        assert server.get("/health")[0] == 200
    limiter = RequestLimiter(4096, request_max=1024)
    with limiter.enter(1024, "a"), limiter.enter(1024, "a"), limiter.enter(1024, "a"):
        with pytest.raises(Overloaded, match="3072 answers are in progress and 1 more would pass your bound of 3072"):
            limiter.enter(1, "a").__enter__()
        with limiter.enter(1024, "b"), pytest.raises(Overloaded, match="4096 answers .* the bound of 4096"):
            limiter.enter(1, "b").__enter__()
    with limiter.enter(1024, "a"):
        pass


def test_a_quota_takes_all_or_nothing() -> None:
    quota = Quota(10, 6, "{} are held")
    quota.take(6, "a")
    for client, amount in (("a", 1), ("b", 5)):
        with pytest.raises(Overloaded):
            quota.take(amount, client)
    quota.take(4, "b")
    quota.give(6, "a")
    quota.give(4, "b")
    assert quota.amount == 0 and not quota._held


def test_texts_wait_up_to_a_bound_and_short_ones_for_no_long_one() -> None:
    async def work() -> None:
        texts, ends = TextWork(4 * QUICK_CHARACTERS_MAX), threading.Event()
        size = QUICK_CHARACTERS_MAX + 1
        one = asyncio.create_task(texts.run(size, "a", lambda: ends.wait(60)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=f"Texts of {size} characters are being read"):
            await texts.run(size, "a", lambda: ends.wait(60))
        two = asyncio.create_task(texts.run(size, "b", lambda: ends.wait(60)))
        await asyncio.sleep(0)
        assert texts.characters == 2 * size
        assert await texts.run(5_000, "c", lambda: "short") == "short"
        three = asyncio.create_task(texts.run(size, "c", lambda: pytest.fail("it was cancelled while it waited")))
        await asyncio.sleep(0)
        three.cancel()
        ends.set()
        assert await one and await two
        with pytest.raises(asyncio.CancelledError):
            await three
        while texts.characters:
            await asyncio.sleep(0.01)
        texts.close()

    asyncio.run(work())


def test_no_text_waits_for_images_and_videos() -> None:
    """A video of few bytes may take half a minute."""

    async def work() -> None:
        texts, ends = TextWork(4 * QUICK_CHARACTERS_MAX), threading.Event()
        media = [asyncio.create_task(texts.run_media(10, client, lambda: ends.wait(60))) for client in "aabb"]
        await asyncio.sleep(0)
        for size in (5_000, QUICK_CHARACTERS_MAX + 1):
            assert await asyncio.wait_for(texts.run(size, "a", lambda: "text"), 30) == "text"
        assert texts.characters == 40 and not any(each.done() for each in media)
        ends.set()
        assert all(await asyncio.gather(*media))
        texts.close()

    asyncio.run(work())


def test_templates_render_one_after_another_and_give_way_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[float] = []
    at_once: list[int] = []
    most: list[int] = []
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)

    def render() -> None:
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()

    async def work() -> None:
        texts = TextWork(100)
        await asyncio.gather(*(texts.run_template(1, client, render) for client in "abcd"))
        texts.close()

    asyncio.run(work())
    assert most == [1] * 4 and intervals == [SWITCH_INTERVAL_S]


def test_memory_goes_back_after_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Event()
    monkeypatch.setattr(text_work, "trim", trimmed.set)
    with EdgeServer() as server:
        server.post("/v1/completions", {"prompt": "a" * 3000})
        assert not trimmed.is_set()
        server.post("/tokenize", {"prompt": " w" * 2**17})
        assert trimmed.wait(60)


SLOW = "{% for m in messages %}{% if 'slow' in m.content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
SLOW += "{% endfor %}{% endif %}{{ m.content }}{% endfor %}"


def test_a_slow_template_is_ended_and_keeps_no_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_s: dict[str, float] = {}
    render, answered = ChatTemplate.render, threading.Event()

    def watched(self: ChatTemplate, messages: Any, variables: Any, begins: bool = True, limit_s: float = 1.0) -> str:
        name = threading.current_thread().name
        limits_s[name] = limit_s
        assert not name.startswith("templates") or answered.wait(60)
        return render(self, messages, variables, begins, limit_s)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    tokenizer = Tokenizer(TOKENIZER._backend, {}, SLOW)
    with EdgeServer(tokenizer, template_limit_s=0.5) as server, ThreadPoolExecutor() as pool:
        messages = [{"role": "user", "content": "slow"}]
        slow = [pool.submit(server.post, "/v1/chat/completions", {"messages": messages}) for _ in range(3)]
        wait_until(lambda: any(name.startswith("templates") for name in limits_s))
        for _ in range(3):
            assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:hi"}]})[0] == 200
        assert not any(each.done() for each in slow)
        answered.set()
        for each in slow:
            status, answer, _ = each.result()
            assert status == 400 and "computes for more than 0.5 s with these messages" in answer["error"]["message"]
        assert limits_s.pop(server._thread.name) < 0.01 and set(limits_s.values()) == {0.5}
