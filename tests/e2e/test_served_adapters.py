"""LoRA adapters behind a server: as models of every API, more of them than slots, loaded and unloaded while it runs; and on two
ranks."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from saved_adapters import DEMO, save_adapter, save_spoilt
from serving import Server, complete_all, eventually, serving

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.protocol.sampling_params import SamplingParams

PROMPTS = ["The module", "What is", "Return the", "def main"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OUTSIDE = "lora_path is outside of the folder that --lora-root allows: put the adapter there."


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
    """Adapters 0 to 4 of the demo model."""
    parent = tmp_path_factory.mktemp("adapters").resolve()
    named(parent, 5)
    return parent


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    modules = [f"t0={folder / '0'}", json.dumps({"name": "t1", "path": str(folder / "1"), "base_model_name": "demo"})]
    arguments = ["--enable-lora", "--max-loras", "2", "--lora-root", str(folder), "--log", "full", "--lora-modules", *modules]
    arguments += ["--speculative-config", '{"num_speculative_tokens": 3}']
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


def test_the_start_names_drafts_and_adapters(server: Server) -> None:
    assert "vnext: drafts   ngram, up to 3 tokens of a request in a step\n" in server.said
    assert "vnext: adapters 2 named, 2 in memory at a time\n" in server.said


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
    assert eventually(lambda: server.metric("vnext_num_requests_running") == server.metric("vnext_num_requests_waiting") == 0)
    counted = {name: server.metric(f"vnext_lora_{name}") for name in ("slots", "resident", "requests_waiting")}
    assert counted == {"slots": 2, "resident": 2, "requests_waiting": 0}
    loads, evictions = (server.metric(f"vnext_lora_{name}_total") for name in ("loads", "evictions"))
    assert loads == evictions + 2 and evictions >= 3
    for seed in (2, 3, 4):
        assert unload(server, f"t{seed}") == (200, "")
    assert models(server) == ["demo_model", "t0", "t1"]


def test_bad_input_is_one_sentence_and_harms_nobody(server: Server, folder: Path, tmp_path: Path) -> None:
    outside = save_adapter(DEMO, tmp_path / "outside")
    (folder / "link").symlink_to(outside)
    assert load(server, "x", outside) == load(server, "x", folder / "link") == (400, OUTSIDE)
    assert load(server, "x", folder / ".." / "..") == (400, OUTSIDE)
    for name in ("t0", "demo_model", ""):
        assert load(server, name, folder / "2") == (400, f"The name {name!r} is taken or empty: choose another, or unload it first.")
    assert "has no adapter_config.json" in load(server, "x", folder / "none")[1]
    assert unload(server, "x") == (404, "The adapter 'x' is not served here: ask /v1/models for the names.")
    assert call(server, "/v1/completions", **body_of("x"))[0] == 404
    assert call(server, "/v1/completions", **body_of("t0"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/\0", "~no-such-user/a", "loop", "a" * 5000], ids=["zero byte", "no user", "loop", "long"])
def test_paths_that_are_none(path: str, server: Server, folder: Path) -> None:
    if path == "loop":
        path = str(folder / "loop")
        Path(path).symlink_to(path)
    status, sentence = load(server, "x", path)
    assert status == 400 and "lora_path" in sentence and "\n" not in sentence


def test_files_that_lie_outside_are_outside(server: Server, folder: Path, tmp_path: Path) -> None:
    outside = save_adapter(DEMO, tmp_path / "outside")
    (folder / "within").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "within" / name).symlink_to(outside / name)
    assert load(server, "x", folder / "within") == (400, OUTSIDE)


MISFITS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "shape": (lambda path: save_spoilt(DEMO, path, "shape"), "has the shape [7, 4] where this model and the rank in adapter_config.json ask for ["),
    "missing": (lambda path: save_spoilt(DEMO, path, "missing"), "the other half of one that it has"),
    "no target": (lambda path: save_spoilt(DEMO, path, "target"), "adapts 'lm_head', which is no linear layer of this model"),
    "no layer": (lambda path: save_spoilt(DEMO, path, "layer"), "adapts 'model.layers.9.mlp.up_proj'"),
    "kind": (lambda path: save_spoilt(DEMO, path, "kind"), "decomposed (DoRA): not supported"),
    "dtype": (lambda path: save_spoilt(DEMO, path, "dtype"), "has the dtype I32; supported are F32, F16, BF16"),
    "empty": (lambda path: save_spoilt(DEMO, path, "empty"), "has no tensors"),
    "another rank": (lambda path: save_adapter(DEMO, path, r=5), "ask for ["),
    "another base": (lambda path: save_adapter(narrow_base(path / "base"), path), "the adapter was made for another model"),
    "embeddings": (lambda path: save_adapter(DEMO, path, targets=("embed_tokens",)), "adapts 'model.embed_tokens'"),
    "high rank": (lambda path: save_adapter(DEMO, path, rank=17), "has the rank 17, more than --max-lora-rank 16: raise it"),
    "DoRA": (lambda path: save_adapter(DEMO, path, use_dora=True), "has use_dora"),
    "whole modules": (lambda path: save_adapter(DEMO, path, modules_to_save=["lm_head"]), "has modules_to_save"),
    "truncated": (lambda path: truncated(save_adapter(DEMO, path)), "is truncated or corrupt; download it again"),
}  # fmt: skip


def narrow_base(folder: Path) -> Path:
    """A checkpoint with one layer of the demo model's name and another width."""
    folder.mkdir(parents=True)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8)}, str(folder / "model.safetensors"))
    return folder


def truncated(folder: Path) -> Path:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return folder


@pytest.mark.parametrize("how", MISFITS)
def test_an_adapter_that_does_not_fit_is_refused_when_it_is_named(how: str, server: Server, folder: Path) -> None:
    make, sentence = MISFITS[how]
    status, found = load(server, "misfit", make(folder / how))
    assert status == 400 and sentence in found and "\n" not in found
    assert models(server) == ["demo_model", "t0", "t1"]


def test_numbers_that_are_not_finite_are_refused_when_they_are_read(server: Server, folder: Path) -> None:
    assert load(server, "infinite", save_spoilt(DEMO, folder / "infinite", "infinite"))[0] == 200
    status, answer = call(server, "/v1/completions", **body_of("infinite"))
    assert status == 400 and "holds numbers that are not finite" in answer["error"]["message"]
    assert unload(server, "infinite") == (200, "")
    assert call(server, "/v1/completions", **body_of("t0"))[0] == 200


def test_an_adapter_in_use_stays(server: Server, folder: Path) -> None:
    data = json.dumps({**body_of("t1"), "max_tokens": 600, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: ")
        assert unload(server, "t1") == (400, "The adapter 't1' is in use by 1 call: wait for their end.")
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert eventually(lambda: unload(server, "t1") == (200, ""))
    assert models(server) == ["demo_model", "t0"] and call(server, "/v1/completions", **body_of("t1"))[0] == 404
    assert load(server, "t1", folder / "1") == (200, "demo_model")


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


def test_a_start_with_an_adapter_of_another_model(tmp_path: Path) -> None:
    folder = save_spoilt(DEMO, tmp_path / "a", "shape")
    sentence = r"vnext serve: .* has the shape \[7, 4\] where this model"
    with pytest.raises(AssertionError, match=sentence), serving(tmp_path, "--enable-lora", "--lora-modules", f"a={folder}"):
        pass


def test_a_server_without_adapters_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as plain:
        assert load(plain, "x", tmp_path) == (400, "This server serves no adapters: start it with --enable-lora.")
