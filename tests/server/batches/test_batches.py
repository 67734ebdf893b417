"""/v1/files and /v1/batches as the openai package uses them, and what is left when a server ends in the middle."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.batches import lines as lines_module, store as store_module, worker as worker_module
from vnext.server.batches.lines import LINES_MAX, PRIORITY, LineBounds, answered, requests_of
from vnext.server.batches.service import Batches
from vnext.server.batches.store import Store
from vnext.server.context.errors import StoreUnusable
from vnext.server.http.bodies import GROUPS_MAX

pytestmark = pytest.mark.usefixtures("nobody_waits")
BOUNDS = LineBounds(2**20, 2**20)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EdgeServer]:
    with EdgeServer(batch_dir=str(tmp_path / "kept")) as running:
        yield running


def line(custom_id: str, words: str, url: str = TEXT, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": words}]} if url == CHAT else {"prompt": words}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body | {"max_tokens": 20} | fields})


def upload(server: EdgeServer, *lines: str) -> str:
    data = "\n".join(lines).encode()
    return server.openai().files.create(file=("in.jsonl", data), purpose="batch").id


def start(server: EdgeServer, *lines: str, endpoint: str = TEXT) -> Any:
    return server.openai().batches.create(input_file_id=upload(server, *lines), endpoint=endpoint, completion_window="24h")


def ended(server: EdgeServer, id_: str) -> Any:
    ends = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: server.openai().batches.retrieve(id_).status in ends)
    return server.openai().batches.retrieve(id_)


def results(server: EdgeServer, file_id: str) -> dict[str, Any]:
    found = [json.loads(each) for each in server.openai().files.content(file_id).text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["response"] for each in found}


@pytest.mark.parametrize("url", [TEXT, CHAT])
def test_a_batch_answers_each_request_of_its_file(server: EdgeServer, url: str) -> None:
    lines = [line(f"r{number}", f"say:word{number}", url) for number in range(20)]
    batch = start(server, *lines, line("bad", "say:x", url, temperature=-1), endpoint=url)
    assert batch.status == "validating" and batch.endpoint == url
    batch = ended(server, batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 21, 20, 1)
    assert batch.in_progress_at and batch.completed_at and batch.metadata is None
    good = results(server, batch.output_file_id)
    usages = [answer["body"]["usage"] for answer in good.values()]
    spent = [sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert [batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens] == spent and min(spent) > 0
    assert batch.model == "toy"
    for number in range(20):
        body = good[f"r{number}"]["body"]
        text = body["choices"][0]["text"] if url == TEXT else body["choices"][0]["message"]["content"]
        assert good[f"r{number}"]["status_code"] == 200 and text.startswith(f"word{number}")
        assert good[f"r{number}"]["request_id"] in body["id"]
    bad = results(server, batch.error_file_id)["bad"]
    assert bad["status_code"] == 400 and "temperature is -1" in bad["body"]["error"]["message"]
    sent = [each for each in server.engine.of_kind(SubmitRequest)]
    assert {each.priority for each in sent} == {PRIORITY}


@pytest.mark.parametrize(("url", "body"), [
    ("/v1/messages", {"messages": [{"role": "user", "content": "say:a"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "say:a", "max_output_tokens": 2}),
])  # fmt: skip
def test_usage_of_other_apis(server: EdgeServer, url: str, body: dict[str, Any]) -> None:
    batch = start(server, json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}), endpoint=url)
    usage = ended(server, batch.id).usage
    [prompt] = [each.prompt for each in server.engine.of_kind(SubmitRequest)]
    assert (usage.input_tokens, usage.total_tokens - usage.output_tokens) == (len(prompt) // 4,) * 2 and usage.output_tokens == 2


def test_a_mark_of_the_byte_order_is_no_fault(server: EdgeServer) -> None:
    batch = ended(server, start(server, "\ufeff" + line("a", "say:1"), line("b", "say:2")).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)


def test_lists_have_pages_and_purposes(server: EdgeServer) -> None:
    client = server.openai()
    batches = [ended(server, start(server, line("a", f"say:{number}")).id) for number in range(3)]
    inputs = [batch.input_file_id for batch in batches][::-1]
    assert [file.id for file in client.files.list(purpose="batch")] == inputs
    assert [file.id for file in client.files.list(purpose="batch_output")] == [batch.output_file_id for batch in batches][::-1]
    assert client.files.list(purpose="assistants").data == []
    first = client.files.list(purpose="batch", limit=2)
    assert [file.id for file in first.data] == inputs[:2] and first.has_more
    assert [file.id for file in client.files.list(purpose="batch", limit=2, after=inputs[1]).data] == inputs[2:]
    assert [file.id for file in client.files.list(purpose="batch", limit=1)] == inputs, "its package asks for each page"
    assert [file.id for file in client.files.list(purpose="batch", order="asc")] == inputs[::-1]
    page = client.batches.list(limit=1)
    assert [batch.id for batch in page.data] == [batches[2].id] and page.has_more
    assert [batch.id for batch in client.batches.list(limit=1)] == [batch.id for batch in batches[::-1]]
    for path, param in (
        ("/v1/files?limit=0", "limit"), ("/v1/files?limit=x", "limit"), ("/v1/files?order=up", "order"), ("/v1/files?after=x", "after"),
        ("/v1/batches?limit=101", "limit"), ("/v1/batches?after=x", "after"),
    ):  # fmt: skip
        status, answer, _ = server.get(path)
        assert (status, answer["error"]["param"]) == (400, param), path


def test_files_are_listed_read_and_deleted(server: EdgeServer) -> None:
    first, second = upload(server, line("a", "say:1")), upload(server, line("b", "say:2"))
    client = server.openai()
    assert [file.id for file in client.files.list()] == [second, first]
    kept = client.files.retrieve(first)
    assert (kept.filename, kept.purpose, kept.bytes) == ("in.jsonl", "batch", len(line("a", "say:1")))
    assert client.files.content(first).text == line("a", "say:1")
    assert client.files.delete(first).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete, client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(first)
    assert server.get("/v1/files/..%2Flock")[0] == 404


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "empty_file"), (["", "  "], "empty_file"), (["{"], "invalid_json_line"), (["[]"], "invalid_json_line"),
        ([line("a", "x", CHAT)], "invalid_request"), ([line("a", "x"), line("a", "y")], "invalid_request"),
        ([line("a", "x", stream=True)], "invalid_request"), (['{"custom_id":"a","method":"GET","url":"/v1/completions","body":{}}'], "invalid_request"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_batch_fails_with_the_reason(server: EdgeServer, lines: list[str], code: str) -> None:
    batch = ended(server, start(server, *lines).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", code) and batch.output_file_id is None
    assert server.engine.of_kind(SubmitRequest) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"), ({"endpoint": "/tokenize"}, "endpoint"), ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be(server: EdgeServer, body: dict[str, Any], param: str) -> None:
    good = {"input_file_id": upload(server, line("a", "x")), "endpoint": TEXT}
    status, answer, _ = server.post("/v1/batches", good | body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert server.post("/v1/batches", good | {"input_file_id": "file-0"})[0] == 404


def test_an_upload_that_is_none(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.post("/v1/files", {})[0] == 415
    odd_header = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a\x05"\r\n\r\na\r\n--x--\r\n'
    for body in (b"", b"--x\r\n", b"--x--\r\n", b"--y\r\nContent-Disposition: form-data; name=file\r\n\r\nabc", odd_header):
        status, answer, _ = server.post("/v1/files", body, **{"Content-Type": "multipart/form-data; boundary=x"})
        assert status == 400, answer
    assert server.post("/v1/files", b"", **{"Content-Type": "multipart/form-data"})[0] == 400
    with pytest.raises(openai.BadRequestError, match="purpose is 'fine-tune'"):
        server.openai().files.create(file=b"x", purpose="fine-tune")
    monkeypatch.setattr("vnext.server.views.batches.FILE_BYTES_MAX", 10)
    with pytest.raises(openai.APIStatusError) as error:
        upload(server, line("a", "x" * 20))
    assert error.value.status_code == 413
    assert server.get("/v1/files")[1]["data"] == [] and not list(Path(server.settings.batch_dir, "files").iterdir())


def test_a_cancelled_batch_keeps_what_it_has(server: EdgeServer) -> None:
    server.engine.running.clear()
    batch = start(server, *(line(f"r{number}", "say:x") for number in range(50)))
    server.engine.wait_for(lambda: len(server.engine.of_kind(SubmitRequest)) >= 4)
    assert server.openai().batches.cancel(batch.id).status == "cancelling"
    server.engine.wait_aborts("client")
    server.engine.running.set()
    batch = ended(server, batch.id)
    assert batch.status == "cancelled" and batch.cancelled_at and len(server.engine.of_kind(SubmitRequest)) == 4
    assert server.openai().batches.cancel(batch.id).status == "cancelled"


def test_a_batch_leaves_the_engine_to_live_requests(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests wait in the engine, it starts none."""
    stats = type("Stats", (), {"waiting": 1, "running": 0, "stalled": "", "blocks_held": 0, "blocks_total": 1})()
    monkeypatch.setattr(type(server.context.client), "stats", property(lambda self: stats))
    batch = start(server, line("a", "say:x"))
    wait_until(lambda: server.openai().batches.retrieve(batch.id).status == "in_progress")
    assert server.openai().completions.create(model="toy", prompt="say:live").choices[0].text == "live"
    assert len(server.engine.of_kind(SubmitRequest)) == 1
    stats.waiting = 0
    assert ended(server, batch.id).status == "completed"


