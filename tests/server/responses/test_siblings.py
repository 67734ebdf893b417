"""Responses at several API servers of one port: whichever is asked has what one of them has stored or makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import AbortRequests
from vnext.server.responses.store import ResponseStore
from vnext.server.views.responses import RESPONSES

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
KEYS = ("one", "two")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[EdgeServer]]:
    options: dict[str, Any] = {"api_server_count": 2, "shared_dir": str(tmp_path), "api_keys": KEYS, "sse_ping_interval_s": 0}
    with EdgeServer(byte_level(TEMPLATE), number=4, **options) as first, EdgeServer(byte_level(TEMPLATE), number=1, **options) as second:
        yield [first, second]


def client(server: EdgeServer, key: str = "one") -> openai.OpenAI:
    return server.openai(api_key=key)


def say(server: EdgeServer, words: Any, **options: Any) -> Any:
    return client(server).responses.create(model="toy", input=words, **options)


def events(server: EdgeServer, path: str, body: Any = None, **headers: str) -> list[str]:
    method, given = ("GET" if body is None else "POST"), {"Authorization": "Bearer one"} | headers
    text = httpx.request(method, server.url + path, json=body, headers=given, timeout=60).text
    return [event for event in text.split("\n\n") if event]


def test_a_stored_response_is_read_continued_and_deleted_anywhere(pair: list[EdgeServer]) -> None:
    first, second = pair
    made = say(first, "say:abc")
    assert client(second).responses.retrieve(made.id) == made
    assert [item.type for item in client(second).responses.input_items.list(made.id)] == ["message"]
    after = say(second, "say:x", previous_response_id=made.id)
    referred = say(second, [{"type": "item_reference", "id": made.output[0].id}, {"role": "user", "content": "say:y"}])
    assert (after.output_text, referred.output_text) == ("x", "y")
    assert say(first, "say:z", previous_response_id=after.id).output_text == "z", "a talk goes to and fro"
    counted = [client(each).responses.input_tokens.count(model="toy", input="a", previous_response_id=after.id) for each in pair]
    assert counted[0] == counted[1]
    client(second).responses.delete(made.id)
    for server in pair:
        assert made.id not in server.app[RESPONSES]._kept
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            client(server).responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            client(server).responses.delete(made.id)


def test_another_key_sees_nothing_of_it_anywhere(pair: list[EdgeServer]) -> None:
    made = say(pair[0], "say:abc")
    for server in pair:
        with pytest.raises(openai.NotFoundError):
            client(server, "two").responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client(server, "two").responses.create(model="toy", input="a", previous_response_id=made.id)
    assert httpx.get(f"{pair[1].url}/v1/responses/{made.id}").status_code == 401
    asked = httpx.get(f"{pair[0].url}/v1/responses/{made.id}", headers={"Authorization": "Bearer one", "X-Vnext-Sibling": "stored"})
    assert asked.json()["id"] == made.id, "a client is no sibling, whatever it says"


def test_one_that_runs_elsewhere_is_read_followed_and_cancelled(pair: list[EdgeServer]) -> None:
    first, second = pair
    body = {"model": "toy", "input": "say:abcdefgh", "background": True, "stream": True}
    whole = events(first, "/v1/responses", body, Accept="text/event-stream")
    id_ = json.loads(whole[0].partition("data: ")[2])["response"]["id"]
    for place in (0, 3, len(whole) - 2):
        assert events(second, f"/v1/responses/{id_}?stream=true&starting_after={place}") == whole[place + 1 :]
        last = whole[place].partition("\n")[0].removeprefix("id: ")
        assert events(second, "/v1/responses", body, **{"Last-Event-ID": last}) == whole[place + 1 :], "with its time: it is not made anew"
    first.engine.running.clear()
    asked = say(first, "endless", background=True, max_output_tokens=500)
    assert client(second).responses.retrieve(asked.id).status == "in_progress"
    assert client(second).responses.cancel(asked.id).status == "cancelled"
    wait_until(lambda: bool(first.engine.of_kind(AbortRequests)))
    assert client(second).responses.retrieve(asked.id).status == "cancelled"
    first.engine.running.set()


def test_a_sibling_that_has_ended_is_passed_over_and_one_in_its_place_is_found(tmp_path: Path) -> None:
    options: dict[str, Any] = {"api_server_count": 2, "shared_dir": str(tmp_path)}
    with EdgeServer(byte_level(TEMPLATE), number=0, **options) as first:
        assert first.get("/v1/responses/resp_none")[0] == 404
        for number in (1, 3):
            with EdgeServer(byte_level(TEMPLATE), number=number, **options) as second:
                made = say(second, "say:abc")
                assert client(first).responses.retrieve(made.id).output_text == "abc"
            assert first.get(f"/v1/responses/{made.id}")[0] == 404
            assert first.get("/v1/responses/a%2F..%2F..%2Fmetrics")[0] == 404


def test_a_process_that_follows_a_killed_one_has_what_it_stored(tmp_path: Path) -> None:
    """The folder is copied while the first still works: whatever a killed process could have left."""
    options: dict[str, Any] = {"shared_dir": str(tmp_path), "api_keys": KEYS, "sse_ping_interval_s": 0}
    body = {"model": "toy", "input": "say:abcdef", "background": True, "stream": True}
    with EdgeServer(byte_level(TEMPLATE), **options) as first:
        made, gone = say(first, "say:abc"), say(first, "say:gone")
        whole = events(first, "/v1/responses", body, Accept="text/event-stream")
        client(first).responses.delete(gone.id)
        first.engine.running.clear()
        running = say(first, "endless", background=True, max_output_tokens=500)
        folder = Path(shutil.copytree(tmp_path / "api-0.responses", tmp_path / "killed" / "api-0.responses"))
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600} and folder.stat().st_mode & 0o777 == 0o700
        assert not any(b"say:gone" in path.read_bytes() for path in folder.iterdir()), "what is deleted is deleted"
        (folder / "resp_torn").write_bytes((folder / made.id).read_bytes()[:-5])
        (folder / f"{made.id}.draft").write_bytes(b"half")
        first.engine.running.set()
    with EdgeServer(byte_level(TEMPLATE), **options | {"shared_dir": str(tmp_path / "killed"), "number": 1}) as second:
        assert client(second).responses.retrieve(made.id) == made
        assert say(second, "say:x", previous_response_id=made.id).output_text == "x"
        id_ = json.loads(whole[0].partition("data: ")[2])["response"]["id"]
        assert events(second, f"/v1/responses/{id_}?stream=true&starting_after=2") == whole[3:]
        lost = client(second).responses.retrieve(running.id)
        assert lost.status == "failed" and lost.error.message == "The API server that made this response ended: create it again."
        for other in (gone.id, "resp_torn"):
            assert second.get(f"/v1/responses/{other}", Authorization="Bearer one")[0] == 404
        with pytest.raises(openai.NotFoundError):
            client(second, "two").responses.retrieve(made.id)
        assert not [path for path in folder.iterdir() if "torn" in path.name or "draft" in path.name]


def test_the_folder_is_bounded_as_the_store_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "stored"
    store = ResponseStore(2_000, path)
    for number in range(20):
        store.put({"id": f"resp_{number}", "output": [], "text": "x" * 300}, [], ())
        assert sorted(each.name for each in path.iterdir()) == sorted(store._kept)
    again = ResponseStore(2_000, path)
    assert again._of_owner == store._of_owner and again.size_bytes == store.size_bytes <= 2_000 and len(again._kept) > 3
    assert len(ResponseStore(700, path)._kept) == len([*path.iterdir()]) <= 2, "a smaller bound"
    assert not ResponseStore(0, path)._kept and not [*path.iterdir()]
    path.rmdir()
    path.write_bytes(b"no folder")
    full = ResponseStore(2_000, path)
    for number in range(2):
        full.put({"id": f"resp_{number}", "output": []}, [], ())
    assert len(full._kept) == 2 and caplog.text.count("loses its responses") == 1, "it serves on"
