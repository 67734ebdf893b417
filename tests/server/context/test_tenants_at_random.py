"""Random operations of two tenants at once: neither ever gets an id, a text or a count of the other's, or ends what is the other's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from edge_server import TOKENIZER, EdgeServer, echo_answer
from fake_engine import CONFIG, FakeEngine, wait_until
from toy_tokenizers import byte_level

from vnext.runtime.protocol.messages import AbortRequests, AdapterFiles, SubmitRequest
from vnext.runtime.protocol.stats import AdapterStats
from vnext.server.context import adapters
from vnext.state.events import unpack_tokens

NAMES = ("alpha", "bravo")
STEPS, LONG_STEPS = 120, 4_000
HIDDEN = "an id that there never was"


class Tenant:
    """One key's client, and the model of what is its own. Mutable."""

    def __init__(self, server: EdgeServer, name: str, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.http = httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer key of {name}"}, timeout=60)
        self.own: dict[str, list[str]] = {kind: [] for kind in ("response", "item", "file", "batch", "adapter", "event")}
        self.seen: set[str] = set()
        """Every id that it was ever given."""
        self.other: Tenant
        self.rest_of: dict[str, list[str]] = {}
        """By the id of a stream's first event, those behind it."""
        self.words = 0

    def word(self) -> str:
        self.words += 1
        return f"{self.name}{self.words}"

    def id_of(self, kind: str) -> tuple[str, bool]:
        """An id of any tenant, and whether it is its own and still there."""
        whose = self.rng.choice((self, self.other))
        found = whose.own[kind]
        return (self.rng.choice(found), whose is self) if found else (f"resp_{self.rng.randrange(99)}", False)

    def ask(self, method: str, path: str, **sent: Any) -> httpx.Response:
        """An answer, which has nothing of the other's but what was sent."""
        answer = self.http.request(method, path, **sent)
        self.look(answer.text + str(answer.headers), f"{method} {path} {sent}")
        return answer

    def look(self, text: str, sent: str) -> None:
        theirs = sorted({*self.other.seen} - self.seen)
        found = [each for each in (*theirs, self.other.name) if each in text and each not in sent]
        assert not found, (sent, found, text)

    def keep(self, kind: str, id_: str) -> None:
        self.own[kind].append(id_)
        self.seen.add(id_)


def respond(t: Tenant, **fields: Any) -> httpx.Response:
    answer = t.ask("POST", "/v1/responses", json={"model": "toy", "input": f"{t.name} say:{t.word()}"} | fields)
    if answer.status_code == 200 and not fields.get("stream"):
        made = answer.json()
        t.keep("response", made["id"])
        for item in made["output"]:
            t.keep("item", item["id"])
    return answer


def continue_response(t: Tenant) -> None:
    id_, is_own = t.id_of("response")
    assert (respond(t, previous_response_id=id_).status_code == 200) is is_own


def refer(t: Tenant) -> None:
    id_, is_own = t.id_of("item")
    answer = respond(t, input=[{"type": "item_reference", "id": id_}, {"role": "user", "content": f"{t.name} say:{t.word()}"}])
    assert (answer.status_code == 200) is is_own


def same_as_none(t: Tenant, method: str, path: str, id_: str, is_own: bool) -> httpx.Response:
    """What is another's looks like what never was."""
    answer = t.ask(method, path.format(id_))
    if not is_own:
        none = t.ask(method, path.format("none"))
        assert answer.status_code == none.status_code == 404
        assert answer.text.replace(id_, HIDDEN) == none.text.replace("none", HIDDEN)
    return answer


def read_response(t: Tenant) -> None:
    id_, is_own = t.id_of("response")
    for path in ("/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/responses/{}?stream=true"):
        answer = same_as_none(t, "GET", path, id_, is_own)
        assert not is_own or answer.status_code in (200, 400) and (t.name in answer.text or "stream" in path)


def cancel_response(t: Tenant) -> None:
    id_, is_own = t.id_of("response")
    same_as_none(t, "POST", "/v1/responses/{}/cancel", id_, is_own)


def delete_response(t: Tenant) -> None:
    id_, is_own = t.id_of("response")
    if same_as_none(t, "DELETE", "/v1/responses/{}", id_, is_own).status_code == 200:
        t.own["response"].remove(id_)
        t.own["item"] = []  # those that are left of it are no one's


def resume(t: Tenant) -> None:
    """Its own stream goes on with the same text; the event of another's belongs to another request."""
    body = {"model": "toy", "prompt": f"{t.name} say:{t.name}", "stream": True, "max_tokens": 20}
    whole = t.ask("POST", "/v1/completions", json=body, headers={"Accept": "text/event-stream"}).text.split("\n\n")
    t.keep("event", first := whole[0].partition("\n")[0].removeprefix("id: "))
    t.rest_of[first] = whole[1:]
    last, is_own = t.id_of("event")
    answer = t.ask("POST", "/v1/completions", json=body, headers={"Accept": "text/event-stream", "Last-Event-ID": last})
    assert answer.status_code == (200 if is_own else 400) and (not is_own or answer.text.split("\n\n") == t.rest_of[last]), answer.text


def leave(t: Tenant) -> None:
    body = {"model": "toy", "prompt": f"{t.name} leaves", "stream": True, "max_tokens": 400}
    with t.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())


