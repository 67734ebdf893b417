"""A stream that is cut at any byte goes on, at any server, with the bytes that its client lacks."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from edge_server import EOS, TOKENIZER, EdgeServer
from fake_engine import FakeEngine

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import unpack_tokens

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% for t in tools or [] %}<tool_call>{% endfor %}"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "längere Worte"}}</tool_call>'
SAID = "Wörter, Zeichen 😀 und ein <b>Ende</b>: STOP und mehr"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEXT = rb'"(?:text|content|delta|partial_json|arguments)":"((?:[^"\\]|\\.)*)"'
USER = {"role": "user", "content": "say it"}


def answer(request: SubmitRequest) -> list[int]:
    """A text that depends on the seed; a call, where the prompt has tools."""
    prompt = TOKENIZER.decode(unpack_tokens(request.prompt).tolist())
    text = f"I call. {CALL}{CALL}" if "<tool_call>" in prompt else SAID
    return [*TOKENIZER.encode(f"{request.sampling.seed % 1000} {text}")][: request.sampling.max_tokens - 1] + [EOS]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "a"}),
    "two prompts with three answers": ("/v1/completions", {"prompt": ["a", "b"], "n": 3, "stream_options": {"include_usage": True}}),
    "stopped": ("/v1/completions", {"prompt": "a", "stop": ["STOP"], "echo": True, "seed": -5}),
    "three stopped answers": ("/v1/completions", {"prompt": "a", "n": 3, "stop": ["Ende"], "logprobs": 1}),
    "log-probabilities": ("/v1/completions", {"prompt": "a", "logprobs": 2, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", {"messages": [USER], "stream_options": {"include_usage": True}}),
    "continuous usage": (
        "/v1/chat/completions",
        {"messages": [USER], "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat with calls": ("/v1/chat/completions", {"messages": [USER], "tools": TOOLS, "n": 2}),
    "chat with log-probabilities": ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2}),
    "message": ("/v1/messages", {"messages": [USER], "stop_sequences": ["ein"]}),
    "message with calls": ("/v1/messages", {"messages": [USER], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    "response": ("/v1/responses", {"input": [USER], "store": False}),
    "response with calls": (
        "/v1/responses",
        {"input": [USER], "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "top_logprobs": 1,
         "include": ["message.output_text.logprobs"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EdgeServer]]:
    """Two that know nothing of each other."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    options = {"chat_template_path": str(path), "tool_call_parser": "hermes"}
    with EdgeServer(engine=FakeEngine(answer), **options) as one, EdgeServer(engine=FakeEngine(answer, root_seed=9), **options) as other:
        yield [one, other]


