"""Several API keys, from options and a file, each with its limits; and no key or whole name in a log."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from edge_server import EdgeServer

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.context import api_keys
from vnext.server.context.admission import Budget, KeyLimits
from vnext.server.context.api_keys import ApiKeys, KeysUnusable, shown
from vnext.server.context.errors import RateLimited
from vnext.server.http.middleware import OPEN
from vnext.server.routes import ROUTES
from vnext.server.settings import ServerSettings

FILE = """
- key: sk-alpha
  name: team-alpha
  requests_per_minute: 2
- key: sk-beta
  name: team-beta
  max_answers: 0
"""


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "keys.yaml").write_text(FILE)
    return str(tmp_path / "keys.yaml")


def test_a_budget_refills_steadily_and_may_be_overdrawn() -> None:
    clock = Clock()
    budget = Budget(60, clock, memoryview(bytearray(16)).cast("d"))
    assert budget.wait_s(60) == 0 and budget.wait_s(61) == 1
    budget.spend(90)
    assert budget.wait_s(1) == 31
    clock.now_s += 30
    assert budget.wait_s(1) == 1
    clock.now_s += 1000
    assert budget.wait_s(60) == 0 and budget.wait_s(61) == 1


def test_a_refused_request_spends_nothing_and_says_when_to_come_back() -> None:
    clock = Clock()
    limits = KeyLimits(requests=2, tokens=600, answers_max=3, clock=clock)
    limits.enter(3)
    with pytest.raises(RateLimited, match="3 answers in progress and 1 more would pass its bound of 3"):
        limits.enter(1)
    limits.leave(3)
    limits.spend(700)
    with pytest.raises(RateLimited, match="its tokens of a minute") as error:
        limits.enter(1)
    assert error.value.retry_after_s == 11  # 101 tokens at 10 a second
    clock.now_s += 11
    limits.enter(1)
    with pytest.raises(RateLimited, match="its requests of a minute"):
        limits.enter(1)


def test_a_key_stands_for_a_client_only_where_there_are_several_or_it_has_limits(file: str) -> None:
    assert ApiKeys(ServerSettings(api_keys=("one",))).client_of("one") == ""
    assert ApiKeys(ServerSettings(api_keys=("one",), key_answers_max=4)).client_of("one") == "key 1"
    keys = ApiKeys(ServerSettings(api_keys=("one",), api_key_file=file, key_answers_max=4))
    assert [keys.client_of(key) for key in ("one", "sk-alpha", "sk-beta")] == ["key 1", "key 2 team-alpha", "key 3 team-beta"]
    assert [keys.client_of(key) for key in ("", "on", "one ", "sk-alph", keys.own("")[:-1])] == [None] * 5
    assert keys.client_of("", "one") == "key 1" and keys.client_of(keys.own("")) == api_keys.OWN
    assert keys.limits("key 3 team-beta") is None and keys.limits(api_keys.OWN) is None  # 0 of the file overrides the option
    assert not ApiKeys(ServerSettings()) and ApiKeys(ServerSettings()).client_of("") is None


def test_no_key_is_kept_and_no_look_up_tells_of_one() -> None:
    """Digests are looked up, and they are other ones in each process: what their bytes are, and so the time, tells nothing."""
    one, other = ApiKeys(ServerSettings(api_keys=("a", "b"))), ApiKeys(ServerSettings(api_keys=("a", "b")))
    assert len(one._clients) == 5 and not one._clients.keys() & other._clients.keys()
    assert not any(key in repr(vars(one)) for key in ("'a'", "'b'"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- key: a\n  requests: 3", "unknown field `requests` - at `keys[0]`"),
        ("- key: [secret]", "Expected `str`, got `array` - at `keys[0].key`"),
        ("keys: {", "no YAML"),
        ("[]", "has 0 keys"),
        ("- key: a\n- key: a", "has a key twice"),
        ("- key: a\n  admin: false\n  admin: true", "says a field of one key twice, in lines 2 and 3: leave"),
        ("- key: ' '", "key 1 is empty"),
        ("- key: a\n- key: b\n  max_answers: -1", "key 2 .* negative limit"),
        ("- key: a\n- key: b\n  weight: 0", "keys, line 3: the weight is 0, and must be 1 to 100"),
        ("- key: a\n\n- key: b\n  name: n\n  weight: -3", "keys, line 5: the weight is -3, and must"),
        ("- {key: a, weight: 101}", "keys, line 1: the weight is 101, and must"),
        (f"- key: a\n  weight: 1{'0' * 60}", "keys, line 2: the weight is 1e.60, and must"),
        ("- key: a\n- weight: .nan\n  key: b", "`int`, got `float` - at `keys[1].weight`, line 2"),
        ("- key: a\n  weight: 2.5", "`int`, got `float` - at `keys[0].weight`, line 2"),
        ("- key: a\n  weight: .inf", "`int`, got `float` - at `keys[0].weight`, line 2"),
        ("- key: a\n  weight: heavy", "`int`, got `str` - at `keys[0].weight`, line 2"),
        ("- key: a\n  weight: '3'", "`int`, got `str` - at `keys[0].weight`, line 2"),
        ("- key: a\n  weight: true", "`int`, got `bool` - at `keys[0].weight`, line 2"),
        ("- key: a\n  weight:", "`int`, got `null` - at `keys[0].weight`, line 2"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_refused_without_showing_one(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(KeysUnusable) as error:
        ApiKeys(ServerSettings(api_key_file=str(tmp_path / "keys")))
    assert "secret" not in str(error.value)
    assert error.match(sentence.replace("[", r"\[").replace("]", r"\]"))
    with pytest.raises(KeysUnusable, match="cannot be read .No such file"):
        ApiKeys(ServerSettings(api_key_file=str(tmp_path / "absent")))


def test_weights_follow_the_file_and_limits_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A request has the weight that its key has when it comes; a file that is wrong changes nothing, and is named once."""
    monkeypatch.setattr(api_keys, "LOOK_S", 0.01)
    path = tmp_path / "keys.yaml"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(path)

    write("- key: a\n  weight: 3\n- key: b\n")
    with EdgeServer(api_key_file=str(path)) as server, caplog.at_level(logging.INFO):
        def weight_of(key: str) -> int:
            server.openai(api_key=key).completions.create(model="toy", prompt="say:a")
            return server.engine.of_kind(SubmitRequest)[-1].weight

        def becomes(key: str, weight: int) -> bool:
            return any(weight_of(key) == weight or time.sleep(0.02) for _ in range(200))

        assert (weight_of("a"), weight_of("b")) == (3, 1)
        no_turns = "do nothing here: --scheduling-policy fair takes turns"
        assert (no_turns in caplog.text) == (server.context.client.ready.config.policy != "fair")
        server.post("/v1/embeddings", {"input": "a"}, Authorization="Bearer a")
        assert server.engine.of_kind(SubmitRequest)[-1].weight == 3
        write("- key: b\n  weight: 7\n  max_answers: 0\n- key: c\n  weight: 9\n")
        assert becomes("b", 7) and weight_of("a") == 1, "a key that the file has no more may still ask"
        with pytest.raises(openai.AuthenticationError):
            weight_of("c")
        write("- key: b\n  weight: 0\n")
        until = time.monotonic() + 10
        while "line 2: the weight is 0" not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
        assert weight_of("b") == 7 and caplog.text.count("the weight is 0") == 1
        write("- key: b\n")
        assert becomes("b", 1)


