"""The expert ids that requests get are those of a plain forward over their tokens, whatever the steps were like."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_here import engines_here

from vnext import LLM, SamplingParams
from vnext.replay.answers.stat import stat
from vnext.replay.console.commands import index_of
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))  # family_cases is shared with the models' tests
sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e"))  # so is serving with those of servers
from family_cases import save_case  # noqa: E402
from serving import serving  # noqa: E402
from ways_to_run import WAYS  # noqa: E402

COMMON: dict[str, Any] = {"executor": "inproc", "log": "off", "threads": 1, "dtype": "float32", "max_model_len": 256}
SHARED = [3 + 7 * place % 80 for place in range(40)]
PROMPTS = [SHARED[: 5 + 9 * index % 36] + [index, 2 * index + 1] for index in range(20)]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe_mixed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_case(folder, request.param)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


def routes(model: Path, tokens: list[int]) -> np.ndarray:
    """What transformers' routers choose, largest share first: int64 [tokens, layers, experts]."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([each.topk(oracle.config.num_experts_per_tok, -1).indices for each in logits], 1).numpy()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_ids_are_those_of_a_plain_forward(model: Path, way: dict[str, Any], tmp_path: Path) -> None:
    here = engines_here() if way.get("executor") != "mp" else pytest.MonkeyPatch.context()
    settings = {**COMMON, "log": "shape", "log_dir": tmp_path, "enable_return_routed_experts": True, **way}
    how = [SamplingParams(temperature=0.9, seed=index, max_tokens=25, n=1 + (index == 3)) for index in range(len(PROMPTS))]
    with here, LLM(str(model), **settings) as llm:
        answers = llm.generate(PROMPTS, how, use_tqdm=False)
        folder = Path(llm.log_dir)
    seen = stat(index_of(folder))
    assert (seen.preemptions > 0) == ("num_blocks_override" in way)
    assert (seen.hit_tokens > 0) == way.get("enable_prefix_caching", True)
    for answer in answers:
        for output in answer.outputs:
            tokens = answer.prompt_token_ids + output.token_ids
            expected = routes(model, tokens[:-1])
            assert output.routed_experts.dtype == np.int16 and output.routed_experts.shape == expected.shape
            assert (output.routed_experts == expected).all()


def test_nothing_is_reported_unless_it_is_asked_for(model: Path) -> None:
    with engines_here(), LLM(str(model), **COMMON) as llm:
        assert llm.generate(PROMPTS[:2], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].routed_experts is None


def test_over_http_in_sglang_s_form(model: Path, tmp_path: Path) -> None:
    asked = {"prompt": PROMPTS[7], "max_tokens": 9, "seed": 3, "n": 2, "return_routed_experts": True, "return_token_ids": True}

    def post(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60) as response:
            return json.load(response)

    options = ["--dtype", "float32", "--max-model-len", "256", "--threads", "1", "--log", "off"]
    with serving(tmp_path, str(model), *options, "--enable-return-routed-experts") as server:
        found = post(server, "/v1/completions", asked)
        with pytest.raises(urllib.error.HTTPError) as streamed:
            post(server, "/v1/completions", asked | {"stream": True})
    assert "leave out stream" in streamed.value.read().decode()
    for choice in found["choices"]:
        expected = routes(model, (PROMPTS[7] + choice["token_ids"])[:-1])
        ids = np.frombuffer(base64.b64decode(choice["routed_experts"]), np.int32).reshape(expected.shape)
        assert (ids == expected).all()


def test_a_server_without_them_says_so(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), "--dtype", "float32", "--max-model-len", "64", "--log", "off") as server:
        body = json.dumps({"prompt": [1, 2], "return_routed_experts": True}).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
    assert "start the server with --enable-return-routed-experts" in refused.value.read().decode()


def test_a_model_that_cannot_is_refused(tmp_path: Path) -> None:
    asked = {**COMMON, "enable_return_routed_experts": True}
    with engines_here(), pytest.raises(StartRefused, match="this model has no experts: leave the option out"):
        LLM(**asked)
    save_case(tmp_path, "mixtral_window")
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    with engines_here(), pytest.raises(StartRefused, match="add --no-enable-prefix-caching"):
        LLM(str(tmp_path), **asked)
    with engines_here(), LLM(str(tmp_path), **asked, enable_prefix_caching=False) as llm:
        found = llm.generate(PROMPTS[5], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert found.routed_experts.shape[0] == len(PROMPTS[5]) + 59 and (found.routed_experts >= 0).all()
