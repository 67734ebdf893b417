"""A vnext server that ends within a stream: the client of another API each time sees no error, and the undisturbed text.

The servers are vnext's own, over engines that answer with a text known beforehand, some tokens at a time.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from router_here import RouterHere

from vnext.gateway import exchange

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "server"), str(TESTS / "runtime")]

from edge_server import EOS, TOKENIZER, EdgeServer  # noqa: E402  (needs the path above)
from fake_engine import FakeEngine  # noqa: E402

from vnext.runtime.protocol.messages import SubmitRequest  # noqa: E402
from vnext.runtime.protocol.sampling_params import answer_seed  # noqa: E402

TEXT = "".join(chr(ord("a") + n % 26) + str(n) + (" " if n % 5 else "\n") for n in range(60))
TOKENS = [*TOKENIZER.encode(TEXT), EOS]
SAME = {"model_digest": "one", "environment": {"batch_invariant": "yes: a test says so"}}
HELD_AT = 60


class Held(FakeEngine):
    """An engine that answers with `text`, but goes no further than HELD_AT tokens while `holds` is set."""

    def __init__(self, text: str = TEXT, **ready: Any) -> None:
        self.holds = threading.Event()
        self.holds.set()
        super().__init__(lambda request: [*TOKENIZER.encode(text), EOS], **(SAME | ready))

    def _step(self) -> None:
        if not self.holds.is_set() or all(len(tokens) > len(TOKENS) - HELD_AT for _, _, tokens in self._live.values()):
            super()._step()


@contextmanager
def servers(*engines: Held) -> Iterator[list[EdgeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EdgeServer(engine=engine)) for engine in engines]


async def kill(server: EdgeServer) -> None:
    """End as a killed process does: nothing listens, and connections break."""
    await server.site.stop()
    for connection in list(server.runner.server.connections):
        if connection.transport is not None:
            connection.transport.abort()


def chat_text(router: RouterHere, between: Callable[[int], None]) -> str:
    stream = router.openai().chat.completions.create(model="toy", messages=[{"role": "user", "content": "go"}], stream=True, max_tokens=400)
    return joined((chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices), between)


def completion_text(router: RouterHere, between: Callable[[int], None]) -> str:
    stream = router.openai().completions.create(model="toy", prompt="go", stream=True, max_tokens=400)
    return joined((chunk.choices[0].text for chunk in stream), between)


def message_text(router: RouterHere, between: Callable[[int], None]) -> str:
    client = anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0)
    with client.messages.stream(model="toy", max_tokens=400, messages=[{"role": "user", "content": "go"}]) as stream:
        text = joined(stream.text_stream, between)
        assert stream.get_final_message().content[0].text == text and stream.get_final_message().stop_reason == "end_turn"
    return text


def response_text(router: RouterHere, between: Callable[[int], None]) -> str:
    client = router.openai()
    with client.responses.stream(model="toy", input="go", max_output_tokens=400) as stream:
        text = joined((event.delta for event in stream if event.type == "response.output_text.delta"), between)
        final = stream.get_final_response()
    assert final.output_text == text
    assert client.responses.retrieve(final.id).output_text == text, "the router knows where it is stored, by the client's id"
    after = client.responses.create(model="toy", input="more", previous_response_id=final.id, max_output_tokens=3)
    assert after.previous_response_id
    return text


def joined(texts: Iterator[str], between: Callable[[int], None]) -> str:
    found = ""
    for text in texts:
        found += text
        between(len(found))
    return found


APIS = {"chat": chat_text, "completions": completion_text, "messages": message_text, "responses": response_text}


class Killer:
    """Ends the server that has the stream, once the client has a part of the text; the others go on."""

    def __init__(self, edges: list[EdgeServer], how: Callable[[EdgeServer], None] = lambda edge: edge.in_loop(kill(edge))) -> None:
        self._edges, self._how = edges, how
        self.killed: EdgeServer | None = None

    def __call__(self, length: int) -> None:
        if self.killed is None and length > 20:
            [self.killed] = [each for each in self._edges if each.engine._live]
            self._how(self.killed)
            for each in self._edges:
                each.engine.holds.clear()


@pytest.mark.parametrize("api", APIS)
def test_the_client_has_the_undisturbed_text(api: str) -> None:
    with servers(Held(), Held()) as edges, RouterHere(*(each.url for each in edges)) as router:
        killer = Killer(edges)
        assert APIS[api](router, killer) == TEXT
        assert killer.killed is not None and router.counted("vnext_router_streams_continued_total") == 1
        assert router.counted("vnext_router_streams_lost_total") == 0
        firsts = [each.engine.of_kind(SubmitRequest)[0] for each in edges]
        assert all(each.has_seed for each in firsts) and len({each.sampling.seed for each in firsts}) == 1, "one seed for both"


@pytest.mark.parametrize("goes_on_at", [0, 1])
def test_a_stream_keeps_its_ids_and_its_client_may_pick_it_up(goes_on_at: int) -> None:
    """A server is killed within a stream; later its client loses the connection, and asks the same router or another one."""
    body = {"model": "toy", "prompt": "go", "stream": True, "max_tokens": 400, "n": 2}
    headers = {"Accept": "text/event-stream"}
    with servers(Held(), Held()) as edges, ExitStack() as stack:
        routers = [stack.enter_context(RouterHere(*(each.url for each in edges))) for _ in range(2)]
        killer, sent = Killer(edges), b""
        with httpx.stream("POST", f"{routers[0].url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            for part in answer.iter_bytes():
                sent += part
                killer(len(sent))
        events = sent.split(b"\n\n")[:-1]
        ids = [event.partition(b"\n")[0].removeprefix(b"id: ").decode() for event in events if event.startswith(b"id: ")]
        assert len({each.rpartition(".")[0] for each in ids}) == 1 and killer.killed is not None
        texts = [re.findall(rb'"index":%d,"text":"((?:[^"\\]|\\.)*)"' % index, sent) for index in (0, 1)]
        assert all(b"".join(each).decode().replace("\\n", "\n") == TEXT for each in texts)
        for place in (1, len(ids) // 2, len(ids) - 2):
            status, rest, _ = routers[goes_on_at].call("POST", "/v1/completions", body, Last_Event_ID=ids[place])
            assert status == 200 and "data: [DONE]" in rest and f"id: {ids[place]}\n" not in rest
            begin = b"\n\n".join(events[: place + 1]).decode()
            for index in (0, 1):
                found = re.findall(rf'"index":{index},"text":"((?:[^"\\]|\\.)*)"', begin + rest)
                assert "".join(found).replace("\\n", "\n") == TEXT


def test_the_head_names_the_seed_and_a_clients_own_stays() -> None:
    with servers(Held()) as edges, RouterHere(edges[0].url) as router:
        edges[0].engine.holds.clear()
        completions = router.openai().completions.with_raw_response
        drawn = completions.create(model="toy", prompt="go", stream=True).headers["X-Vnext-Seed"]
        assert edges[0].engine.of_kind(SubmitRequest)[0].sampling.seed == answer_seed(int(drawn), 0)
        assert "X-Vnext-Seed" not in completions.create(model="toy", prompt="go", stream=True, seed=7).headers
        assert edges[0].engine.of_kind(SubmitRequest)[1].sampling.seed == answer_seed(7, 0)


def test_an_engine_that_dies_says_so_and_the_stream_goes_on_too() -> None:
    with servers(Held(), Held()) as edges, RouterHere(*(each.url for each in edges)) as router:
        assert chat_text(router, Killer(edges, lambda edge: edge.engine.die("rank 3 ran out of memory"))) == TEXT


def test_a_single_server_that_comes_back_goes_on_with_its_streams() -> None:
    async def start_again(edge: EdgeServer) -> None:
        edge.site = web.TCPSite(edge.runner, "127.0.0.1", edge.port)
        await edge.site.start()

    def end_and_begin(edge: EdgeServer) -> None:
        edge.in_loop(kill(edge))
        threading.Timer(0.5, lambda: edge.in_loop(start_again(edge))).start()

    with servers(Held()) as edges, RouterHere(edges[0].url) as router:
        assert chat_text(router, Killer(edges, end_and_begin)) == TEXT


@pytest.mark.parametrize(
    "second",
    [{"model_digest": "another"}, {"environment": {"batch_invariant": "no: a test says so"}}, {"text": TEXT.replace("c2", "c3")}],
    ids=["other weights", "tokens depend on the batch", "another text all the same"],
)
def test_where_no_server_has_the_same_text_the_stream_ends_with_an_error(
    second: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "WAIT_S", 0.3)
    policy = {"routing_policy": "round_robin"}  # the first server gets the first request
    with servers(Held(), Held(**second)) as edges, RouterHere(*(each.url for each in edges), **policy) as router:
        with pytest.raises(openai.APIError, match="no other can go on with it"):
            chat_text(router, Killer(edges))
        assert router.counted("vnext_router_streams_lost_total") == 1
        warned = [each.getMessage() for each in caplog.records if "with other weights or kernels" in each.getMessage()]
        assert len(warned) == ("model_digest" in second)
