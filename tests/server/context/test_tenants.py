"""Several API keys are tenants: no one sees, changes, uses or is told of what another one made, and limits bind batches too."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import AdapterFiles, SubmitRequest
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.batches import store as store_module
from vnext.server.batches.store import Store
from vnext.server.context import adapters
from vnext.server.context.adapters import ServedAdapters
from vnext.server.context.api_keys import EVERYONE, ApiKeys, Tenant
from vnext.server.context.errors import ModelUnknown
from vnext.server.http.middleware import OPEN, OPERATORS
from vnext.server.responses.bodies import Item
from vnext.server.responses.store import ResponseStore
from vnext.server.routes import ROUTES
from vnext.server.settings import ServerSettings
from vnext.server.views.responses import RESPONSES

pytestmark = pytest.mark.usefixtures("nobody_waits")
KEYS = """
- {key: a, name: alpha}
- {key: a2, name: alpha}
- {key: b}
- {key: slow, name: slow, requests_per_minute: 3}
- {key: root, name: operator, admin: true}
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "keys.yaml").write_text(KEYS)
    return {"api_key_file": str(tmp_path / "keys.yaml"), "batch_dir": str(tmp_path / "kept")}


@pytest.fixture
def server(settings: dict[str, str]) -> Iterator[EdgeServer]:
    with EdgeServer(byte_level("{{ messages }}"), **settings) as running:
        yield running


def call(server: EdgeServer, key: str, method: str, path: str, **sent: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60, **sent)


