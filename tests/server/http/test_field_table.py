"""Doors x fields: a field that any door knows is accepted, refused with what to send instead, or changes nothing by the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from edge_server import EdgeServer
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.http.fields import IGNORED, LENGTHS, OF_ANSWERS, REFUSED, SPELLINGS, USUAL, verdict, without_unknown
from vnext.server.routes import ROUTES

DOORS: dict[str, type[msgspec.Struct]] = {
    route.path: route.body for route in ROUTES
    if route.body and re.match("/v1/(?!batches|load|unload)|/rerank|/score|/tokenize|/detokenize|/api/(?!show)", route.path)
}  # fmt: skip
"""The routes for clients, with their bodies."""
NAMES = sorted(
    {name for kind in DOORS.values() for name in kind.__struct_fields__}
    | {name for name in REFUSED if "[]" not in name} | IGNORED | OF_ANSWERS | {*USUAL}
    | {name.partition(".")[0] for row in SPELLINGS for name in row}
)  # fmt: skip
SHOWN = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "fields.md"
COUNTING = {path for path, kind in DOORS.items() if not {*LENGTHS} & {*kind.__struct_fields__}}


@pytest.mark.parametrize("path", DOORS)
def test_no_known_field_is_ignored_by_accident(path: str) -> None:
    kind = DOORS[path]
    for name in {*NAMES} - {*kind.__struct_fields__}:
        try:
            without_unknown(json.dumps({name: "x y"}).encode(), kind)
        except InvalidRequest as error:
            assert error.param == name and str(error).startswith(f"{name} is not supported here: ")
            assert all(_is_member(kind, each) for each in _named(str(error)))
        else:
            assert name in IGNORED or (name in OF_ANSWERS and path in COUNTING)


def _named(sentence: str) -> list[str]:
    """The names that a client is told to send."""
    found = re.search(r": send ([\w.]+(?: or [\w.]+)*)\.$", sentence)
    return found[1].split(" or ") if found else []


def _is_member(kind: type[msgspec.Struct], name: str) -> bool:
    """Whether the body has the field, and `a.b` is a field of the struct in the field `a`."""
    field, _, member = name.partition(".")
    structs = msgspec.json.schema(kind)["$defs"]
    held = json.dumps(structs[kind.__name__]["properties"][field])
    return not member or any(f'/{each}"' in held and member in struct["properties"] for each, struct in structs.items())


RESPONSES, MESSAGES = {"input": "say:hi"}, {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 3}
CHAT, COUNT = {"messages": MESSAGES["messages"]}, {"messages": MESSAGES["messages"]}
ASKED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("/v1/responses", RESPONSES, {"response_format": {"type": "json_object"}}, "send text.format"),
    ("/v1/responses", RESPONSES, {"guided_json": {"type": "object"}}, "send text.format"),
    ("/v1/responses", RESPONSES, {"guided_regex": "a+"}, "send structured_outputs.regex"),
    ("/v1/responses", RESPONSES, {"guided_choice": ["a"]}, "send structured_outputs.choice"),
    ("/v1/responses", RESPONSES, {"max_tokens": 5}, "send max_output_tokens"),
    ("/v1/responses", RESPONSES, {"max_completion_tokens": 5}, "send max_output_tokens"),
    ("/v1/responses", RESPONSES, {"n": 2}, "leave it out, or send it to /v1/chat/completions"),
    ("/v1/messages", MESSAGES, {"bad_words": ["a"]}, "leave it out, or send it to /v1/chat/completions"),
    ("/v1/responses", RESPONSES, {"reasoning_effort": "low"}, "send reasoning.effort"),
    ("/v1/responses", RESPONSES, {"logprobs": True}, "send top_logprobs"),
    ("/v1/responses", {}, {"messages": CHAT["messages"]}, "send input"),
    ("/v1/responses", RESPONSES, {"system": "s"}, "send instructions"),
    ("/v1/responses", RESPONSES, {"conversation": "c"}, "send previous_response_id or input"),
    ("/v1/messages", MESSAGES, {"stop": ["a"]}, "send stop_sequences"),
    ("/v1/messages", MESSAGES, {"logit_bias": {"5": 1}}, "leave it out, or send it to /v1/chat/completions"),
    ("/v1/messages", MESSAGES, {"presence_penalty": 1}, "leave it out, or send it to /v1/chat/completions"),
    ("/v1/messages", MESSAGES, {"logprobs": True}, "leave it out, or send it to /v1/chat/completions"),
    ("/v1/messages", MESSAGES, {"response_format": {"type": "json_object"}}, "send output_config.format"),
    ("/v1/messages", MESSAGES, {"guided_json": {"type": "object"}}, "send output_config.format"),
    ("/v1/messages", MESSAGES, {"max_completion_tokens": 5}, "send max_tokens"),
    ("/v1/messages", MESSAGES, {"instructions": "s"}, "send system"),
    ("/v1/messages", MESSAGES, {"thinking_token_budget": 5}, "send thinking.budget_tokens"),
    ("/v1/messages", MESSAGES, {"parallel_tool_calls": False}, "send tool_choice.disable_parallel_tool_use"),
    ("/v1/messages/count_tokens", COUNT, {"response_format": {"type": "json_object"}}, "send output_config.format"),
    ("/v1/embeddings", {"input": "a"}, {"cache_salt": "s"}, "leave it out"),
    ("/v1/embeddings", {}, {"messages": CHAT["messages"]}, "send input"),
    ("/score", {"text_1": "a", "text_2": "b"}, {"dimensions": 3}, "leave it out"),
    ("/tokenize", {"prompt": "a"}, {"truncate_prompt_tokens": 3}, "leave it out"),
    ("/v1/chat/completions", CHAT, {"text": {"format": {"type": "json_object"}}}, "send response_format"),
    ("/v1/chat/completions", CHAT, {"thinking_budget": 5}, "send thinking_token_budget"),
    ("/v1/chat/completions", CHAT, {"output_config": {"effort": "low"}}, "send response_format or reasoning_effort"),
    ("/v1/chat/completions", CHAT, {"max_new_tokens": 5}, "send max_tokens"),
    ("/v1/chat/completions", CHAT, {"format": "json"}, "send response_format"),
    ("/v1/chat/completions", CHAT, {"think": "low"}, "send reasoning_effort or enable_thinking"),
    ("/v1/messages", MESSAGES, {"format": "json"}, "send output_config.format"),
    ("/v1/chat/completions", CHAT, {"options": {"num_predict": 3}}, "send its members themselves"),
    ("/api/chat", CHAT, {"response_format": {"type": "json_object"}}, "send format"),
    ("/api/chat", CHAT, {"structured_outputs": {"choice": ["a"]}}, "send format"),
    ("/api/chat", CHAT, {"max_tokens": 5}, "send options.num_predict"),
    ("/api/chat", CHAT, {"stop": ["a"]}, "send options.stop"),
    ("/api/chat", CHAT, {"temperature": 0.5}, "send options.temperature"),
    ("/api/chat", CHAT, {"logprobs": True}, "leave it out, or send it to /v1/chat/completions"),
    ("/api/chat", CHAT, {"reasoning_effort": "low"}, "send think"),
    ("/api/generate", {"prompt": "a"}, {"top_k": 5}, "send options.top_k"),
    ("/v1/completions", {"prompt": "a"}, {"max_completion_tokens": 5}, "send max_tokens"),
    ("/v1/completions", {"prompt": "a"}, {"top_logprobs": 5}, "send logprobs"),
    ("/v1/completions", {"prompt": "a"}, {"reasoning_effort": "low"}, "send it to /v1/chat/completions"),
    ("/v1/completions", {"prompt": "a"}, {"logits_processors": ["a"]}, "the server runs no client's code, but a chat has logit_bias, allowed_token_ids and bad_words"),
]
"""(door, body, a field of another door, what to do instead)."""


@pytest.mark.parametrize(("path", "body", "more", "remedy"), ASKED)
def test_a_field_of_another_door_is_refused_by_its_right_name(
    server: EdgeServer, path: str, body: dict[str, Any], more: dict[str, Any], remedy: str
) -> None:
    status, answer, _ = server.post(path, body | more)
    assert (status, _message(answer["error"])) == (400, f"{next(iter(more))} is not supported here: {remedy}.")


def _message(error: Any) -> str:
    """Ollama's errors are one sentence."""
    return error if isinstance(error, str) else str(error["message"])


