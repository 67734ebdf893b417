"""Answers that are chosen, and prompts that are cut: best_of, beam search, truncate_prompt_tokens, names of tokens."""

from __future__ import annotations

from typing import Any

import pytest
from edge_server import EOS, TOKENIZER, EdgeServer

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import unpack_tokens

SAY = "say:hello"
COMPLETION = ("/v1/completions", {"prompt": SAY, "max_tokens": 20})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": SAY}], "max_tokens": 20})
BOTH = [COMPLETION, CHAT]


def ask(server: EdgeServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer, _ = server.post(path, body)
    assert status == 200, answer
    return answer


def error(server: EdgeServer, path: str, body: dict[str, Any]) -> tuple[str, str]:
    status, answer, _ = server.post(path, body)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


def submitted(server: EdgeServer, id_: str) -> list[SubmitRequest]:
    return [message for message in server.engine.of_kind(SubmitRequest) if message.name.startswith(id_)]


def test_best_of_samples_more_and_shows_the_likeliest(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    order = iter([-3.0, -0.5, -2.0, -1.0, -1.0, -9.0])
    logprobs: dict[int, float] = {}
    plain = type(server.engine)._output

    def output(self: Any, name: str, request: SubmitRequest, tokens: list[int]) -> Any:
        found = plain(self, name, request, tokens)
        entry = found.logprobs[0]
        value = logprobs.setdefault(request.sampling.seed, next(order) if len(logprobs) < 6 else 0.0)
        return type(found)(**{f: getattr(found, f) for f in found.__struct_fields__} | {
            "logprobs": (type(entry)(logprob=value, rank=0, top=entry.top),)
        })  # fmt: skip

    monkeypatch.setattr(type(server.engine), "_output", output)
    body = {"prompt": [SAY, "say:other"], "best_of": 3, "n": 2, "seed": 5, "logprobs": 0, "max_tokens": 1}
    answer = ask(server, "/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-0.5], [-2.0], [-1.0], [-1.0]]
    assert answer["usage"]["completion_tokens"] == 6 and len(submitted(server, answer["id"])) == 6


def test_best_of_shows_no_logprobs_that_nobody_asked_for(server: EdgeServer) -> None:
    answer = ask(server, COMPLETION[0], COMPLETION[1] | {"best_of": 2})
    assert [(choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [("hello", None)]


@pytest.mark.parametrize("wrong", [{"best_of": 1, "n": 2}, {"best_of": 129}, {"best_of": 2, "stream": True}])
def test_best_of_out_of_range(server: EdgeServer, wrong: dict[str, Any]) -> None:
    assert error(server, COMPLETION[0], COMPLETION[1] | wrong)[0] == "best_of"


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_beam_search_answers_with_the_best_beams(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    answer = ask(server, path, body | {"use_beam_search": True, "n": 2, "beam_width": 3, "max_tokens": 2, "length_penalty": 0.5})
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]
    likely = TOKENIZER.encode(SAY.removeprefix("say:"))[0]
    assert len(texts) == 2 and texts[0].startswith(TOKENIZER.decode([likely])) and len(set(texts)) == 2
    sent = submitted(server, answer["id"])
    assert len(sent) == 1 + 3 and {request.sampling.max_tokens for request in sent} == {1}
    assert {request.sampling.logprobs for request in sent} == {6}
    prompt = unpack_tokens(sent[0].prompt).tolist()
    assert all(unpack_tokens(request.prompt).tolist()[:-1] == prompt for request in sent[1:])
    assert answer["usage"]["completion_tokens"] == 4


def test_a_beam_that_ends_stops_there(server: EdgeServer) -> None:
    body = COMPLETION[1] | {"prompt": "say:", "use_beam_search": True, "n": 1, "return_token_ids": True, "logprobs": 1}
    [choice] = ask(server, COMPLETION[0], body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("", "stop", [EOS])


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_stream_of_beams_has_one_chunk_an_answer(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    asked = body | {"use_beam_search": True, "n": 2, "max_tokens": 2, "stream": True}
    text = ask(server, path, asked)
    assert text.count('"finish_reason":"length"') == 2 and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"use_beam_search": True, "n": 11}, "beam_width"), ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"), ({"beam_width": 4}, "beam_width"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"), ({"length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": True, "stop": "x"}, "stop"), ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"), ({"use_beam_search": True, "repetition_penalty": 1.5}, "repetition_penalty"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_what_a_beam_search_cannot_do(server: EdgeServer, path: str, body: dict[str, Any], asked: dict, param: str) -> None:
    assert error(server, path, body | asked)[0] == param


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_prompt_is_cut_to_its_last_tokens(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    whole = ask(server, path, body | {"return_token_ids": True})
    ids = (whole if "prompt_token_ids" in whole else whole["choices"][0])["prompt_token_ids"]
    cut = ask(server, path, body | {"truncate_prompt_tokens": 4})
    assert unpack_tokens(submitted(server, cut["id"])[0].prompt).tolist() == ids[-4:]
    assert cut["usage"]["prompt_tokens"] == 4
    assert ask(server, path, body | {"truncate_prompt_tokens": 500})["usage"]["prompt_tokens"] == len(ids)


def test_a_prompt_beyond_the_model_s_length_is_cut_where_asked(server: EdgeServer) -> None:
    """The model has 512 tokens."""
    body = {"prompt": "xy " * 900, "max_tokens": 12}
    assert error(server, "/v1/completions", body)[0] == "prompt"
    assert ask(server, "/v1/completions", body | {"truncate_prompt_tokens": -1})["usage"]["prompt_tokens"] == 500
    echoed = ask(server, "/v1/completions", body | {"truncate_prompt_tokens": 2, "echo": True, "max_tokens": 1})
    assert echoed["choices"][0]["text"] == "y x"
    assert error(server, "/v1/completions", body | {"truncate_prompt_tokens": 508})[0] == "max_tokens"


@pytest.mark.parametrize("wrong", [0, -2, 513])
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_cut_out_of_range(server: EdgeServer, path: str, body: dict[str, Any], wrong: int) -> None:
    assert error(server, path, body | {"truncate_prompt_tokens": wrong})[0] == "truncate_prompt_tokens"


def test_logprobs_name_tokens_by_their_ids(server: EdgeServer) -> None:
    ids = TOKENIZER.encode("hello")
    asked = {"return_tokens_as_token_ids": True}
    found = ask(server, COMPLETION[0], COMPLETION[1] | asked | {"logprobs": 2})["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in ids]
    assert all(name.startswith("token_id:") for top in found["top_logprobs"] for name in top)
    chat = ask(server, CHAT[0], CHAT[1] | asked | {"logprobs": True, "top_logprobs": 2})["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in chat][: len(ids)] == [f"token_id:{token}" for token in ids]
    assert all(other["token"].startswith("token_id:") for entry in chat for other in entry["top_logprobs"])


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_lists_reach_the_engine_as_tokens(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    answer = ask(server, path, body | {"allowed_token_ids": [7, 5, 7], "bad_words": ["hello", " hello"]})
    constraint = submitted(server, answer["id"])[0].sampling.constraint
    assert constraint.allowed == (5, 7) and tuple(TOKENIZER.encode("hello")) in constraint.banned
    assert submitted(server, ask(server, path, body)["id"])[0].sampling.constraint is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"allowed_token_ids": [512]}, {"allowed_token_ids": [5] * 4097},
        {"bad_words": [" "]}, {"bad_words": ["x" * 257]}, {"bad_words": ["x"] * 129},
    ],
)  # fmt: skip
def test_lists_out_of_range(server: EdgeServer, wrong: dict[str, Any]) -> None:
    assert error(server, COMPLETION[0], COMPLETION[1] | wrong)[0] == next(iter(wrong))


def test_a_client_s_code_is_refused_with_the_reason(server: EdgeServer) -> None:
    assert "runs no client's code" in error(server, COMPLETION[0], COMPLETION[1] | {"logits_processors": ["a.b"]})[1]