def test_a_batch_goes_on_where_a_server_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "kept")
    lines = [line(f"r{number}", f"say:{number}") for number in range(12)]
    first = EdgeServer(batch_dir=folder)
    with monkeypatch.context() as held:
        held.setattr(Batches, "_is_free", lambda self: len(first.engine.of_kind(SubmitRequest)) < 4)
        first.__enter__()
        batch = start(first, *lines)
        wait_until(lambda: first.openai().batches.retrieve(batch.id).request_counts.completed >= 2)
        first.__exit__()
    written = Path(folder, "batches", f"{batch.id}.answers")
    with written.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id": "r11", "resp')  # a line that was being written
    before = answered(written)
    assert 2 <= len(before) < 12
    with EdgeServer(batch_dir=folder) as second:
        found = ended(second, batch.id)
        assert (found.status, found.request_counts.completed) == ("completed", 12)
        answers = results(second, found.output_file_id)
        assert {*answers} == {f"r{number}" for number in range(12)}
        assert found.usage.total_tokens == sum(each["body"]["usage"]["total_tokens"] for each in answers.values())
        assert len(second.engine.of_kind(SubmitRequest)) == 12 - len(before), "nothing is computed twice"


def test_a_server_that_ended_between_the_two_steps_of_an_end(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with EdgeServer(batch_dir=str(folder)) as first:
        batch = ended(first, start(first, line("a", "say:x")).id)
    path = folder / "batches" / f"{batch.id}.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"status": "finalizing", "completed_at": None}))
    with EdgeServer(batch_dir=str(folder)) as second:
        again = ended(second, batch.id)
        assert (again.status, again.output_file_id) == ("completed", batch.output_file_id)
        assert {*results(second, again.output_file_id)} == {"a"} and second.engine.of_kind(SubmitRequest) == []


def test_a_folder_serves_one_server_and_survives_foreign_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreUnusable, match="another server's batches"):
        Store(tmp_path)
    store.close()
    (tmp_path / "batches" / f"batch-{'0' * 24}.json").write_text("{")
    (tmp_path / "files" / "x.draft").write_text("")
    again = Store(tmp_path)
    assert again.batches == {} and "is left alone" in caplog.text and not (tmp_path / "files" / "x.draft").exists()
    again.close()
    with pytest.raises(StoreUnusable, match="cannot be written"):
        Store(tmp_path / "lock")


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many"
    path.write_text("\n".join(line(str(number), "x") for number in range(LINES_MAX + 1)))
    *_, last = requests_of(path, BOUNDS)
    assert last.code == "too_many_lines"
    monkeypatch.setattr(store_module, "ENTRIES_MAX", 1)
    with EdgeServer(batch_dir=str(tmp_path / "kept")) as server:
        upload(server, line("a", "x"))
        with pytest.raises(openai.BadRequestError, match="is full: delete some"):
            upload(server, line("a", "x"))


