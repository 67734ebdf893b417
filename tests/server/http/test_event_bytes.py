"""A stream's bytes: the same as ever, however few objects are made on their way; and a client that does not read."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from edge_server import EdgeServer
from fake_engine import wait_until
from hypothesis import given, strategies as st

from vnext.server.http.streaming import Events, TextFrame, frame_of

GOLDEN = Path(__file__).with_name("event_bytes.txt")
WORDS = 'say:A "quoted" word\\, a tab\t, a line\n, é, 😀 and </script>; end'
SAID = {"prompt": WORDS, "max_tokens": 90, "stream": True}
CHAT = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 90, "stream": True}
CHANGES = (
    (rb"id: [^\n]+\n", b""),
    (rb'"created":\d+', b'"created":0'),
    (rb'"id":"(chatcmpl|cmpl)-\w+"', rb'"id":"\1-0"'),
    (rb'"system_fingerprint":"\w+"', b'"system_fingerprint":"fp"'),
)
CASES = {
    "completion": ("/v1/completions", SAID),
    "completion with usage": ("/v1/completions", SAID | {"stream_options": {"include_usage": True}}),
    "completion stopped": ("/v1/completions", SAID | {"stop": ["é,"]}),
    "completion, two answers": ("/v1/completions", SAID | {"n": 2}),
    "completion with log-probabilities": ("/v1/completions", SAID | {"max_tokens": 1, "logprobs": 2}),
    "completion with ids": ("/v1/completions", SAID | {"max_tokens": 1, "return_token_ids": True}),
    "completion echoed": ("/v1/completions", SAID | {"echo": True, "prompt": "say:ab"}),
    "completion, one token": ("/v1/completions", SAID | {"max_tokens": 1}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with usage": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "chat with log-probabilities": ("/v1/chat/completions", CHAT | {"max_tokens": 1, "logprobs": True}),
    "chat, three answers": ("/v1/chat/completions", CHAT | {"n": 3, "max_tokens": 1}),
}  # fmt: skip


def body_of(server: EdgeServer, path: str, body: dict, version: str = "1.1") -> bytes:
    """The response's body as it came, its chunks of HTTP taken apart; what changes with each call is made equal."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/{version}\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], answer
    if version == "1.1":
        rest = b"".join(chunks_of(rest))
    for changes, reported in CHANGES:
        rest = re.sub(changes, reported, rest)
    return rest


def chunks_of(data: bytes) -> list[bytes]:
    """Of HTTP, each of which must be whole events."""
    chunks = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        count = int(size, 16)
        chunks.append(rest[:count])
        assert rest[count : count + 2] == b"\r\n" and (count == 0 or chunks[-1].endswith(b"\n\n"))
        data = rest[count + 2 :]
    assert chunks[-1] == b""
    return chunks


def joined(body: bytes) -> list[str]:
    """Events by choice. Outputs may be merged on their way: neighbours that differ in their text alone are one event here, and
    the text that came with an answer's end stands before it."""
    events: dict[int, list[list[str]]] = {}
    for event in body.decode().split("\n\n")[:-1]:
        mine = events.setdefault(int(match[1]) if (match := re.search(r'"index":(\d+)', event)) else 99, [])
        for head, text, tail in parts_of(event):
            if mine and text and [mine[-1][0], mine[-1][2]] == [head, tail]:
                mine[-1][1] += text
            else:
                mine.append([head, text, tail])
    return ["".join(parts) for index in sorted(events) for parts in events[index]]


def parts_of(event: str) -> list[tuple[str, str, str]]:
    """What stands before, in and behind its text; an event with a text and an end as the two that it is made of."""
    found = re.fullmatch(r'(.*"(?:text|content)":")((?:[^"\\]|\\.)+)(".*)', event, re.DOTALL)
    if found is None or '"logprobs":{' in event or '"token_ids"' in event:
        return [(event, "", "")]
    head, text, tail = found.groups()
    if '"finish_reason":null' in tail:
        return [(head, text, tail)]
    goes_on = re.sub(r'"(finish|stop)_reason":("(?:[^"\\]|\\.)*"|null)', r'"\1_reason":null', tail)
    return [(head, text, goes_on), (head.replace('"content":"', "") + (tail[1:] if '"content"' in head else tail), "", "")]


@pytest.mark.parametrize("name", CASES)
def test_a_stream_has_the_golden_bytes(server: EdgeServer, name: str) -> None:
    """Made with the form that built every chunk as a dictionary; `python tests/server/http/test_event_bytes.py` makes it anew."""
    golden = dict(part.split("\n", 1) for part in GOLDEN.read_text().split("### ")[1:])
    assert "\n".join(joined(body_of(server, *CASES[name]))) + "\n" == golden[name]


def test_an_old_client_gets_the_same_without_chunks(server: EdgeServer) -> None:
    assert joined(body_of(server, *CASES["chat"], version="1.0")) == joined(body_of(server, *CASES["chat"]))


def test_the_end_of_a_stream_without_chunks_is_that_of_the_connection(server: EdgeServer) -> None:
    """Also for an old client that asks to keep it: it could not know otherwise."""
    data = json.dumps(SAID).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: here\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert b"".join(iter(lambda: connection.recv(65536), b"")).endswith(b"data: [DONE]\n\n")


@given(st.text(st.characters(codec="utf-8")))
def test_a_frame_around_a_text_is_the_frame_of_its_chunk(text: str) -> None:
    chunk = {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}
    frame = TextFrame(lambda reported: chunk | {"choices": [chunk["choices"][0] | {"text": reported}]})
    assert frame.of(text) == frame_of(chunk) == b"data: " + json.dumps(chunk, **COMPACT).encode() + b"\n\n"


COMPACT = {"ensure_ascii": False, "separators": (",", ":")}
ANSWERS, LENGTH = 4, 480


def test_a_client_that_does_not_read_costs_a_bound(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is merged, and nothing of it is lost."""
    most, send = [0], Events.send

    def watched(events: Events, *frames: bytes) -> bool:
        more = send(events, *frames)
        if events._transport is not None:
            most[0] = max(most[0], events._transport.get_write_buffer_size())
        return more

    monkeypatch.setattr(Events, "send", watched)
    for listener in server.site._server.sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "xyz", "max_tokens": LENGTH, "n": ANSWERS, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: most[0] > 0 and not server.engine._live)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    texts = re.findall(rb'"text":"(x*)"', b"".join(chunks_of(answer.partition(b"\r\n\r\n")[2])))
    assert sum(map(len, texts)) == ANSWERS * LENGTH and len(texts) < ANSWERS * LENGTH / 2
    assert most[0] < 64 * 1024 + 4096


if __name__ == "__main__":
    with EdgeServer() as running:
        made = [f"### {name}\n" + "\n".join(joined(body_of(running, *case))) + "\n" for name, case in CASES.items()]
    GOLDEN.write_text("".join(made))