def body_of(name: str) -> tuple[str, dict[str, Any]]:
    path, body = CASES[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return path, {limit: 150, "stream": True} | body


def ask(server: EdgeServer, path: str, body: dict[str, Any], last: str = "", **headers: str) -> tuple[int, bytes]:
    """Status and whole body of an answer."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.0", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    given = ({"Last-Event-ID": last} if last else {"Accept": "text/event-stream"}) | headers
    lines += [f"{name}: {value}" for name, value in given.items()]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        head, _, rest = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), re.sub(rb'"(completed_at)":\d+', rb'"\1":0', rest)


def whole_events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1] if not event.startswith(b":")]


def id_of(event: bytes) -> str:
    return re.match(rb"id: (.+)\n", event)[1].decode()


def shown(event: bytes) -> bytes:
    """An event without its id: where several choices come together, another order is right too."""
    return re.sub(rb"id: .+\n", b"", event)


def choices(events: list[bytes]) -> dict[bytes, tuple[bytes, list[bytes]]]:
    """By choice its text, and what is not text, in order: how many tokens came in one event is left to the machine."""
    found: dict[bytes, tuple[bytes, list[bytes]]] = {}
    for event in map(shown, events):
        match = re.search(rb'"index":(\d+),"(?:text|delta)"', event)
        text, others = found.setdefault(match[1] if match else b"", (b"", []))
        pieces = re.findall(TEXT, event)
        other = re.sub(rb'"(?:sequence_number|completion_tokens|total_tokens)":\d+', b"", re.sub(TEXT, b"", event))
        is_new = other not in others and (b"delta" not in event or b'_reason":null' not in event)
        found[match[1] if match else b""] = text + b"".join(pieces), others + [other] * is_new
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_behind_every_event(servers: list[EdgeServer], name: str) -> None:
    path, body = body_of(name)
    status, data = ask(servers[0], path, body)
    events = whole_events(data)
    assert status == 200 and len(events) > 10 and all(event.startswith(b"id: ") for event in events)
    assert len({id_of(event) for event in events}) == len(events)
    for count in sorted({1, 2, len(events) - 2, len(events) - 1, *random.Random(name).sample(range(1, len(events)), 8)}):
        status, rest = ask(servers[count % 2], path, body, id_of(events[count - 1]))
        found = events[:count] + whole_events(rest)
        assert status == 200 and choices(found) == choices(events), (count, events[count - 1], rest[:500])
        if b'"index":1' not in data and len(found) == len(events):
            assert found == events
    assert ask(servers[1], path, body, id_of(events[-1])) == (204, b"")


@pytest.mark.parametrize("name", ["chat with calls", "completion", "two prompts with three answers", "message", "response"])
def test_a_stream_that_is_cut_again_and_again_is_the_same(servers: list[EdgeServer], name: str) -> None:
    rng, (path, body) = random.Random(name), body_of(name)
    found, is_over = b"", False
    status, uncut = ask(servers[0], path, body)
    rest, last = uncut, ""
    for _ in range(40):
        cut = rng.randrange(len(rest) // 4 + 1) if rng.random() < 0.9 else len(rest)
        kept = b"".join(whole_events(rest[:cut]))
        found += kept
        last = id_of(whole_events(kept)[-1]) if kept else last
        if is_over := kept == rest:
            break
        if last:
            status, rest = ask(rng.choice(servers), path, body, last)
            if is_over := status == 204:
                break
    assert choices(whole_events(found)) == choices(whole_events(uncut)) and is_over


def test_outputs_that_were_merged_on_their_way_are_cut_where_the_client_is(servers: list[EdgeServer]) -> None:
    """A slow client gets several tokens in one event."""
    body = {"prompt": "a", "max_tokens": 150, "stream": True}
    engine = servers[0].engine
    engine.running.clear()
    with socket.create_connection(("127.0.0.1", servers[0].port), timeout=60) as connection:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        head += f"Accept: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        engine.running.set()
        events = whole_events(b"".join(iter(lambda: connection.recv(64), b"")).partition(b"\r\n\r\n")[2])
    texts = [re.search(rb'"text":"(.*?)","logprobs', event) for event in events]
    for count in range(1, len(events), 9):
        _, rest = ask(servers[1], "/v1/completions", body, id_of(events[count - 1]))
        more = [re.search(rb'"text":"(.*?)","logprobs', event) for event in whole_events(rest)]
        text = b"".join(each[1] for each in texts[:count] + more if each)
        assert text == b"".join(each[1] for each in texts if each)


def test_what_is_no_id_or_another_request_s_is_refused(servers: list[EdgeServer]) -> None:
    path, body = body_of("completion")
    last = id_of(whole_events(ask(servers[0], path, body)[1])[3])
    request, _, position = last.rpartition(".")
    for bad in ("1", "é", "a.b.c", f"{request}.x", f"{request}.-1", f"{request}.1/1", f"{request}.1,2e,", f"x{last}"[:-1] + "/3", "9" * 3000):
        status, data = ask(servers[0], path, body, bad)
        assert status == 400 and b"Last-Event-ID" in data, bad
    for other in ({"prompt": "b"}, {"temperature": 0.5}, {"seed": 5}, {"max_tokens": 151}, {"logprobs": 1}, {"n": 2}, {"stop": "x"}):
        status, data = ask(servers[1], path, body | other, last)
        assert status == 400 and b"another request" in data, other
    assert ask(servers[0], path, body, f"{request}.1,2")[0] == 400
    assert ask(servers[0], path, body | {"stream": False}, last)[0] == 200, "a whole answer lacks nothing"
    assert ask(servers[0], "/v1/chat/completions", {"messages": [USER], "stream": True, "max_tokens": 5}, last)[0] == 400


def test_another_system_says_that_it_cannot(servers: list[EdgeServer]) -> None:
    path, body = body_of("completion")
    last = id_of(whole_events(ask(servers[0], path, body)[1])[3])
    with EdgeServer(engine=FakeEngine(answer, model_digest="another")) as other:
        status, data = ask(other, path, body, last)
        assert status == 409 and json.loads(data)["error"]["code"] == "other_system"


def test_another_key_s_stream_is_not_picked_up() -> None:
    with EdgeServer(engine=FakeEngine(answer), api_keys=("one", "two")) as server:
        path, body = body_of("completion")
        events = server.call("POST", path, body, Authorization="Bearer one", Accept="text/event-stream")[1]
        last = id_of(events.encode() if isinstance(events, str) else events)
        status, data, _ = server.call("POST", path, body, **{"Authorization": "Bearer two", "Last-Event-ID": last})
        assert status == 400 and "another request" in data["error"]["message"]
        assert server.call("POST", path, body, **{"Authorization": "Bearer one", "Last-Event-ID": last})[0] == 200


def test_where_tokens_depend_on_the_batch_events_have_no_ids() -> None:
    with EdgeServer(engine=FakeEngine(answer, environment={"batch_invariant": "no: a test"})) as server:
        path, body = body_of("completion")
        _, data = ask(server, path, body)
        assert data.startswith(b"data: ")
    with EdgeServer(engine=FakeEngine(answer)) as server:
        assert ask(server, path, body | {"prompt": ["a"] * 65})[1].startswith(b"data: ")


def test_clients_that_do_not_say_that_they_read_events_get_none_but_data(servers: list[EdgeServer]) -> None:
    path, body = body_of("completion")
    for said in ("*/*", "application/json", ""):
        events = ask(servers[0], path, body, Accept=said)[1].split(b"\n\n")
        assert len(events) > 10 and all(re.fullmatch(rb"data: [^\n]+", event) for event in events[:-1])
    last = id_of(whole_events(ask(servers[0], path, body)[1])[3])
    assert all(event.startswith(b"id: ") for event in whole_events(ask(servers[0], path, body, last, Accept="*/*")[1]))


def test_a_background_response_goes_on_where_it_is(servers: list[EdgeServer]) -> None:
    """At the process that makes it, and computed again at another one."""
    path, body = body_of("response")
    body |= {"background": True, "store": True}
    events = whole_events(ask(servers[0], path, body)[1])
    for server in servers:
        for count in (1, len(events) // 2):
            found = whole_events(ask(server, path, body, id_of(events[count - 1]))[1])
            assert events[:count] + found == events
    id_ = json.loads(events[0].partition(b"data: ")[2])["response"]["id"]
    given = {"Last-Event-ID": id_of(events[2])}
    for server in servers:
        status, found, _ = server.get(f"/v1/responses/{id_}?stream=true", **given)
        assert status == 200 and found.encode().startswith(events[3])
        assert server.get(f"/v1/responses/{id_}?stream=true", **{"Last-Event-ID": "x"})[0] == 400