def test_how_an_answer_is_made_changes_nothing_where_there_is_none(server: EdgeServer) -> None:
    more = {"temperature": 0.5, "stream": True, "seed": 5, "max_tokens": 3}
    assert server.post("/v1/messages/count_tokens", COUNT | more)[0] == server.post("/tokenize", CHAT | more)[0] == 200


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
    ("path", "documented"),
    [
        ("/v1/completions", [*completion_create_params.CompletionCreateParamsStreaming.__annotations__, *VLLM]),
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase.__annotations__),
        ("/v1/chat/completions", [*chat_create_params.CompletionCreateParamsStreaming.__annotations__, *VLLM, *VLLM_CHAT]),
        ("/v1/chat/completions", chat_create_params.CompletionCreateParamsBase.__annotations__),
        ("/v1/responses", response_create_params.ResponseCreateParamsBase.__annotations__),
        ("/v1/messages", message_create_params.MessageCreateParamsBase.__annotations__),
        ("/v1/messages", beta_create_params.MessageCreateParamsBase.__annotations__),
        ("/v1/messages/count_tokens", message_count_tokens_params.MessageCountTokensParams.__annotations__),
        ("/v1/embeddings", embedding_create_params.EmbeddingCreateParams.__annotations__),
    ],
)
def test_every_documented_field_works_or_is_known(path: str, documented: Iterable[str]) -> None:
    fields = DOORS[path].__struct_fields__
    assert [name for name in documented if name not in fields and verdict(name, fields) is None] == []


def test_the_table_names_nothing_that_every_body_has() -> None:
    common = set.intersection(*({*kind.__struct_fields__} for kind in DOORS.values()))
    assert common == {"model"} and not common & {*REFUSED, *OF_ANSWERS, *IGNORED}


def test_the_page_shows_the_table(request: pytest.FixtureRequest) -> None:
    """With --rewrite the page gets what it must show."""
    before, rest = PAGE.read_text().split("<!-- table -->\n")
    shown = f"{before}<!-- table -->\n{_page()}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    if request.config.getoption("--rewrite"):
        PAGE.write_text(shown)
    assert PAGE.read_text() == shown


def _page() -> str:
    """A row for all fields of the same lot, by the doors' names for them."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in NAMES:
        rows.setdefault(tuple(_cell(DOORS[path], name) for path in SHOWN), []).append(f"`{name}`")
    head = [f"| field | {' | '.join(f'`{path}`' for path in SHOWN)} |", f"|---|{'---|' * len(SHOWN)}"]
    return "\n".join([*head, *(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items())]) + "\n"


def _cell(kind: type[msgspec.Struct], name: str) -> str:
    fields = kind.__struct_fields__
    said = "yes" if name in fields else verdict(name, fields)
    if not said or said.startswith("leave"):
        return "no" if said else "–"
    return re.sub(r"^send it to /v1/(\w+)\S*$", r"→ \1", said).removeprefix("send ").removeprefix("it ")