@pytest.mark.parametrize(
    ("large", "words"),
    [
        (line("b", "x" * 2**20), "Line 2 has more than 1048576 bytes"),
        (line("b", "x", stop=[[]] * (GROUPS_MAX + 1)), f"Line 2: The body has more than {GROUPS_MAX} lists"),
        (line("b", "x", metadata={"k": [0] * (2**17 + 1)}), "Line 2: The body has more than 131072 values"),
    ],
    ids=["bytes", "lists", "values"],
)
def test_a_line_is_bounded_as_a_body_is_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: str, words: str
) -> None:
    path, decoded = tmp_path / "large", []
    path.write_text("\n".join((line("a", "x"), large, line("c", "x"))))
    plain = lines_module._request
    monkeypatch.setattr(lines_module, "_request", lambda data, *rest: decoded.append(len(data)) or plain(data, *rest))
    first, fault, third = requests_of(path, LineBounds(2**20, 2**17))
    assert (first.custom_id, third.custom_id) == ("a", "c")
    assert (fault.code, fault.line) == ("line_too_long", 2) and words in fault.message
    assert len(decoded) == 2


def test_a_line_as_long_as_a_body_may_be_is_read(tmp_path: Path) -> None:
    path, text = tmp_path / "exact", line("a", "x")
    path.write_text(f"{text}\r\n{text}")
    first, fault = requests_of(path, LineBounds(len(text), 2**20))
    assert first.custom_id == "a" and fault.param == "custom_id"