def test_several_api_servers_share_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("- key: a\n  name: ann\n- key: b\n")
    settings = ServerSettings(api_keys=("one",), api_key_file=str(tmp_path / "keys"), api_server_count=2)
    first, second = ApiKeys(settings), ApiKeys(msgspec.structs.replace(settings, number=1))
    for key in ("one", "a", "b"):
        tenants = [each.tenant(each.client_of(key) or "") for each in (first, second)]
        assert tenants[0] == tenants[1] and tenants[0].owner


def test_limits_of_one_key_leave_the_others_alone(file: str, caplog: pytest.LogCaptureFixture) -> None:
    with EdgeServer(api_key_file=file) as server, caplog.at_level(logging.INFO):
        def ask(key: str) -> str:
            return server.openai(api_key=key).completions.create(model="toy", prompt="say:a").choices[0].text

        assert ask("sk-alpha") == ask("sk-alpha") == "a"
        with pytest.raises(openai.RateLimitError) as error:
            ask("sk-alpha")
        assert error.value.code == "rate_limit_exceeded" and 1 <= int(error.value.response.headers["Retry-After"]) <= 60
        assert ask("sk-beta") == "a"
        with pytest.raises(openai.AuthenticationError):
            ask("sk-gamma")
    assert "sk-" not in caplog.text and "team-" not in caplog.text and "key=1 team..." in caplog.text


