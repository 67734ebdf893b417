"""gpt-oss as its users have it: a model whose tokenizer has Harmony's marks, behind chat and responses, with reasoning and calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from family_cases import CASES, save_case
from toy_tokenizers import byte_level_backend

sys.path.append(str(Path(__file__).resolve().parents[3] / "e2e"))  # serving is shared with the tests of servers
from serving import Server, serving  # noqa: E402

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.tool_calls %}<|channel|>analysis<|message|>{{ message.thinking or message.content }}<|end|>"
    "{% for call in message.tool_calls %} to=functions.{{ call.function.name }} {{ call.function.arguments | tojson }}<|call|>"
    "{% endfor %}{% else %}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
PARAMETERS = {"type": "object", "properties": {"city": {"const": "Ulm"}}, "required": ["city"], "additionalProperties": False}
ASKED = "Rain in Ulm?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, log = tmp_path_factory.mktemp("harmony"), tmp_path_factory.mktemp("log")
    backend = byte_level_backend()
    backend.add_special_tokens(MARKS)
    case, patch = CASES["gpt_oss"], pytest.MonkeyPatch()
    changes = {"vocab_size": backend.get_vocab_size(), "eos_token_id": backend.token_to_id("<|return|>")}
    with patch.context() as changed:
        changed.setitem(CASES, "gpt_oss", case._replace(changes={**case.changes, **changes}))
        save_case(folder, "gpt_oss")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>", "chat_template": TEMPLATE}))
    with serving(log, str(folder), "--max-model-len", "512", "--threads", "1") as running:
        yield running


def answered(server: Server, stream: bool, **asked: Any) -> tuple[str, str, list[Any]]:
    """(reasoning, words, calls) of a chat."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": ASKED}], max_tokens=120, stream=stream,
            extra_body={"thinking_token_budget": 6}, seed=3, **asked,
        )  # fmt: skip
        messages = [choice.delta for chunk in found for choice in chunk.choices] if stream else [found.choices[0].message]
    calls = [call.function for message in messages for call in message.tool_calls or []]
    both = ["".join(getattr(message, name, None) or "" for message in messages) for name in ("reasoning", "content")]
    return both[0], both[1], [("".join(call.name or "" for call in calls), "".join(call.arguments or "" for call in calls))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_and_a_choice(server: Server, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
    reasoning, words, calls = answered(server, stream, tools=[tool], tool_choice="required")
    ((name, arguments),) = calls
    assert reasoning and not words and (name, json.loads(arguments)) == ("weather", {"city": "Ulm"})
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}}
    reasoning, words, calls = answered(server, stream, response_format=form)
    assert reasoning and json.loads(words) == {"city": "Ulm"} and calls == [("", "")]


def test_responses(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
        found = client.responses.create(
            model=client.models.list().data[0].id, input=ASKED, tools=[tool], tool_choice="required", max_output_tokens=120,
            extra_body={"thinking_token_budget": 6, "seed": 3},
        )  # fmt: skip
    kinds = [item.type for item in found.output]
    assert kinds == ["reasoning", "function_call"]
    assert (found.output[1].name, json.loads(found.output[1].arguments)) == ("weather", {"city": "Ulm"})
