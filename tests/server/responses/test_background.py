"""Responses in the background: made without their client, cancelled, read while they come, and streams picked up anywhere."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import AbortRequests
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.api_keys import EVERYONE
from vnext.server.http.background import BACKGROUND, Background, Running
from vnext.server.views.responses import RESPONSES

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ENDED = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture
def server() -> Iterator[EdgeServer]:
    with EdgeServer(byte_level(TEMPLATE), sse_ping_interval_s=0) as running:
        yield running


def begin(server: EdgeServer, words: str = "say:abcdefgh", **options: Any) -> Any:
    return server.openai().responses.create(model="toy", input=words, background=True, **options)


def ended(server: EdgeServer, id_: str) -> Any:
    client = server.openai()
    wait_until(lambda: client.responses.retrieve(id_).status in ENDED)
    return client.responses.retrieve(id_)


def events(server: EdgeServer, id_: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "" if after is None else f"&starting_after={after}"
    text = httpx.get(f"{server.url}/v1/responses/{id_}?stream=true{query}", timeout=60).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_a_response_comes_without_its_client(server: EdgeServer) -> None:
    server.engine.running.clear()
    asked = begin(server)
    assert asked.status == "queued" and asked.background and asked.output == []
    assert server.openai().responses.retrieve(asked.id).status == "in_progress"
    server.engine.running.set()
    found = ended(server, asked.id)
    assert found.status == "completed" and found.output_text == "abcdefgh" and found.id == asked.id and found.usage.output_tokens == 9
    after = server.openai().responses.create(model="toy", input="say:x", previous_response_id=asked.id)
    assert after.output_text == "x" and server.context.limiter.live_count == 0
    with pytest.raises(openai.BadRequestError, match="not created with background and stream"):
        server.openai().responses.retrieve(asked.id, stream=True)


def test_a_response_is_cancelled_and_its_request_ends(server: EdgeServer) -> None:
    server.engine.running.clear()
    asked = begin(server, "endless", max_output_tokens=500)
    wait_until(lambda: server.context.limiter.live_count == 1)
    for _ in range(2):
        assert server.openai().responses.cancel(asked.id).status == "cancelled"
    wait_until(lambda: bool(server.engine.of_kind(AbortRequests)))
    assert server.openai().responses.retrieve(asked.id).status == "cancelled" and server.context.limiter.live_count == 0
    server.engine.running.set()
    done = ended(server, begin(server).id)
    assert server.openai().responses.cancel(done.id).status == "completed", "what has ended stays as it is"
    plain = server.openai().responses.create(model="toy", input="say:x")
    with pytest.raises(openai.BadRequestError, match="not created with background"):
        server.openai().responses.cancel(plain.id)
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.cancel("resp_none")


def test_a_stream_is_picked_up_at_any_event(server: EdgeServer) -> None:
    """Cut at every place, also while it comes, its pieces join to the whole: nothing is lost, repeated or changed."""
    body = {"model": "toy", "input": "say:abcdefgh", "background": True, "stream": True}
    whole: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as answer:
        whole = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    id_ = whole[0]["response"]["id"]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole))) and whole[-1]["type"] == "response.completed"
    assert events(server, id_) == whole
    for place in range(len(whole)):
        assert events(server, id_, place) == whole[place + 1 :]
    assert server.get(f"/v1/responses/{id_}?stream=true&starting_after=x")[0] == 400


def test_a_client_that_leaves_its_stream_finds_it_again(server: EdgeServer) -> None:
    rng = random.Random(5)
    for _ in range(8):
        words = "".join(rng.choices("abcdef ", k=50))
        body = {"model": "toy", "input": f"say:{words}", "background": True, "stream": True, "max_output_tokens": 70}
        seen: list[dict[str, Any]] = []
        with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                seen += [json.loads(line[6:])] if line.startswith("data: ") else []
                if seen and rng.random() < 0.2:
                    break
        while seen[-1]["type"] not in ("response.completed", "response.incomplete"):
            id_, after = seen[0]["response"]["id"], seen[-1]["sequence_number"]
            with httpx.stream("GET", f"{server.url}/v1/responses/{id_}?stream=true&starting_after={after}", timeout=60) as answer:
                for line in answer.iter_lines():
                    seen += [json.loads(line[6:])] if line.startswith("data: ") else []
                    if rng.random() < 0.05:
                        break
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta") == words


def test_a_failure_is_kept_as_the_response(server: EdgeServer) -> None:
    server.engine.running.clear()
    asked = begin(server)
    server.engine.close()
    found = ended(server, asked.id)
    assert found.status == "failed" and found.error.message


def test_what_cannot_be_read_later_is_refused(server: EdgeServer) -> None:
    with pytest.raises(openai.BadRequestError, match="store is false"):
        begin(server, store=False)
    with EdgeServer(byte_level(TEMPLATE), responses_bytes_max=0) as storeless:
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            begin(storeless)


def test_a_deleted_one_ends_and_the_end_of_the_server_ends_all(server: EdgeServer) -> None:
    server.engine.running.clear()
    asked = begin(server, "endless", max_output_tokens=500)
    server.openai().responses.delete(asked.id)
    assert server.get(f"/v1/responses/{asked.id}")[0] == 404 and server.context.limiter.live_count == 0
    begin(server, "endless", max_output_tokens=500)
    server.in_loop(server.app[BACKGROUND].close())
    assert server.context.limiter.live_count == 0


class SlowEvents:
    """A reader that is behind after each frame; another one comes while it catches up."""

    def __init__(self, running: Running) -> None:
        self.running, self.read = running, list[bytes]()

    def send(self, frame: bytes) -> bool:
        self.read.append(frame)
        return False

    async def room(self) -> None:
        if len(self.running.frames) < 20:
            self.running.send(b"%d" % len(self.running.frames))
        else:
            self.running.end()


def test_a_slow_reader_misses_nothing_that_comes_meanwhile() -> None:
    running = Running("", {"id": "resp_1"})
    running.send(b"0", b"1")
    reader = SlowEvents(running)
    asyncio.run(running.follow(reader, 0))
    assert reader.read == running.frames == [b"%d" % number for number in range(20)]


def test_one_that_is_cancelled_before_it_has_begun_is_told_so() -> None:
    async def run() -> list[str]:
        background, told, running = Background(1000), list[str](), Running("", {"id": "resp_1"})

        async def make(running: Running) -> None:
            await asyncio.sleep(60)

        background.begin(running, make, lambda failure: told.append("failed"), lambda: told.append("cancelled"))
        await background.close()
        assert running.is_over and background.get("resp_1", EVERYONE) is None
        return told

    assert asyncio.run(run()) == ["cancelled"]


class Reader:
    """Reads as fast as events come."""

    def __init__(self) -> None:
        self.read = list[bytes]()

    def send(self, frame: bytes) -> bool:
        self.read.append(frame)
        return True


def test_events_of_all_in_progress_take_a_bounded_room(caplog: pytest.LogCaptureFixture) -> None:
    size, bytes_max = 1000, 50_000

    async def run() -> None:
        background, begun, reader = Background(bytes_max), list[Running](), Reader()

        async def make(running: Running) -> None:
            await asyncio.sleep(60)

        for number in range(3):
            begun.append(Running("", {"id": f"resp_{number}"}))
            background.begin(begun[-1], make, lambda failure: None, lambda: None)
        following = asyncio.create_task(begun[0].follow(reader, 0))
        for number in range(200):
            begun[0].send(b"%d" % number + b"x" * size)
            begun[1].send(b"small")
            assert sum(sys.getsizeof(frame) + 8 for each in begun for frame in each.frames) <= bytes_max
            await asyncio.sleep(0)
        assert begun[0].forgotten and not begun[0].whole and len(begun[1].whole) == 200, "the largest one forgets"
        assert [frame.partition(b"x")[0] for frame in reader.read] == [b"%d" % number for number in range(200)]
        with pytest.raises(InvalidRequest, match="The events up to number [0-9]+ of this response are not kept any more"):
            await begun[0].follow(Reader(), begun[0].forgotten - 1)
        begun[0].end()
        await following
        await background.close()
        assert background.size_bytes == 0

    asyncio.run(run())
    assert len(caplog.messages) == 1 and "The events of the response resp_0 are forgotten" in caplog.text


def test_a_response_outlives_its_events(server: EdgeServer) -> None:
    """The events of one answer take more than the bound, and the answer itself does not."""
    server.app[BACKGROUND]._bytes_max = server.app[RESPONSES]._bytes_max = 8000
    asked = begin(server, "say:" + "abcdefgh" * 8, stream=True)
    id_ = next(event.response.id for event in asked if event.type == "response.created")
    assert ended(server, id_).status == "completed"
    answer = httpx.get(f"{server.url}/v1/responses/{id_}?stream=true", timeout=60)
    assert answer.status_code == 400 and "its events took too much room to be kept" in answer.text
