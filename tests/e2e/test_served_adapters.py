"""LoRA adapters behind a server: as models of every API, more of them than slots, loaded and unloaded while it runs; and on two
ranks."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saved_adapters import DEMO, save_adapter
from serving import Server, complete_all, eventually, serving

from vnext.llm import LLM
from vnext.lora_request import LoRARequest
from vnext.replay.cli.main import main as replay
from vnext.sampling_params import SamplingParams

PROMPTS = ["The module", "What is", "Return the", "def main"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def named(parent: Path, count: int) -> list[LoRARequest]:
    """Adapters of the demo model."""
    folders = [save_adapter(DEMO, parent / str(seed), seed, rank=2 + 3 * seed, lora_alpha=1) for seed in range(count)]
    return [LoRARequest(f"tenant {seed}", seed, str(folder)) for seed, folder in enumerate(folders)]


def test_two_ranks(tmp_path: Path) -> None:
    settings = {"threads": 1, "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "digest_interval": 1}
    each = [None, *named(tmp_path, 3)]
    with LLM(log_dir=str(tmp_path), log="full", check_laws=True, **settings) as llm:
        one = llm.generate(PROMPTS, GREEDY, False, each)
    with LLM(log_dir=str(tmp_path), log="full", check_laws=True, tensor_parallel_size=2, **settings) as llm:
        two = llm.generate(PROMPTS, GREEDY, False, each)
        assert [each.outputs for each in llm.generate(PROMPTS[::-1], GREEDY, False, each[::-1])] == [each.outputs for each in two][::-1]
        log_dir = llm.log_dir
    assert [found.outputs[0].token_ids for found in one] == [found.outputs[0].token_ids for found in two]
    assert replay(["verify", "--laws", log_dir]) == 0


# ---- a server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters 0 to 5 of the demo model, the last of which does not fit it."""
    parent = tmp_path_factory.mktemp("adapters").resolve()
    named(parent, 5)
    save_adapter(DEMO, parent / "5", 5, targets=("embed_tokens",))
    return parent


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    modules = [f"t0={folder / '0'}", json.dumps({"name": "t1", "path": str(folder / "1"), "base_model_name": "demo"})]
    arguments = ["--enable-lora", "--max-loras", "2", "--lora-root", str(folder), "--log", "full", "--lora-modules", *modules]
    with serving(tmp_path_factory.mktemp("log"), *arguments) as running:
        yield running
        log_dir = running.log_dir
        assert running.stop() == 0
    assert replay(["verify", "--laws", str(log_dir)]) == 0


