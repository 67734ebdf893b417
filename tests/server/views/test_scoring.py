"""Scores and embeddings over HTTP, of a real engine in this process: the figures of transformers on the same checkpoint.

The requests are those that lm_eval's `local-completions` sends, and its way of reading the answers.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from edge_server import EdgeServer
from engine_here import engines_here
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vnext import LLM
from vnext.runtime.client.output_stream import Refused
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.text.tokenizer import Tokenizer

PAIRS = [("The module", " provides a class"), ("What is Python? It", " is a language"), ("import", " os\nimport sys"), ("a é", " 中b")]


class Running(NamedTuple):
    server: EdgeServer
    tokenizer: Tokenizer
    oracle: Any

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]


class _Engine(NamedTuple):
    address: str

    def close(self) -> None:
        """The LLM that started it ends it."""


@pytest.fixture(scope="module", params=["demo", "stories260k"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path: Path = DEMO_MODEL if request.param == "demo" else request.getfixturevalue("stories_path")
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    options = dict(executor="inproc", threads=1, dtype="float32", log_dir=tmp_path_factory.mktemp("logs"))
    with engines_here(), LLM(str(path), max_num_batched_tokens=16, **options) as llm:
        tokenizer = Tokenizer.load(path)
        with EdgeServer(tokenizer, _Engine(llm._engine.addresses[0])) as server:
            yield Running(server, tokenizer, oracle)


def ask(running: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer, _ = running.server.post(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("tokenized", [True, False])
def test_loglikelihoods_as_lm_eval_asks_for_them(running: Running, tokenized: bool) -> None:
    encoded = [(running.tokenizer.encode(one), running.tokenizer.encode(one + other)) for one, other in PAIRS]
    prompts = [whole for _, whole in encoded] if tokenized else [one + other for one, other in PAIRS]
    body = {"model": "toy", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = sorted(ask(running, "/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    for (context, whole), choice in zip(encoded, choices, strict=True):
        shown = choice["logprobs"]
        found = shown["token_logprobs"][len(context) : -1]
        greedy = all(value == max(top.values()) for value, top in zip(found, shown["top_logprobs"][len(context) : -1]))
        right = running.logprobs(whole)
        targets = torch.tensor(whole[1:])
        expected = right[:-1].gather(1, targets[:, None])[:, 0]
        assert shown["token_logprobs"][0] is None and len(shown["tokens"]) == len(whole) + 1
        assert shown["token_logprobs"][1:-1] == pytest.approx(expected.tolist(), abs=3e-4)
        assert greedy == bool((right[:-1].argmax(-1) == targets)[len(context) - 1 :].all())


def test_offsets_and_text_of_an_echo(running: Running) -> None:
    text = "The module is"
    body = {"model": "toy", "prompt": text, "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = ask(running, "/v1/completions", body)
    [choice] = answer["choices"]
    shown, tokens = choice["logprobs"], running.tokenizer.encode(text)
    assert choice["text"] == text and choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    assert len(shown["tokens"]) == len(tokens)
    starts = shown["text_offset"]
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]
    assert "".join(pieces) == text and starts == sorted(starts)
    assert all(piece in ("", token, token.lstrip()) for piece, token in zip(pieces, shown["tokens"]))
    streamed = running.server.openai().completions.create(
        model="toy", prompt=text, max_tokens=3, logprobs=0, echo=True, stream=True
    )
    chunks = [chunk.choices[0] for chunk in streamed]
    names = [name for chunk in chunks if chunk.logprobs for name in chunk.logprobs.tokens]
    assert names[: len(tokens)] == shown["tokens"] and "".join(chunk.text for chunk in chunks).startswith(text)


def test_an_end_after_an_echo_has_an_entry(running: Running) -> None:
    """lm_eval takes the last entry for the answer's: without one, the score would miss the prompt's last token."""
    tokens = running.tokenizer.encode("The module is")
    ends = {"stop_token_ids": tokens[-1:], "logit_bias": {str(tokens[-1]): 100}}
    body = {"prompt": tokens, "max_tokens": 1, "logprobs": 1, "echo": True, **ends}
    [choice] = ask(running, "/v1/completions", body)["choices"]
    assert choice["finish_reason"] == "stop"
    assert {len(entries) for entries in choice["logprobs"].values()} == {len(tokens) + 1}
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])


def test_prompt_logprobs_have_vllms_shape(running: Running) -> None:
    tokens = running.tokenizer.encode("The module is a good thing")
    [choice] = ask(running, "/v1/completions", {"prompt": tokens, "max_tokens": 0, "prompt_logprobs": 2})["choices"]
    right = running.logprobs(tokens)
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(tokens) - 1
    for at, entry in enumerate(others, 1):
        found = entry[str(tokens[at])]
        assert found["logprob"] == pytest.approx(right[at - 1, tokens[at]].item(), abs=3e-4) and len(entry) in (2, 3)
        assert found["decoded_token"] == running.tokenizer.token_text(tokens[at]).text


def test_a_chat_scores_its_prompt(running: Running) -> None:
    if running.tokenizer.chat_template is None:
        pytest.skip("this model has no chat template")
    body = {"messages": [{"role": "user", "content": "What is Python?"}], "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    answer = ask(running, "/v1/chat/completions", body)
    tokens, right = answer["prompt_token_ids"], running.logprobs(answer["prompt_token_ids"])
    found = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], answer["prompt_logprobs"][1:])]
    assert found == pytest.approx([right[at, token].item() for at, token in enumerate(tokens[1:])], abs=3e-4)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_embeddings_are_hidden_states(running: Running, pooling: str) -> None:
    texts = ["The module is a class of objects that are in the list of the file", "import"]
    answer = ask(running, "/v1/embeddings", {"input": texts, "pooling": pooling, "dimensions": 32})
    for text, entry in zip(texts, answer["data"], strict=True):
        states = running.hidden(running.tokenizer.encode(text))
        pooled = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling][:32]
        assert entry["embedding"] == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-3)
    assert answer["usage"]["prompt_tokens"] == sum(len(running.tokenizer.encode(text)) for text in texts)


def test_ollamas_older_route_has_the_vector_as_the_model_makes_it(running: Running) -> None:
    text = "The module is a class"
    found = ask(running, "/api/embeddings", {"model": "toy:latest", "prompt": text})
    assert [*found] == ["embedding"]
    assert found["embedding"] == ask(running, "/v1/embeddings", {"input": text, "normalize": False})["data"][0]["embedding"]
    [unit] = ask(running, "/api/embed", {"input": text})["embeddings"]
    length = np.linalg.norm(found["embedding"])
    assert abs(length - 1) > 0.1 and np.allclose(np.array(found["embedding"]) / length, unit, atol=1e-6)


def test_openais_client_reads_them(running: Running) -> None:
    """It asks for base64."""
    client, tokens = running.server.openai(), running.tokenizer.encode("The module")
    by_text, by_tokens = (client.embeddings.create(model="toy", input=given).data[0].embedding for given in ("The module", tokens))
    plain = client.embeddings.create(model="toy", input=[tokens], encoding_format="float").data[0].embedding
    assert by_text == by_tokens and np.allclose(plain, by_text, atol=1e-7)
    with pytest.raises(openai.BadRequestError, match="dimensions is 100000"):
        client.embeddings.create(model="toy", input="a", dimensions=100000)


def test_many_inputs_are_computed_in_waves(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.server.context.limiter, "request_max", 3)
    texts = [f"The {place}" for place in range(10)]
    whole = ask(running, "/v1/embeddings", {"input": texts})["data"]
    alone = [ask(running, "/v1/embeddings", {"input": each})["data"][0] for each in texts]
    assert [each["embedding"] for each in whole] == [each["embedding"] for each in alone]
    pairs = ask(running, "/score", {"text_1": texts, "text_2": texts[::-1]})["data"]
    assert [each["score"] for each in pairs] == [each["score"] for each in pairs[::-1]]
    ranked = ask(running, "/rerank", {"query": texts[7], "documents": texts})["results"]
    assert ranked[0]["index"] == 7 and len(ranked) == 10


def test_documents_are_ranked_and_pairs_scored(running: Running) -> None:
    texts = ["The module", "a list of files", "import os"]
    body = {"model": "toy", "query": "import os", "documents": [{"text": texts[0]}, *texts[1:]]}
    first, *others = ask(running, "/v1/rerank", body | {"pooling": "mean"})["results"]
    assert first["index"] == 2 and first["relevance_score"] == pytest.approx(1.0) and first["document"]["text"] == texts[2]
    assert [each["relevance_score"] for each in others] == sorted((each["relevance_score"] for each in others), reverse=True)
    assert len(ask(running, "/rerank", body | {"top_n": 1})["results"]) == 1
    scores = ask(running, "/score", {"text_1": "import os", "text_2": texts, "pooling": "mean"})["data"]
    assert scores[first["index"]]["score"] == pytest.approx(first["relevance_score"]) and len(scores) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[5], []]}, "input[1]"),
        ("/v1/embeddings", {"input": [[2**30]]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "pooling": "median"}, "pooling"),
        ("/v1/embeddings", {"input": [5] * 5000}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/rerank", {"query": "a", "documents": ["a", "a " * 3000]}, "documents[1]"),
        ("/score", {"text_1": "a", "text_2": "a " * 3000}, "text_2"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2049}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ],
)
def test_bad_input_is_named(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    status, answer, _ = running.server.post(path, body)
    assert status == 400 and answer["error"]["param"] in (param, f"{param}[0]"), answer


def test_a_model_without_a_head_makes_embeddings_only(tmp_path: Path) -> None:
    model = tmp_path / "body"
    shutil.copytree(DEMO_MODEL, model)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"architectures": ["LlamaModel"], "tie_word_embeddings": False}))
    tensors = load_file(model / "model.safetensors")
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, model / "model.safetensors")
    options = dict(executor="inproc", threads=1, dtype="float32", log="off")
    with engines_here(), LLM(DEMO_MODEL, **options) as whole, LLM(model, **options) as llm:
        assert llm.embed("The module")[0].outputs.embedding == whole.embed("The module")[0].outputs.embedding
        with pytest.raises(Refused, match="this model's checkpoint has no output head"):
            llm.generate("The module", use_tqdm=False)
        with EdgeServer(Tokenizer.load(model), _Engine(llm._engine.addresses[0])) as server:
            status, answer, _ = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            assert status == 400 and "has no output head: it makes embeddings" in answer["error"]["message"]


def test_what_is_no_number_is_an_error_and_counted(tmp_path: Path) -> None:
    """Not 200 with the token 0 for ever, and no embedding of nulls."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with engines_here(), LLM(model, executor="inproc", threads=1, log="off") as llm:
        with EdgeServer(Tokenizer.load(model), _Engine(llm._engine.addresses[0])) as server:
            bodies = {
                "/v1/completions": {"prompt": "a", "max_tokens": 9}, "/v1/embeddings": {"input": "a"},
                "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            }  # fmt: skip
            for path, body in bodies.items():
                status, answer, _ = server.post(path, body)
                assert status == 500 and answer["error"]["code"] == "not_a_number", (path, status, answer)
                assert "model computes what is no number (NaN): its weights" in answer["error"]["message"]
            deadline, spoilt = time.monotonic() + 60, r"vnext_requests_spoilt_total\{[^}]*\} 3\.0"
            while not re.search(spoilt, server.get("/metrics")[1]):
                assert time.monotonic() < deadline
                time.sleep(0.1)