def upload(t: Tenant) -> None:
    body = {"prompt": f"{t.name} say:{t.word()}", "max_tokens": 9}
    line = json.dumps({"custom_id": t.word(), "method": "POST", "url": "/v1/completions", "body": body})
    answer = t.ask("POST", "/v1/files", files={"file": (f"{t.name}.jsonl", line.encode())}, data={"purpose": "batch"})
    t.keep("file", answer.json()["id"])


def read_file(t: Tenant) -> None:
    id_, is_own = t.id_of("file")
    for path in ("/v1/files/{}", "/v1/files/{}/content"):
        assert same_as_none(t, "GET", path, id_, is_own).status_code == (200 if is_own else 404)


def begin_batch(t: Tenant) -> None:
    id_, is_own = t.id_of("file")
    body = {"input_file_id": id_, "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = t.ask("POST", "/v1/batches", json=body)
    assert (answer.status_code == 200) is is_own
    if is_own:
        t.keep("batch", id_ := answer.json()["id"])
        wait_until(lambda: t.ask("GET", f"/v1/batches/{id_}").json()["status"] in ("completed", "failed"))
        if output := t.ask("GET", f"/v1/batches/{id_}").json()["output_file_id"]:  # its input may be another's output
            t.keep("file", output)


def read_batch(t: Tenant) -> None:
    id_, is_own = t.id_of("batch")
    same_as_none(t, "GET", "/v1/batches/{}", id_, is_own)
    same_as_none(t, "POST", "/v1/batches/{}/cancel", id_, is_own)


def delete_file(t: Tenant) -> None:
    id_, is_own = t.id_of("file")
    if same_as_none(t, "DELETE", "/v1/files/{}", id_, is_own).status_code == 200:
        t.own["file"].remove(id_)


def load_adapter(t: Tenant) -> None:
    """A few names that both use."""
    name = t.rng.choice(("tune", "style", f"{t.name}-x"))
    status = t.ask("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapters.ROOT)}).status_code
    assert status == (400 if name in t.own["adapter"] else 200)
    if status == 200:
        t.own["adapter"].append(name)


def use_adapter(t: Tenant) -> None:
    name = t.rng.choice(("tune", "style", f"{t.name}-x"))
    body = {"model": name, "prompt": f"{t.name} say:{t.word()}", "max_tokens": 9}
    assert t.ask("POST", "/v1/completions", json=body).status_code == (200 if name in t.own["adapter"] else 404)


def unload_adapter(t: Tenant) -> None:
    name = t.rng.choice(("tune", "style", f"{t.name}-x"))
    answer = t.ask("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
    assert answer.status_code == (200 if name in t.own["adapter"] else 404)
    if answer.status_code == 200:
        t.own["adapter"].remove(name)


def count(t: Tenant) -> None:
    """Lists have what is its own, and nothing else."""
    for path, kind in (("/v1/files?limit=1000", "file"), ("/v1/batches?limit=100", "batch")):
        assert sorted(each["id"] for each in t.ask("GET", path).json()["data"]) == sorted(t.own[kind])
    names = [each["id"] for each in t.ask("GET", "/v1/models").json()["data"]]
    assert sorted(names) == sorted(["toy", "other-name", *t.own["adapter"]])
    assert t.ask("GET", "/metrics").status_code == 200


def background(t: Tenant) -> None:
    answer = respond(t, background=True)
    wait_until(lambda: t.ask("GET", f"/v1/responses/{answer.json()['id']}").json()["status"] == "completed")


def say(t: Tenant) -> None:
    path, body = t.rng.choice((
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"say:{t.word()}"}], "cache_salt": "s"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": f"say:{t.word()}"}]}),
        ("/v1/completions", {"prompt": f"say:{t.word()}", "cache_salt": "s"}),
    ))  # fmt: skip
    assert t.ask("POST", path, json={"model": "toy"} | body).status_code == 200


OPERATIONS: tuple[Callable[[Tenant], Any], ...] = (
    respond, respond, continue_response, refer, read_response, cancel_response, delete_response, background, resume, leave, upload,
    read_file, begin_batch, read_batch, delete_file, load_adapter, load_adapter, use_adapter, unload_adapter, count, say, say,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeServer]:
    root = tmp_path_factory.mktemp("tenants")
    (root / "keys.yaml").write_text("\n".join(f"- {{key: key of {name}, name: {name}}}" for name in NAMES))
    engine = FakeEngine(echo_answer, config=msgspec.structs.replace(CONFIG, max_loras=4))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adapters, "ROOT", root, raising=False)
        patched.setattr(adapters, "adapter_files", lambda asked, *_: AdapterFiles(name=asked.lora_name, digest="0" * 32, path=str(root)))
        plain = FakeEngine._stats
        running = AdapterStats(slots=4, resident=1, loads=0, evictions=0, requests_waiting=0, running=NAMES)
        patched.setattr(FakeEngine, "_stats", lambda self: msgspec.structs.replace(plain(self), waiting=0, adapters=running))
        options = {"api_key_file": str(root / "keys.yaml"), "batch_dir": str(root / "kept"), "lora_root": str(root)}
        with EdgeServer(byte_level("{% for m in messages %}{{ m.content }}{% endfor %}"), engine, **options) as running_server:
            yield running_server


def test_no_tenant_learns_of_the_other(server: EdgeServer, request: pytest.FixtureRequest) -> None:
    rng = random.Random(5)
    both = [Tenant(server, name, rng) for name in NAMES]
    for each, other in zip(both, both[::-1]):
        each.other = other
    for _ in range(LONG_STEPS if request.config.getoption("--long") else STEPS):
        rng.choice(OPERATIONS)(rng.choice(both))
    prompts = {wish.name: TOKENIZER.decode(unpack_tokens(wish.prompt).tolist()) for wish in server.engine.of_kind(SubmitRequest)}
    salts = {name: {wish.cache_salt for wish in server.engine.of_kind(SubmitRequest) if name in prompts[wish.name]} for name in NAMES}
    assert not salts[NAMES[0]] & salts[NAMES[1]] and "" not in salts[NAMES[0]] | salts[NAMES[1]]
    ended = {name for message in server.engine.of_kind(AbortRequests) for name in message.names}
    assert ended and all(prompts[name].endswith("leaves") for name in ended)
