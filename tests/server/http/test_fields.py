"""Fields that are none of the API's: what asks for nothing or means nothing here passes, what would change the answer does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_server import EdgeServer

from vnext.server.context.openai_types import ChatBody, CompletionBody
from vnext.server.http import fields
from vnext.server.http.fields import REFUSED, UNKNOWN_MAX, USUAL, without_unknown

USER = {"role": "user", "content": "say:hi"}
BOTH = [("/v1/completions", {"prompt": "say:hi"}), ("/v1/chat/completions", {"messages": [USER], "max_tokens": 3})]
ELSEWHERE = {
    "user": "u", "metadata": {"a": [1]}, "store": True, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k",
    "prediction": {"type": "content", "content": "x"}, "verbosity": "low", "length_penalty": 1.0, "early_stopping": True,
    "spaces_between_special_tokens": True, "include_reasoning": True, "provider": {"order": ["x"]}, "chat_id": "5", "plugins": [1],
    "session_id": "s", "mm_processor_kwargs": {"fps": 1}, "kv_transfer_params": {"a": 1}, "cache_prompt": True, "id_slot": 3,
    "keep_alive": "5m", "usage": {"include": True}, "transforms": ["middle-out"], "best_of": 1, "response_format": {"type": "text"},
    "trace": {"deep": [{"deeper": [None]}]}, "speed": "fast", "models": ["a", "b"], "repetition_penalty_range": 1024,
    "temperature_last": True, "thread_id": "t", "message_id": "m", "presence_penalty_range": 5, "model_id": "m", "max_input_tokens": 5,
    "encoder_repetition_penalty": 1.0, "temperature_range": [0, 1], "prompt_id": "p", "logit_bias_exp": [1], "reasoning_format": "x",
}  # fmt: skip
"""What other programs send beside what they ask for."""


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_means_nothing_here_passes(server: EdgeServer, path: str, body: dict[str, Any], name: str) -> None:
    assert server.post(path, body | {name: ELSEWHERE[name]})[0] == 200


@pytest.mark.parametrize("nothing", [None, False, "", "none", "auto", [], {}], ids=repr)
@pytest.mark.parametrize("name", [*sorted(REFUSED), "temprature", "anything"])
def test_what_asks_for_nothing_passes(name: str, nothing: Any) -> None:
    kind, known = (CompletionBody, {"prompt": "a"}) if name not in CompletionBody.__struct_fields__ else (ChatBody, {"messages": []})
    asks = nothing is False and USUAL.get(name) is True
    if name not in kind.__struct_fields__ and "messages[]" not in name and not asks:
        assert json.loads(without_unknown(json.dumps(known | {name: nothing}).encode(), kind)) == known


def test_a_usual_value_asks_for_nothing(server: EdgeServer) -> None:
    """False asks for something where true is usual."""
    messages = {"max_tokens": 3, "messages": [USER]}
    usual = {"n": 1, "presence_penalty": 0, "logprobs": False, "parallel_tool_calls": True, "skip_special_tokens": True}
    assert server.post("/v1/messages", messages | usual)[0] == 200
    for name, value in {"n": 2, "parallel_tool_calls": False, "skip_special_tokens": False, "logprobs": 0}.items():
        assert server.post("/v1/messages", messages | {name: value})[0] == 400


def test_no_number_asks_for_nothing(server: EdgeServer) -> None:
    assert server.post("/v1/completions", {"prompt": "a", "lora_path": 0})[1]["error"]["param"] == "lora_path"
    assert server.post("/v1/completions", {"prompt": "a", "mirostat": 0})[0] == 200
    assert server.post("/v1/completions", {"prompt": "a", "mirostat": 2})[0] == 400


@pytest.mark.parametrize("name", [name for name in sorted(REFUSED) if "[]" in name])
def test_what_would_change_a_message_is_refused_with_the_remedy(server: EdgeServer, name: str) -> None:
    last = name.removeprefix("messages[].")
    status, answer, _ = server.post("/v1/chat/completions", {"messages": [USER, USER | {last: "x y"}]})
    assert (status, answer["error"]["param"]) == (400, f"messages[1].{last}")
    assert answer["error"]["message"] == f"messages[1].{last} is not supported here: {REFUSED[name]}."


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"), ("Temperature", "temperature"), ("topP", "top_p"), ("top-p", "top_p"), ("stops", "stop"),
        ("maxTokens", "max_tokens"), ("max_token", "max_tokens"), ("promt_", "prompt"), ("maxtoken", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"), ("streaming", "stream"), ("frequency-penality", "frequency_penalty"),
    ],
)  # fmt: skip
def test_a_misspelt_field_gets_a_guess(server: EdgeServer, name: str, meant: str) -> None:
    status, answer, _ = server.post("/v1/completions", {"prompt": "a", name: 1})
    assert status == 400 and answer["error"]["message"] == f"{name} is not a field of this request. Did you mean {meant}?"


def test_fields_within_messages(server: EdgeServer) -> None:
    """What clients send back of the answers that they got, here or elsewhere."""
    answer = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "reasoning": "r", "reasoning_content": "r"}
    answer |= {"thinking": "t", "id": "5", "reasoning_details": [{"type": "t"}], "function_call": None, "audio": None}
    body = {"messages": [USER, answer, USER], "max_tokens": 1, "stream_options": {"include_obfuscation": True}, "stream": True}
    assert server.post("/v1/chat/completions", body)[0] == 200


def test_what_passed_stands_in_the_log_at_debug_only(server: EdgeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.post("/v1/completions", {"prompt": "a", "chat_id": 5})
    assert "chat_id" not in caplog.text
    with caplog.at_level("DEBUG", "vnext.server"):
        server.post("/v1/completions", {"prompt": "a", "chat_id": 5, "evil\nline": 1, "x" * 500: 1})
    assert "mean nothing here: 'chat_id', 'evil\\nline', 'xxx" in caplog.text and "x" * 65 not in caplog.text


def test_the_known_part_keeps_its_values_to_the_letter() -> None:
    body = b'{"seed":123456789012345678901234567890,"temperature":1e-400,"zzz":1,"prompt":"\\ud83d\\ude00","n":1,"n":2}'
    assert without_unknown(body, CompletionBody) == (
        b'{"seed":123456789012345678901234567890,"temperature":1e-400,"prompt":"\\ud83d\\ude00","n":2}'
    )


def test_unknown_fields_are_few_and_cheap(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    monkeypatch.setattr(fields, "_meant", lambda name, _: looked_at.append(name))
    messages = [USER | {"id": place, "time": place} for place in range(200)]
    without_unknown(json.dumps({"messages": messages}).encode(), ChatBody)
    assert looked_at == ["id", "time"]
    status, answer, _ = server.post("/v1/completions", {"prompt": "a"} | {f"x{place}": 1 for place in range(UNKNOWN_MAX + 1)})
    assert status == 400 and f"more than {UNKNOWN_MAX} fields" in answer["error"]["message"]


@pytest.mark.parametrize("broken", [b'{"zzz": 1', b'{"zzz": 1, "prompt": ' + b"[" * 5000, b'{"zzz": "\\ud800", "prompt": 5}'])
def test_what_is_broken_behind_an_unknown_field_is_said(server: EdgeServer, broken: bytes) -> None:
    status, answer, _ = server.post("/v1/completions", broken)
    assert status == 400 and "no valid JSON" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"", "it is empty, or"), (b'{"prompt": ', "it is empty, or its end is missing"), (b'{"prompt": "\xe9"}', "it is not UTF-8")]
    + [(mark + '{"prompt": "a"}'.encode(coding), "it does not begin as JSON does, in UTF-8") for mark, coding in ((b"\xef\xbb\xbf", "utf-8"), (b"", "utf-16"))],
)  # fmt: skip
def test_a_body_that_is_no_text_of_json_is_named(server: EdgeServer, body: bytes, words: str) -> None:
    status, answer, _ = server.post("/v1/completions", body)
    assert status == 400 and f"The body is no valid JSON: {words}" in answer["error"]["message"]


def test_a_wrong_type_behind_an_unknown_field_is_said(server: EdgeServer) -> None:
    for wrong in ({"n": "x"}, {"stream_options": 5}, {"stream_options": [1]}, {"prompt": None}):
        status, answer, _ = server.post("/v1/completions", {"zzz": 1, "prompt": "a"} | wrong)
        assert (status, answer["error"]["param"]) == (400, next(iter(wrong)))
    for wrong in ({"messages": "x"}, {"messages": {"role": 5}}):
        status, answer, _ = server.post("/v1/chat/completions", {"zzz": 1} | wrong)
        assert status == 400 and answer["error"]["param"] == "messages"
