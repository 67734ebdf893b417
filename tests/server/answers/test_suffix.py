"""`suffix` of /v1/completions: the prompt that the engine gets, and what is refused."""

from __future__ import annotations

import openai
import pytest
from edge_server import EdgeServer
from test_tools import request_of
from toy_tokenizers import byte_level_backend

from vnext.state.events import unpack_tokens
from vnext.text.tokenizer import Tokenizer

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


def coder() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(MARKS)
    return Tokenizer(backend, {}, None)


def test_the_gap_stands_between_prompt_and_suffix() -> None:
    tokenizer = coder()
    prefix, suffix, middle = map(tokenizer.special_id, MARKS)
    with EdgeServer(tokenizer) as server, server.openai() as client:
        for prompt in ("def f(", tokenizer.encode("def f(", False)):
            answer = client.completions.create(model="toy", prompt=prompt, suffix="return x", max_tokens=2)
            right = [prefix, *tokenizer.encode("def f(", False), suffix, *tokenizer.encode("return x", False), middle]
            assert unpack_tokens(request_of(server, answer.id).prompt).tolist() == right


@pytest.mark.parametrize("extra", [{"echo": True}, {"extra_body": {"truncate_prompt_tokens": 3}}, {"extra_body": {"prompt_logprobs": 1}}])
def test_what_reads_the_prompt_as_one_text_is_refused(extra: dict[str, object]) -> None:
    with EdgeServer(coder()) as server, server.openai() as client, pytest.raises(openai.BadRequestError, match="does not go with suffix"):
        client.completions.create(model="toy", prompt="a", suffix="b", max_tokens=2, **extra)