def test_tokens_of_prompts_and_answers_are_counted_when_known() -> None:
    with EdgeServer(api_keys=("one",), key_tokens_per_minute=20) as server:
        body = {"prompt": "say:" + "a" * 20}
        assert server.post("/v1/completions", body, Authorization="Bearer one")[0] == 200
        status, answer, headers = server.post("/v1/completions", body, Authorization="Bearer one")
        assert status == 429 and "tokens of a minute" in answer["error"]["message"]
        limits = server.context.keys.limits("key 1")
        assert limits._tokens.wait_s(1) > 60 and int(headers["Retry-After"]) == 60  # 24 + 21 tokens of 20 a minute


def test_answers_at_once_are_counted_until_their_end() -> None:
    with EdgeServer(api_keys=("one",), key_answers_max=2) as server:
        for count, expected in ((2, 200), (3, 429), (2, 200)):
            answer = server.post("/v1/completions", {"prompt": "say:a", "n": count}, Authorization="Bearer one")
            assert answer[0] == expected


def test_a_name_is_shown_by_its_beginning() -> None:
    assert [shown(client) for client in ("key 12 team-alpha", "key 3", "", "127.0.0.1", api_keys.OWN)] == [
        "12 team...", "3", "", "", ""
    ]  # fmt: skip


def status_of(server: EdgeServer, method: str, path: str, **headers: str) -> int:
    return httpx.request(method, server.url + path, headers=headers, timeout=60).status_code


PATHS = sorted({(route.method, re.sub(r"\{\w+\}", "1", route.plain_path)) for route in ROUTES})
GUARDED = [(method, path) for method, path in PATHS if path not in OPEN]


def test_every_route_but_the_open_ones_needs_the_key() -> None:
    with EdgeServer(api_keys=("secret",)) as server:
        assert {each: status for each in GUARDED if (status := status_of(server, *each)) != 401} == {}
        absent = [("POST", "/rerank/"), ("POST", "//rerank"), ("POST", "/v3/rerank"), ("GET", "/health/x"), ("GET", "/metrics/")]
        assert {each: status for each in absent if (status := status_of(server, *each)) not in (401, 404)} == {}
        assert status_of(server, "DELETE", "/rerank") == 401, "what methods a guarded path has is not said either"
        opened = [(method, path) for method, path in PATHS if path in OPEN]
        assert len(opened) > 8 and not [each for each in opened if status_of(server, *each) in (401, 403)]
        assert status_of(server, "POST", "/rerank", Authorization="Bearer secret") not in (401, 403)


def test_no_route_but_the_open_ones_answers_a_page_of_another_site() -> None:
    with EdgeServer() as server:
        found = {each: status_of(server, *each, Origin="https://elsewhere.example") for each in GUARDED}
        assert {each: status for each, status in found.items() if status != 403} == {}


def test_paths_below_a_root_path_are_guarded_alike() -> None:
    with EdgeServer(api_keys=("secret",), root_path="/api") as server:
        assert [status_of(server, "POST", path) for path in ("/api/rerank", "/rerank", "/api/v1/rerank")] == [401] * 3
        assert status_of(server, "GET", "/api/version") == 200