def call(server: Server, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """(status, answer) of a POST, or of a GET without a body."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def load(server: Server, name: str, path: object) -> tuple[int, str]:
    status, answer = call(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
    return status, answer["error"]["message"] if "error" in answer else answer["parent"]


def unload(server: Server, name: str) -> tuple[int, str]:
    status, answer = call(server, "/v1/unload_lora_adapter", lora_name=name)
    return status, answer["error"]["message"] if "error" in answer else ""


def models(server: Server) -> list[str]:
    return [each["id"] for each in call(server, "/v1/models")[1]["data"]]


def body_of(model: str, prompt: str = "The module") -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def test_adapters_are_models_in_every_api(server: Server, folder: Path) -> None:
    assert models(server) == ["demo_model", "t0", "t1"]
    assert call(server, "/v1/models/t1")[1]["parent"] == "demo_model"
    for path, body in (
        ("/v1/completions", {"prompt": "What is", "max_tokens": 12, "temperature": 0}),
        ("/v1/completions", {"prompt": "What is", "max_tokens": 12, "use_beam_search": True, "n": 2, "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 12, "temperature": 0}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 12, "temperature": 0}),
        ("/v1/responses", {"input": "What?", "max_output_tokens": 16, "temperature": 0}),
        ("/v1/embeddings", {"input": "What?"}),
    ):
        found = [call(server, path, model=model, **body) for model in ("demo_model", "t0", "t1", "t0")]
        assert [(status, answer["model"]) for status, answer in found] == [(200, each) for each in ("demo_model", "t0", "t1", "t0")]
        first, second, third, again = (said(answer) for _, answer in found)
        assert second == again and len({first, second, third}) == 3, path


def said(answer: dict[str, Any]) -> str:
    """What an answer of any API holds."""
    return json.dumps(next(answer[name] for name in ("choices", "content", "output", "data") if name in answer), sort_keys=True).split('"id"')[0] + str(
        [part.get("content") for part in answer.get("output", ())] if answer.get("object") == "response" else ""
    )


def test_a_crowd_gets_what_each_gets_alone(server: Server, folder: Path) -> None:
    """Five adapters over two slots, among requests without one."""
    for seed in (2, 3, 4):
        assert load(server, f"t{seed}", folder / str(seed)) == (200, "demo_model")
    names = ["demo_model", *(f"t{seed}" for seed in range(5))]
    bodies = [body_of(names[at % 6], f"{at // 6} The module") for at in range(36)]
    together = complete_all(server.url, bodies, 36)
    for body, answer in zip(bodies[::5], together[::5]):
        assert complete_all(server.url, [body], 1)[0]["choices"] == answer["choices"]
    for seed in (2, 3, 4):
        assert unload(server, f"t{seed}") == (200, "")
    assert models(server) == ["demo_model", "t0", "t1"]


def test_bad_input_is_one_sentence_and_harms_nobody(server: Server, folder: Path, tmp_path: Path) -> None:
    outside = save_adapter(DEMO, tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    outside_sentence = "lora_path is outside of the folder that --lora-root allows: put the adapter there."
    assert load(server, "x", outside) == load(server, "x", folder / "link") == (400, outside_sentence)
    assert load(server, "x", folder / ".." / "..") == (400, outside_sentence)
    for name in ("t0", "demo_model", ""):
        assert load(server, name, folder / "2") == (400, f"The name {name!r} is taken or empty: choose another, or unload it first.")
    assert "has no adapter_config.json" in load(server, "x", folder / "none")[1]
    assert unload(server, "x") == (404, "The adapter 'x' is not served here: ask /v1/models for the names.")
    assert load(server, "misfit", folder / "5")[0] == 200
    status, answer = call(server, "/v1/completions", **body_of("misfit"))
    assert status == 400 and "which is no linear layer of this model" in answer["error"]["message"]
    assert unload(server, "misfit") == (200, "")
    assert call(server, "/v1/completions", **body_of("misfit"))[0] == 404
    assert call(server, "/v1/completions", **body_of("t0"))[0] == 200


def test_an_adapter_in_use_stays(server: Server) -> None:
    done: list[int] = []
    body = {**body_of("t1"), "max_tokens": 600}
    thread = threading.Thread(target=lambda: done.append(call(server, "/v1/completions", **body)[0]))
    thread.start()
    try:
        assert eventually(lambda: server.metric("vllm:num_requests_running") > 0 or bool(done))
        if not done:
            assert unload(server, "t1") == (400, "The adapter 't1' is in use by 1 calls: wait for their end.")
    finally:
        thread.join()
    assert done == [200] and "t1" in models(server)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--lora-modules", "a=/x"], "need --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "write name=path"),
        (["--enable-lora", "--lora-modules", "a=/none"], "/none has no adapter_config.json"),
        (["--enable-lora", "--lora-modules", "demo_model=/none"], "is another model's name"),
        (["--enable-lora", "--max-lora-rank", "257"], "max-lora-rank"),
    ],
)
def test_a_start_that_cannot_work(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=sentence), serving(tmp_path, *arguments):
        pass


def test_a_server_without_adapters_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as plain:
        assert load(plain, "x", tmp_path) == (400, "This server serves no adapters: start it with --enable-lora.")
