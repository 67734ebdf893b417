"""Ray Serve's ingress over replicas that end: what a client gets, without a cluster. test_on_ray.py kills real ones.

Only the process that runs these tests loads Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

if find_spec("ray") is None:
    pytest.skip("the extra vnext[ray] is not installed", allow_module_level=True)

from vnext.gateway.outgoing import CONTINUED_MAX, Failed

DIES, HANGS = "dies", None
WHOLE = (200, [("Content-Type", "application/json")], 4, "one")
"""A `Head`."""


def streamed(status: int = 200, fingerprint: str = "one", kind: str = "text/event-stream; charset=utf-8") -> tuple[Any, ...]:
    """A `Head`; `kind` "": of nothing known."""
    return status, [("Content-Type", kind)] if kind else [], None, fingerprint


STREAM = streamed()


def event(text: str, id_: str = "first") -> bytes:
    return b"data: " + msgspec.json.encode({"id": id_, "choices": [{"index": 0, "text": text}]}) + b"\n\n"


class Id(NamedTuple):
    """Of a replica."""

    unique_id: str


class Answering:
    """One call of a replica: yields the parts, hangs or dies among them."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts, self.is_cancelled = parts, False

    async def __aiter__(self) -> AsyncIterator[Any]:
        from ray.exceptions import ActorDiedError

        from vnext.ray.ingress import Head

        for part in self._parts:
            if part is HANGS:
                await asyncio.Event().wait()
            if part is DIES:
                raise ActorDiedError()
            yield Head(*part) if isinstance(part, tuple) else part

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A deployment's handle whose calls are answered one after the other, the last one again and again."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self._answers, self.calls, self.given = list(answers), [], []

    def remote(self, *call: Any) -> Answering:
        self.calls.append(call)
        self.given.append(Answering(self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)))
        return self.given[-1]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.ray.ingress.PAUSE_S", 0.0)
    monkeypatch.setattr("vnext.ray.ingress.WAIT_S", 60.0)


def answered(handle: Handle, **body: Any) -> tuple[Any, bytes]:
    from vnext.ray.ingress import Passing
    from vnext.ray.routing import REQUEST_ID

    async def run() -> tuple[Any, bytes]:
        headers = {REQUEST_ID: "r", "content-type": "application/json"}
        answer = Passing(handle, "POST", "/v1/completions", "", headers, json.dumps({"prompt": "a", **body}).encode()).answer()
        return await answer.head(), b"".join([part async for part in answer.body()])

    return asyncio.run(run())


def test_a_request_whose_answer_has_not_begun_is_asked_again() -> None:
    handle = Handle([DIES], [WHOLE, b"ab", DIES], [WHOLE, b"ab", b"cd"])
    assert answered(handle) == (WHOLE, b"abcd")
    assert [call[:2] for call in handle.calls] == [("POST", "/v1/completions")] * 3 and len({call[3] for call in handle.calls}) == 1


def test_one_that_ends_every_replica_is_given_up() -> None:
    handle = Handle([DIES])
    with pytest.raises(Failed):
        answered(handle)
    assert len(handle.calls) == CONTINUED_MAX + 1


def test_a_stream_goes_on_where_the_fingerprint_is_the_same() -> None:
    other = streamed(fingerprint="other")
    handle = Handle(
        [STREAM, event("one t"), event("wo"), DIES],
        [other, event("another text", "second")],
        [STREAM, event("one two thr", "third"), DIES],
        [STREAM, event("one", "fourth"), event(" two three", "fourth"), b"data: [DONE]\n\n"],
    )
    head, body = answered(handle, stream=True)
    assert body == event("one t") + event("wo") + event(" thr") + event("ee") + b"data: [DONE]\n\n"
    assert [call[4] for call in handle.calls] == ["", "one", "one", "one"], "the router is asked for replicas that compute the same"
    seeds = {json.loads(call[3])["seed"] for call in handle.calls}
    assert seeds == {int(dict(head.headers)["X-Vnext-Seed"])}, "one seed, which the client may know"
    assert all(each.is_cancelled for each in handle.given)


@pytest.mark.parametrize(
    "second", [[HANGS], [streamed(fingerprint="other")], [streamed(status=503)], [STREAM, event("two", "second")]],
    ids=["no replica is left", "other weights", "a busy replica", "another text all the same"],
)  # fmt: skip
def test_a_stream_with_which_no_replica_can_go_on_ends_with_an_error(
    second: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vnext.ray.ingress.WAIT_S", 0.3)
    body = answered(Handle([STREAM, event("one"), DIES], second), stream=True)[1]
    assert body.startswith(event("one")) and b"two" not in body
    assert json.loads(body.split(b"data: ")[-1])["error"]["code"] == "backend_lost"


def test_what_is_no_stream_breaks_off() -> None:
    with pytest.raises(Failed):
        answered(Handle([streamed(kind=""), b"an archive of gigabytes", DIES]))


def test_the_router_chooses_among_the_replicas_of_a_fingerprint() -> None:
    from vnext.ray.routing import ViewRouter

    router = object.__new__(ViewRouter)
    router.initialize_state("least_loaded")
    replicas = [
        SimpleNamespace(replica_id=Id(name), routing_stats={"fingerprint": name} if name != "new" else {})
        for name in ("one", "two", "new")
    ]

    def chosen(fingerprint: str) -> list[str]:
        request = SimpleNamespace(args=["POST", "/v1/completions", {}, b"{}", fingerprint])
        ranked = asyncio.run(router.choose_replicas(replicas, request))
        return [each.replica_id.unique_id for rank in ranked for each in rank]

    assert chosen("two") == ["two"] and chosen("three") == []
    assert sorted(chosen("")) == ["new", "one", "two"]
