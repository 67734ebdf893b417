"""Random bodies at the routes of operators, trainers and adapters, whose bodies reach ranks: an answer in order, and ranks that live."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from serving import Server, serving

from vnext.server.http.middleware import OPERATORS
from vnext.server.routes import ROUTES

BODIES = {route.path: route.body for route in ROUTES if route.method == "POST"}
PATHS = sorted(path for path in BODIES if path in OPERATORS or "lora" in path)
ROUNDS, LONG_ROUNDS = 12, 1_000
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", "a", "x" * 300, "\x00", "é😀", "../../etc",
    "/nowhere", "%2e%2e", [], {}, [None], [[]], [{}], [1, "a"], {"": ""}, {"a": {"b": []}}, ["a"] * 40, [0] * 40, [-1], [2**40],
]  # fmt: skip
RAW = [b"", b"null", b"[]", b'"', b"{", b"\xff", b"{}" * 2, b'{"a":' * 3000, b"[" * 3000, b'{"model": "\\ud800"}', b"\xef\xbb\xbf{}", b"1e999"]


def body_of(kind: type[msgspec.Struct] | None, rng: random.Random) -> bytes:
    """Most fields of a body with values of any type, or no body at all."""
    if kind is None or rng.random() < 0.1:
        return rng.choice(RAW)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    given = {name for name in kind.__struct_fields__ if rng.random() < (0.9 if name in required else 0.1)}
    found = {name: value_of(rng) for name in sorted(given)}
    text = json.dumps(found)
    return text.replace('"a"', '"\\ud800"', 1).encode() if rng.random() < 0.05 else text.encode()


def value_of(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(6 if depth < 3 else 4):
        case 4:
            return [value_of(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 5:
            names = ("role", "content", "type", "name", "text", "function", "json", "regex", "id", "tokens", "shape", "dtype")
            return {name: value_of(rng, depth + 1) for name in rng.sample(names, rng.randrange(4))}
        case _:
            return rng.choice(HOSTILE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("fuzzed")
    options = ("--enable-rl-routes", "--enable-lora", "--lora-root", str(root), "--max-restarts", "0")
    with serving(root / "log", *options) as running:
        yield running


@pytest.mark.parametrize("path", PATHS)
def test_any_body_gets_an_answer_in_order(server: Server, path: str, request: pytest.FixtureRequest) -> None:
    rng = random.Random(f"{path} 3")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(LONG_ROUNDS if request.config.getoption("--long") else ROUNDS):
            body = body_of(BODIES.get(path), rng)
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (body, answer.text)
            assert answer.status_code < 400 or answer.json()["error"]["message"], (body, answer.text)
        huge = client.post("/collective_rpc", json={"method": "any", "kwargs": {"number": 2**64}})
        assert huge.status_code == 400 and huge.json()["error"]["param"] == "kwargs.number"
        assert client.post("/wake_up").status_code == client.post("/resume").status_code == 200
        told = client.post("/v1/completions", json={"prompt": "What is Python?", "max_tokens": 3, "ignore_eos": True})
        assert told.json()["choices"][0]["finish_reason"] == "length", told.text
