"""Files and batches at several API servers of one port: whichever is asked has those of all, and one of them keeps them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.server.batches.service import BATCHES

pytestmark = pytest.mark.usefixtures("nobody_waits")


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keys").write_text("- key: one\n- key: two\n")
    return {
        "api_server_count": 2, "shared_dir": str(tmp_path), "batch_dir": str(tmp_path / "kept"),
        "api_key_file": str(tmp_path / "keys"), "root_path": "/under",
    }  # fmt: skip


@pytest.fixture
def pair(options: dict[str, Any]) -> Iterator[list[EdgeServer]]:
    """The first one is the second process at its place."""
    with EdgeServer(number=2, **options) as first, EdgeServer(number=1, **options) as second:
        yield [first, second]


def client(server: EdgeServer, key: str = "one") -> openai.OpenAI:
    return server.openai(api_key=key)


def line(number: int) -> str:
    body = {"prompt": f"say:word{number}", "max_tokens": 20}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body})


def test_a_batch_made_at_one_is_seen_and_answered_at_all(pair: list[EdgeServer]) -> None:
    first, second = pair
    assert BATCHES in first.app and BATCHES not in second.app
    data = "\n".join(line(number) for number in range(2_000)).encode()
    file = client(second).files.create(file=("in.jsonl", data), purpose="batch")
    assert [each.id for each in client(first).files.list()] == [file.id]
    assert client(second).files.content(file.id).content == client(first).files.content(file.id).content == data
    few = client(second).files.create(file=("few.jsonl", "\n".join(map(line, range(8))).encode()), purpose="batch")
    made = client(second).batches.create(input_file_id=few.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client(second).batches.retrieve(made.id).status == "completed")
    ended = client(first).batches.retrieve(made.id)
    assert ended == client(second).batches.retrieve(made.id) and ended.request_counts.completed == 8
    answers = [json.loads(each) for each in client(second).files.content(ended.output_file_id).text.splitlines()]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
    assert texts == {f"r{number}": f"word{number}" for number in range(8)}
    client(second).files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        client(first).files.retrieve(file.id)


def test_errors_keys_and_prefixes_are_as_at_the_one_that_keeps_them(pair: list[EdgeServer]) -> None:
    first, second = pair
    file = client(first).files.create(file=("in.jsonl", line(1).encode()), purpose="batch")
    for server in pair:
        assert [each.id for each in client(server).files.list()] == [file.id] and not list(client(server, "two").files.list())
        assert httpx.get(f"{server.url}/v1/files").status_code == 401
        with pytest.raises(openai.NotFoundError):
            client(server, "two").files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError, match="purpose is 'vision'"):
            client(server).files.create(file=("in.jsonl", b"{}"), purpose="vision")
    key, body = {"Authorization": "Bearer one"}, {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    headers = key | {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    made = httpx.post(f"{second.url}/under/v1/batches", content=gzip.compress(json.dumps(body).encode()), headers=headers)
    assert made.status_code == 200 and made.json()["input_file_id"] == file.id
    assert httpx.get(f"{second.url}/under/v1/batches/{made.json()['id']}", headers=key).json()["id"] == made.json()["id"]


def test_while_the_one_that_keeps_them_is_away_the_others_say_so(options: dict[str, Any]) -> None:
    with ExitStack() as second_lives:
        with EdgeServer(number=0, **options):
            second = second_lives.enter_context(EdgeServer(number=1, **options))
            file = client(second).files.create(file=("in.jsonl", line(1).encode()), purpose="batch")
        answer = httpx.get(f"{second.url}/v1/files/{file.id}", headers={"Authorization": "Bearer one"})
        assert answer.status_code == 503 and "keeps files and batches is beginning or ending" in answer.json()["error"]["message"]
        with EdgeServer(number=2, **options):
            assert client(second).files.retrieve(file.id) == file, "the next one at its place has them"