def test_lines_are_read_beside_the_loop(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, plain_request, plain_body = set(), lines_module._request, worker_module.body_of
    note = lambda: threads.add(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(lines_module, "_request", lambda *given: note() or plain_request(*given))
    monkeypatch.setattr(worker_module, "body_of", lambda request: note() or plain_body(request))
    assert ended(server, start(server, line("a", "say:x"), line("b", "say:x")).id).status == "completed"
    assert threads and all(name.startswith("asyncio_") for name in threads), "the pool of to_thread"


def test_the_bounds_of_a_line_are_those_of_a_body(tmp_path: Path) -> None:
    with EdgeServer(batch_dir=str(tmp_path / "kept"), body_bytes_max=2**12) as server:
        batch = ended(server, start(server, line("a", "x" * 2**12)).id)
        assert batch.status == "failed" and batch.errors.data[0].code == "line_too_long"


def test_an_expired_batch_ends_with_what_it_has(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "WINDOW_S", -1)
    batch = ended(server, start(server, line("a", "say:x")).id)
    assert batch.status == "expired" and batch.output_file_id is None


def test_without_a_folder_the_routes_say_so() -> None:
    with EdgeServer() as plain:
        for status, answer, _ in (plain.get("/v1/files"), plain.get("/v1/batches"), plain.post("/v1/batches", {})):
            assert status == 403 and "--batch-dir" in answer["error"]["message"]


def test_the_worker_passes_the_key(tmp_path: Path) -> None:
    with EdgeServer(batch_dir=str(tmp_path), api_keys=("secret",)) as guarded:
        client = guarded.openai(api_key="secret")
        file = client.files.create(file=("in.jsonl", line("a", "say:x").encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert guarded.get("/v1/batches")[0] == 401


def test_what_the_views_answer_is_what_the_store_holds(server: EdgeServer) -> None:
    batch = ended(server, start(server, line("a", "say:x")).id)
    shown = server.get(f"/v1/batches/{batch.id}")[1]
    kept = json.loads(Path(server.settings.batch_dir, "batches", f"{batch.id}.json").read_text())
    assert shown == kept == json.loads(msgspec.json.encode(kept))
    assert [each["id"] for each in server.get("/v1/batches")[1]["data"]] == [batch.id]
