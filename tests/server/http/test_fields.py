"""Fields that are none of the API's: what asks for nothing or means nothing here passes, what would change the answer does not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from edge_server import EdgeServer
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from vnext.server.context.openai_types import ChatBody, CompletionBody
from vnext.server.http import fields
from vnext.server.http.fields import REFUSED, UNKNOWN_MAX, without_unknown

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
@pytest.mark.parametrize("name", [*REFUSED, "temprature", "anything"])
def test_what_asks_for_nothing_passes(name: str, nothing: Any) -> None:
    kind, known = (CompletionBody, {"prompt": "a"}) if name not in CompletionBody.__struct_fields__ else (ChatBody, {"messages": []})
    if name not in kind.__struct_fields__ and "messages[]" not in name:
        assert json.loads(without_unknown(json.dumps(known | {name: nothing}).encode(), kind)) == known


def test_no_number_asks_for_nothing(server: EdgeServer) -> None:
    assert server.post("/v1/completions", {"prompt": "a", "lora_path": 0})[1]["error"]["param"] == "lora_path"
    assert server.post("/v1/completions", {"prompt": "a", "mirostat": 0})[0] == 200
    assert server.post("/v1/completions", {"prompt": "a", "mirostat": 2})[0] == 400


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused_with_the_remedy(server: EdgeServer, name: str) -> None:
    last = name.removeprefix("messages[].")
    if last == name:
        path, body = next((path, body) for path, body in BOTH if name not in KINDS[path].__struct_fields__)
        body, param = body | {name: "x y"}, name
    else:
        path, body, param = BOTH[1][0], {"messages": [USER, USER | {last: "x y"}]}, f"messages[1].{last}"
    status, answer, _ = server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"] == f"{param} is not supported by this server: {REFUSED[name]}."


KINDS: dict[str, type[msgspec.Struct]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


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


def test_a_wrong_type_behind_an_unknown_field_is_said(server: EdgeServer) -> None:
    for wrong in ({"n": "x"}, {"stream_options": 5}, {"stream_options": [1]}, {"prompt": None}):
        status, answer, _ = server.post("/v1/completions", {"zzz": 1, "prompt": "a"} | wrong)
        assert (status, answer["error"]["param"]) == (400, next(iter(wrong)))
    for wrong in ({"messages": "x"}, {"messages": {"role": 5}}):
        status, answer, _ = server.post("/v1/chat/completions", {"zzz": 1} | wrong)
        assert status == 400 and answer["error"]["param"] == "messages"


VLLM = """
use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs bad_words
add_special_tokens response_format structured_outputs priority request_id return_tokens_as_token_ids return_token_ids cache_salt
kv_transfer_params vllm_xargs repetition_detection prompt_embeds logits_processors best_of guided_json guided_regex guided_choice
guided_grammar
""".split()
VLLM_CHAT = """
echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs
thinking_token_budget reasoning_effort
""".split()
"""The extra parameters that vLLM documents, of both APIs and of chat alone."""


@pytest.mark.parametrize(
    ("kind", "documented"),
    [
        (CompletionBody, [*completion_create_params.CompletionCreateParamsStreaming.__annotations__, *VLLM]),
        (CompletionBody, completion_create_params.CompletionCreateParamsBase.__annotations__),
        (ChatBody, [*chat_create_params.CompletionCreateParamsStreaming.__annotations__, *VLLM, *VLLM_CHAT]),
        (ChatBody, chat_create_params.CompletionCreateParamsBase.__annotations__),
    ],
)
def test_every_documented_field_works_or_is_known(kind: type[msgspec.Struct], documented: Iterable[str]) -> None:
    """It is a member of its struct, refused by name, or known to change nothing; no field is all of that by accident."""
    unknown = {name for name in documented if name not in {*kind.__struct_fields__, *REFUSED, *fields.IGNORED}}
    assert unknown == set()
    assert not fields.IGNORED & {*REFUSED, *kind.__struct_fields__}


def test_the_table_names_nothing_that_every_body_has() -> None:
    """A field that is acted on is a line of its struct, and no more of the table."""
    common = {*CompletionBody.__struct_fields__} & {*ChatBody.__struct_fields__}
    assert not common & {*REFUSED} and {*fields.HARMLESS} <= {*REFUSED}