def upload(server: EdgeServer, key: str, count: int = 1) -> str:
    lines = [
        json.dumps({"custom_id": f"{each}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "say:a", "max_tokens": 4}})
        for each in range(count)
    ]
    files = {"file": ("in.jsonl", "\n".join(lines).encode())}
    return call(server, key, "POST", "/v1/files", files=files, data={"purpose": "batch"}).json()["id"]


def start(server: EdgeServer, key: str, file: str) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return call(server, key, "POST", "/v1/batches", json=body)


def status_of(server: EdgeServer, key: str, batch: str) -> str:
    return call(server, key, "GET", f"/v1/batches/{batch}").json()["status"]


def ids(server: EdgeServer, key: str, path: str) -> set[str]:
    return {each["id"] for each in call(server, key, "GET", path).json()["data"]}


def test_every_path_to_a_thing_ends_at_the_wall(server: EdgeServer) -> None:
    """Each route with an id, as the table has them, so that a new one is asked too."""
    file = upload(server, "a")
    batch = start(server, "a", file).json()["id"]
    wait_until(lambda: status_of(server, "a", batch) == "completed")
    output = call(server, "a", "GET", f"/v1/batches/{batch}").json()["output_file_id"]
    stored = call(server, "a", "POST", "/v1/responses", json={"model": "toy", "input": "say:x"}).json()["id"]
    named = {"{file_id}": (file, output), "{batch_id}": (batch,), "{response_id:(?!input_tokens$)[^/]+}": (stored,)}
    paths = [
        (route.method, route.path.replace(name, id_))
        for route in ROUTES for name, found in named.items() if name in route.path for id_ in found
    ]  # fmt: skip
    assert len(paths) >= 11
    for method, path in paths:
        for other in ("b", "slow"):
            assert call(server, other, method, path).status_code == 404, (method, path, other)
    answer = call(server, "b", "POST", "/v1/responses", json={"model": "toy", "input": "say:x", "previous_response_id": stored})
    assert answer.status_code == 400 and "There is no response" in answer.text
    [item] = call(server, "a", "GET", f"/v1/responses/{stored}").json()["output"]
    for id_ in (item["id"], f"{stored}_0"):
        body = {"model": "toy", "input": [{"type": "item_reference", "id": id_}, {"role": "user", "content": "say:x"}]}
        seen = [call(server, key, "POST", "/v1/responses", json=body).status_code for key in ("b", "a2")]
        assert seen == [400, 200], id_
    assert start(server, "b", file).status_code == 404
    for path, own in (("/v1/files", {file, output}), ("/v1/batches", {batch})):
        assert ids(server, "b", path) == set() and ids(server, "a", path) == ids(server, "a2", path) == ids(server, "root", path) == own
    for method, path in sorted(paths, key=lambda each: each[0] == "DELETE"):
        key = "root" if method == "DELETE" else "a2"
        right = 400 if path.endswith(f"{stored}/cancel") else 200  # it was not created with background
        assert call(server, key, method, path).status_code == right, "another key of the name, and the admin's"


OF_TENANTS = {"/rerank", "/score", "/tokenize", "/detokenize", "/handover"}


def test_routes_that_show_or_change_what_all_have_need_an_admin_key(server: EdgeServer) -> None:
    routes = [(route.method, route.path) for route in ROUTES if "/" + route.path.split("/")[1] in OPERATORS]
    assert {"/" + path.split("/")[1] for _, path in routes} == OPERATORS
    others = {route.path for route in ROUTES if not route.path.startswith(("/v1/", "/v2/", "/api/", "/page/"))} - OPEN
    assert {path for path in others if "/" + path.split("/")[1] not in OPERATORS} == OF_TENANTS, "each route is of one kind"
    for method, path in routes:
        path = path.replace(r"{segment:\d{1,9}}", "1")
        answer = call(server, "a", method, path)
        assert answer.status_code == 403 and "admin: true" in answer.text, path
        assert "admin: true" not in call(server, "root", method, path).text
    with EdgeServer(api_keys=("one",)) as alone:
        assert call(alone, "one", "GET", "/server_info").status_code == 200


def test_the_prefix_cache_is_each_tenants_own(server: EdgeServer, settings: dict[str, str]) -> None:
    def salt(key: str, at: EdgeServer = server, path: str = "/v1/completions", **fields: Any) -> str:
        body = {"input": "say:a"} if path == "/v1/embeddings" else {"prompt": "say:a"}
        call(at, key, "POST", path, json=body | fields)
        return at.engine.of_kind(SubmitRequest)[-1].cache_salt

    given = {key: (salt(key), salt(key, cache_salt="s"), salt(key, cache_salt=salt("a"))) for key in ("a", "b", "root")}
    assert len({each for found in given.values() for each in found}) == 9, "no salt reaches another's blocks"
    assert salt("a") == salt("a2") == given["a"][0] == salt("a", path="/v1/embeddings")
    with EdgeServer(**{name: value for name, value in settings.items() if name != "batch_dir"}, shared_prefix_cache=True) as shared:
        assert salt("a", shared) == salt("b", shared) == "" and salt("a", shared, cache_salt="s") == "s"


def test_no_salt_is_anothers() -> None:
    rng = random.Random(7)
    keys = ApiKeys(ServerSettings(api_keys=("a", "b", "c")))
    words = ["", *("".join(rng.choices(string.hexdigits + "\x1f:/", k=rng.randrange(40))) for _ in range(2_000))]
    words += [keys.salts["key 1"] + word for word in words[:100]]
    found = {(client, word): keys.salts[client] + word for client in ("key 1", "key 2", "key 3") for word in set(words)}
    assert len(set(found.values())) == len(found)


def test_a_batch_counts_for_the_key_that_made_it_and_delays_no_other(server: EdgeServer) -> None:
    slow = start(server, "slow", upload(server, "slow", 30)).json()
    assert slow["owner"] == "slow"
    other = start(server, "b", upload(server, "b", 5)).json()["id"]
    wait_until(lambda: status_of(server, "b", other) == "completed")
    done = call(server, "slow", "GET", f"/v1/batches/{slow['id']}").json()
    assert done["status"] == "in_progress" and done["request_counts"]["completed"] <= 3
    assert call(server, "slow", "POST", "/v1/completions", json={"prompt": "say:a"}).status_code == 429, "one budget for both"
    call(server, "slow", "POST", f"/v1/batches/{slow['id']}/cancel")
    wait_until(lambda: status_of(server, "slow", slow["id"]) == "cancelled")


def test_a_single_keys_limits_bind_its_batches_too(tmp_path: Path) -> None:
    with EdgeServer(api_keys=("one",), key_requests_per_minute=2, batch_dir=str(tmp_path)) as server:
        batch = start(server, "one", upload(server, "one", 10)).json()
        assert "owner" not in batch
        wait_until(lambda: call(server, "one", "GET", f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] > 0)
        time.sleep(0.5)
        assert call(server, "one", "GET", f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] <= 2


def test_what_was_made_before_there_were_tenants_is_the_admins(settings: dict[str, str], tmp_path: Path) -> None:
    with EdgeServer(api_keys=("one",), batch_dir=settings["batch_dir"]) as server:
        file = upload(server, "one")
    assert b"owner" not in (tmp_path / "kept/files" / f"{file}.json").read_bytes()
    with EdgeServer(**settings) as server:
        seen = {key: call(server, key, "GET", f"/v1/files/{file}").status_code for key in ("a", "b", "root")}
        assert seen == {"a": 404, "b": 404, "root": 200}
        mine = upload(server, "b")
    with EdgeServer(**settings) as server:
        assert ids(server, "b", "/v1/files") == {mine}, "a key without a name keeps its things over a restart"


def test_a_tenant_that_keeps_much_leaves_room_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files, their bytes and batches: each tenant gets as much as is left free, so half, a quarter, an eighth."""
    monkeypatch.setattr(store_module, "ENTRIES_MAX", 16)
    monkeypatch.setattr(store_module, "STORE_BYTES_MAX", 16_000)
    tenants = [Tenant(name, False) for name in ("a", "b", "c", "d")]
    for size, counts in ((1, [8, 4, 2, 1]), (2_000, [4, 2, 1, 1])):
        store = Store(tmp_path / str(size))

        def fill(tenant: Tenant, store: Store = store, size: int = size) -> int:
            for count in range(20):
                try:
                    draft = store.draft(tenant)
                except InvalidRequest as error:
                    assert "is full: delete some" in error.message
                    return count
                draft.write_bytes(b"x" * size)
                store.add_file(draft, "in", "batch", owner=tenant.owner)
            return 20

        assert [fill(tenant) for tenant in tenants] == counts
        store.delete_file(next(each.id for each in store.files.values() if each.owner == "a"))
        assert fill(tenants[0]) == 0, "it has more than is left, and what it gives back is for the others"
        assert store.draft(Tenant("admin", True))
        file = next(iter(store.files.values()))
        for tenant, count in zip(tenants, [8, 4, 2, 1]):
            for _ in range(count):
                store.add_batch("/v1/completions", file, "24h", None, tenant)
            with pytest.raises(InvalidRequest, match="too many are there"):
                store.add_batch("/v1/completions", file, "24h", None, tenant)
        store.close()


def test_a_batch_whose_key_is_gone_does_not_run_free(settings: dict[str, str]) -> None:
    store = Store(Path(settings["batch_dir"]))
    draft = store.draft()
    draft.write_bytes(b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "say:a"}}')
    batch = store.add_batch("/v1/completions", store.add_file(draft, "in", "batch", owner="gone"), "24h", None, Tenant("gone", False))
    store.close()
    with EdgeServer(**settings) as server:
        wait_until(lambda: status_of(server, "root", batch.id) == "completed")
        found = call(server, "root", "GET", f"/v1/batches/{batch.id}").json()
        text = call(server, "root", "GET", f"/v1/files/{found['error_file_id']}/content").text
        assert "invalid_api_key" in text and not server.engine.of_kind(SubmitRequest)


def test_an_adapter_is_its_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "adapter_files", lambda *words: words)
    served = ServedAdapters(ServerSettings(lora_root=str(tmp_path)), ("toy",), True, {})
    served._files[None, "everyones"] = None  # as of --lora-modules
    one, other, admin = Tenant("one", False), Tenant("other", False), Tenant("root", True)
    asyncio.run(served.load("mine", str(tmp_path), one))
    assert served.names(other) == ("everyones",) and served.names(one) == served.names(admin) == ("everyones", "mine")
    with pytest.raises(ModelUnknown, match="'mine' is not served here"):
        asyncio.run(served.unload("mine", other))
    for name in ("mine", "everyones"):
        asyncio.run(served.unload(name, admin))
    asyncio.run(served.load("mine", str(tmp_path)))
    assert served.names(other) == () and served.names(EVERYONE) == ("mine",)


def test_a_model_of_another_is_no_model(server: EdgeServer) -> None:
    context = server.context
    context.adapters._files["alpha", "theirs"] = AdapterFiles(name="theirs", digest="0" * 32, path="/a")
    assert "theirs" in ids(server, "a2", "/v1/models") - ids(server, "b", "/v1/models")
    for path, body in (
        ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}), ("/v1/embeddings", {"input": "a"}), ("/tokenize", {"prompt": "a"}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}), ("/score", {"text_1": "a", "text_2": "b"}),
        ("/detokenize", {"tokens": [3]}),
    ):  # fmt: skip
        answer = call(server, "b", "POST", path, json=body | {"model": "theirs"})
        assert answer.status_code == 404 and "theirs" not in answer.text.rpartition("ask for")[2], path
    assert call(server, "b", "GET", "/v1/models/theirs").status_code == 404


def test_stored_conversations_count_with_all_that_they_hold() -> None:
    store = ResponseStore(2**20)
    words = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": word}]} for word in ("some", "words") * 50]
    turn = msgspec.convert(words, list[Item])
    tracemalloc.start()
    conversation: tuple[Item, ...] = ()
    for number in range(60):
        store.put({"id": f"resp_{number}", "output": []}, turn, conversation)
        conversation = store.get(f"resp_{number}").conversation() if number % 20 else ()
    size = len(msgspec.msgpack.encode(conversation))
    del conversation
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 2**19 < store.size_bytes <= 2**20 and held < 2 * 2**20, "objects would be ten times as much"
    last = store.get("resp_59")
    assert list(last.input()) == turn and last.size_bytes > size, "earlier ones count again"


def test_a_stored_response_is_not_kept_as_objects(server: EdgeServer) -> None:
    call(server, "a", "POST", "/v1/responses", json={"model": "toy", "input": "say:x"})
    [kept] = server.app[RESPONSES]._kept.values()
    assert isinstance(kept.response, bytes) and isinstance(kept.own, bytes) and kept.owner == "alpha"


@pytest.mark.parametrize("count_max", [40, 10_000])
def test_a_tenant_that_stores_much_drops_only_its_own(monkeypatch: pytest.MonkeyPatch, count_max: int) -> None:
    monkeypatch.setattr("vnext.server.responses.store.COUNT_MAX", count_max)
    store = ResponseStore(20_000)
    for number in range(10):
        store.put({"id": f"mine_{number}", "output": [], "text": "x" * 300}, [], (), "alpha")
    for number in range(500):
        store.put({"id": f"theirs_{number}", "output": [], "text": "x" * 300}, [], (), "bravo")
    kept = [id_ for id_ in store._kept if id_.startswith("mine")]
    assert len(kept) == 10 and 25 <= len(store._kept) <= count_max and "theirs_499" in store._kept


def test_few_long_conversations_weigh_as_much_as_they_hold() -> None:
    store, turn = ResponseStore(20_000), msgspec.convert([{"role": "user", "content": "x" * 3_000}], list[Item])
    for number in range(10):
        store.put({"id": f"mine_{number}", "output": []}, [], (), "alpha")
    for number in range(9):
        store.put({"id": f"theirs_{number}", "output": []}, [], turn, "bravo")
    kept = [*store._kept]
    assert [id_ for id_ in kept if id_.startswith("mine")] == [f"mine_{number}" for number in range(10)]
    assert 4 <= len(kept) - 10 <= 6 and kept[-1] == "theirs_8"


def test_what_no_chat_reads_is_not_kept() -> None:
    """It costs its client no token."""
    store, given = ResponseStore(2**22), msgspec.convert([{"type": "mcp_call", "id": "m", "output": "x" * 2**20}], list[Item])
    store.put({"id": "resp_0", "output": []}, given, ())
    assert store.size_bytes < 200 and [(item.id, item.kind) for item in store.get("resp_0").conversation()] == [("m", "mcp_call")]
