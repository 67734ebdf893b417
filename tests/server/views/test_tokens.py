"""/tokenize and /detokenize: the tokens that requests of the same words compute, and the way back."""

from __future__ import annotations

import pytest
from edge_server import TOKENIZER, EdgeServer

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import unpack_tokens

TEXT = "say:hello 中😀"
MESSAGES = [{"role": "user", "content": "say:hi"}]


def computed(server: EdgeServer) -> list[int]:
    """The prompt that the engine core got last."""
    return unpack_tokens(server.engine.of_kind(SubmitRequest)[-1].prompt).tolist()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": TEXT, "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "add_generation_prompt": False}),
        ("/v1/chat/completions", {"messages": MESSAGES, "continue_final_message": True}),
    ],
)
def test_the_tokens_are_those_of_a_request(server: EdgeServer, path: str, words: dict) -> None:
    status, answer, _ = server.post("/tokenize", {"model": "toy", **words})
    assert status == 200 and server.post(path, words)[0] == 200
    tokens = computed(server)
    assert answer == {
        "count": len(tokens),
        "max_model_len": server.context.bounds.model_length,
        "tokens": tokens,
        "token_strs": None,
    }
    assert server.post("/detokenize", {"tokens": tokens})[1] == {
        "prompt": TOKENIZER.decode(tokens, skip_special_tokens=False)
    }


def test_each_token_by_itself(server: EdgeServer) -> None:
    _, answer, _ = server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True})
    assert "".join(answer["token_strs"]) == "ab" and len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])


def test_many_tokens_come_back(server: EdgeServer) -> None:
    """More than are decoded between two answers, and more than a request may have."""
    text = "abc " * 3_000
    _, answer, _ = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert answer["count"] > answer["max_model_len"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "Either prompt or messages is required"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "not both"),
        ("/tokenize", {"promt": "a"}, 400, "Did you mean prompt?"),
        ("/tokenize", {"prompt": "a", "model": "elsewhere"}, 404, "is not served here"),
        ("/tokenize", {"messages": []}, 400, "messages is an empty list"),
        ("/detokenize", {"tokens": [0, -1]}, 400, "tokens[1] is -1"),
        ("/detokenize", {"tokens": [10**9]}, 400, "token ids lie between"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens is wrong"),
        ("/detokenize", {}, 400, "tokens is missing"),
    ],
)
def test_what_cannot_be_gets_one_sentence(server: EdgeServer, path: str, body: dict, status: int, words: str) -> None:
    code, answer, _ = server.post(path, body)
    assert code == status and words in answer["error"]["message"]


def test_they_ask_for_the_key() -> None:
    with EdgeServer(api_keys=("secret",)) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert server.post(path, body)[0] == 401
            assert server.post(path, body, Authorization="Bearer secret")[0] == 200
        assert server.get("/ping")[0] == server.post("/ping", {})[0] == 200
