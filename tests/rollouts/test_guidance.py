"""Guided answers are those of transformers' guidance_scale, whatever the steps were like, and the same bits in each way."""

from __future__ import annotations

import json
import re
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

from vnext import LLM, SamplingParams, StructuredOutputsParams
from vnext.replay.answers.stat import stat
from vnext.replay.cli.main import main
from vnext.replay.console.commands import index_of
from vnext.runtime.batch import halves
from vnext.runtime.batch.step_inputs import Guided
from vnext.runtime.client.client import Refused
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused
from vnext.runtime.protocol.sampling_params import InvalidRequest

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))  # family_cases is shared with the models' tests
sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e"))  # so is serving with those of servers
from family_cases import save_case  # noqa: E402
from serving import serving  # noqa: E402
from ways_to_run import WAYS  # noqa: E402

COMMON: dict[str, Any] = {
    "executor": "inproc", "log": "off", "threads": 1, "dtype": "float32", "max_model_len": 96, "enable_guidance": True
}  # fmt: skip
PROMPTS = [[3 + (7 * place + 11 * index) % 80 for place in range(9 + 13 * index % 37)] for index in range(8)]
LENGTHS = [1, 6, 40, 16, 21, 30, 1, 45]
"""Of negative prompts: those of three are longer than the prompt."""
NEGATIVES = [[5 + (3 * place + index) % 70 for place in range(length)] for index, length in enumerate(LENGTHS)]
SCALES = [1.5, 3.0, 0.0, 7.0, 1.0, 2.0, 0.5, 1.5]
COUNT = 24


@pytest.fixture(scope="module", params=["qwen3_bias_yarn", "mistral", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_case(folder, request.param)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


def asked(index: int, **more: Any) -> SamplingParams:
    guidance = {"guidance_scale": SCALES[index], "negative_prompt": NEGATIVES[index]} if SCALES[index] != 1.0 else {}
    return SamplingParams(max_tokens=COUNT, ignore_eos=True, **guidance, **more)


def expected(model: Path) -> list[list[int]]:
    """What transformers answers."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None
    found = []
    for prompt, negative, scale in zip(PROMPTS, NEGATIVES, SCALES):
        guidance = {"guidance_scale": scale, "negative_prompt_ids": torch.tensor([negative])} if scale != 1.0 else {}
        made = oracle.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=COUNT, max_new_tokens=COUNT, pad_token_id=0, **guidance
        )  # fmt: skip
        found.append(made[0, len(prompt) :].tolist())
    return found


def test_greedy_answers_are_those_of_transformers(model: Path) -> None:
    with engines_here(), LLM(str(model), **COMMON) as llm:
        answers = llm.generate(PROMPTS, [asked(index, temperature=0) for index in range(8)], use_tqdm=False)
    assert [each.outputs[0].token_ids for each in answers] == expected(model)


def test_halves_that_are_taken_for_each_other_are_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the request's tokens were always the prompt's: answers away from a longer negative prompt are then others."""
    monkeypatch.setattr(halves, "Guided", lambda one, other, scales: Guided(np.minimum(one, other), np.maximum(one, other), scales))
    with engines_here(), LLM(str(model), **COMMON) as llm:
        answers = llm.generate(PROMPTS, [asked(index, temperature=0) for index in range(8)], use_tqdm=False)
    wrong = [index for index, (found, right) in enumerate(zip(answers, expected(model))) if found.outputs[0].token_ids != right]
    assert wrong == [index for index in range(8) if len(NEGATIVES[index]) > len(PROMPTS[index])] == [2, 3, 7]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_way_changes_a_bit(model: Path, way: dict[str, Any], tmp_path: Path) -> None:
    def answers(settings: dict[str, Any], groups: list[list[int]]) -> list[Any]:
        here = engines_here() if settings.get("executor") != "mp" else pytest.MonkeyPatch.context()
        with here, LLM(str(model), **COMMON | settings) as llm:
            how = [asked(index, temperature=0.9, seed=index, logprobs=3, repetition_penalty=1.1) for index in range(8)]
            made = {
                index: answer.outputs[0]
                for group in groups
                for index, answer in zip(group, llm.generate([PROMPTS[i] for i in group], [how[i] for i in group], use_tqdm=False))
            }
            folder = Path(llm.log_dir) if llm.log_dir else None
        if folder is not None:
            assert (stat(index_of(folder)).preemptions > 0) == ("num_blocks_override" in settings)
        return [(made[index].token_ids, made[index].logprobs) for index in range(8)]

    alone = answers({}, [[index] for index in range(8)])
    assert answers({"log": "shape", "log_dir": str(tmp_path), **way}, [list(range(8))]) == alone


def test_a_hit_up_to_the_other_half_changes_no_bit(model: Path) -> None:
    """Blocks of the prompt come from the cache up to where the negative prompt begins beside it, whoever wrote them."""
    prompt = [5 + (3 * place) % 70 for place in range(70)]
    hows = [
        SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.9, seed=1, logprobs=3, **more)
        for more in (
            {}, {"guidance_scale": 2.0, "negative_prompt": [9] * 5}, {"guidance_scale": 3.0, "negative_prompt": [4] * 30},
            {"guidance_scale": 2.0, "negative_prompt": [8] * 70},
        )
    ]  # fmt: skip
    with engines_here():
        alone = []
        for how in hows:
            with LLM(str(model), **COMMON, block_size=16) as llm:
                alone.append(llm.generate(prompt, how, use_tqdm=False)[0])
        with LLM(str(model), **COMMON, block_size=16) as llm:
            warm = [llm.generate(prompt, how, use_tqdm=False)[0] for how in (*hows, *hows)]
    assert [each.num_cached_tokens for each in warm] == [0, 64, 32, 0, 64, 64, 32, 0]
    for found, expected in zip(warm, (*alone, *alone)):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def test_a_hit_of_a_longer_negative_prompt_changes_no_bit(model: Path, tmp_path: Path) -> None:
    """Its blocks come from the cache up to where the prompt begins beside it. Of the prompt none do, and its
    answer says so."""
    negative = [5 + (3 * place) % 70 for place in range(70)]
    how = SamplingParams(
        max_tokens=COUNT, ignore_eos=True, temperature=0.9, seed=1, logprobs=3, guidance_scale=2.0, negative_prompt=negative
    )  # fmt: skip
    with engines_here():
        alone = []
        for prompt in PROMPTS[:3]:
            with LLM(str(model), **COMMON, block_size=16) as llm:
                alone.append(llm.generate(prompt, how, use_tqdm=False)[0])
        with LLM(str(model), **COMMON | {"log": "shape", "log_dir": str(tmp_path)}, block_size=16) as llm:
            warm = [llm.generate(prompt, how, use_tqdm=False)[0] for prompt in (negative, *PROMPTS[:3])]
            folder = Path(llm.log_dir)
    assert stat(index_of(folder)).hit_tokens == sum((70 - len(prompt)) // 16 * 16 for prompt in PROMPTS[:3]) > 0
    assert [each.num_cached_tokens for each in warm] == [0] * 4
    for found, expected in zip(warm[1:], alone):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def test_penalties_see_the_prompt_that_is_shorter(model: Path) -> None:
    """And not the negative one, whichever is longer."""
    prompt, negative, scale = PROMPTS[0], NEGATIVES[7], 1.5
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    how = SamplingParams(
        max_tokens=COUNT, ignore_eos=True, temperature=0, repetition_penalty=1.8, guidance_scale=scale, negative_prompt=negative
    )  # fmt: skip
    with engines_here(), LLM(str(model), **COMMON) as llm:
        output = llm.generate(prompt, how, use_tqdm=False)[0].outputs[0].token_ids
    with torch.no_grad():
        beside, without = (oracle(torch.tensor([each + output])).logits[0, len(each) - 1 : -1] for each in (prompt, negative))
    for place, scores in enumerate(without + scale * (beside - without)):
        seen = torch.tensor(sorted({*prompt, *output[:place]}))
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / 1.8, scores[seen] * 1.8)
        assert output[place] == int(scores.argmax()), place


@pytest.mark.parametrize("scale", [1.5, 4.0])
def test_a_grammar_holds_for_the_guided_distribution(scale: float) -> None:
    guidance = {"guidance_scale": scale, "negative_prompt": [9, 7]}
    wanted = StructuredOutputsParams(regex="(no|yes), (never|always)")
    how = SamplingParams(max_tokens=COUNT, temperature=0, structured_outputs=wanted, **guidance)
    with engines_here(), LLM(str(DEMO_MODEL), **COMMON) as llm:
        alone = llm.generate(PROMPTS[2], how, use_tqdm=False)[0].outputs[0]
        among = llm.generate([PROMPTS[1], PROMPTS[2]], [asked(1), how], use_tqdm=False)[1].outputs[0]
    assert re.fullmatch("(no|yes), (never|always)", alone.text)
    assert alone.token_ids == among.token_ids


def test_a_log_is_executed_again(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"log": "full", "log_dir": str(tmp_path), "long_prefill_token_threshold": 7}
    with engines_here(), LLM(str(model), **COMMON | settings) as llm:
        llm.generate(PROMPTS, [asked(index, temperature=0.9, seed=index) for index in range(8)], use_tqdm=False)
        folder = llm.log_dir
    for more in ((), ("--solo",), ("--steps", "12:")):
        code = main(["exec", str(folder), "--model", str(model), "--json", *more])
        said = capsys.readouterr()
        assert code == 0, said.err
        found = json.loads(said.out)
        assert (code, found["same"], found["differ"]) == (0, True, 0) and found["tokens"] > COUNT


@pytest.mark.parametrize("index", [1, 7])
def test_log_probabilities_are_those_of_the_guided_distribution(model: Path, index: int) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with engines_here(), LLM(str(model), **COMMON) as llm:
        output = llm.generate(PROMPTS[index], asked(index, temperature=0, logprobs=1), use_tqdm=False)[0].outputs[0]
    with torch.no_grad():
        with_prompt, without = (
            oracle(torch.tensor([before + output.token_ids[:-1]])).logits[0, len(before) - 1 :] for before in (PROMPTS[index], NEGATIVES[index])
        )
    scores = (without + SCALES[index] * (with_prompt - without)).log_softmax(-1)
    found = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids)]
    assert np.allclose(found, scores[torch.arange(COUNT), output.token_ids], atol=2e-4)


def test_the_arithmetic_is_one_for_arrays_and_tensors() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    guided = Guided(np.array([0, 4]), np.array([3, 2]), np.array([1.5, 3.0], np.float32))
    expected = [logits[3] + np.float32(1.5) * (logits[0] - logits[3]), logits[1], logits[2] + np.float32(3) * (logits[4] - logits[2])]
    assert (guided.combined(torch.from_numpy(logits.copy())).numpy() == np.stack(expected)).all()
    assert (guided.combined(logits) == np.stack(expected)).all()


def test_what_cannot_be_guided_is_refused(model: Path) -> None:
    with engines_here(), LLM(str(model), **COMMON) as llm:
        longer = {"guidance_scale": 2.0, "negative_prompt": [4] * 12}
        with pytest.raises(Refused, match="prompt_logprobs do not go with a negative prompt that is longer than the prompt: shorten it"):
            llm.generate([1, 2, 3], SamplingParams(**longer, prompt_logprobs=1), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="you requested 97 tokens"):
            llm.generate([1, 2, 3], SamplingParams(**longer, max_tokens=85), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="The prompt holds 100000: token ids lie between 0"):
            llm.generate([1, 2, 3], SamplingParams(guidance_scale=2.0, negative_prompt=[10**5]), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="only allowed with a guidance_scale other than 1"):
            SamplingParams(negative_prompt="bad")
    with engines_here(), LLM(str(model), **COMMON | {"enable_guidance": False}) as llm:
        with pytest.raises(Refused, match="start it with --enable-guidance"):
            llm.generate([1, 2, 3], SamplingParams(guidance_scale=2.0), use_tqdm=False)
    with engines_here(), pytest.raises(StartRefused, match="--enable-guidance does not go with expert ids"):
        LLM(str(model), **COMMON, enable_return_routed_experts=True)


def test_over_http(model: Path, tmp_path: Path) -> None:
    def post(server: Any, path: str, **body: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.url + path, json.dumps(body).encode(), headers), timeout=60) as found:
            return json.load(found)

    options = ["--dtype", "float32", "--max-model-len", "96", "--threads", "1", "--log", "off", "--enable-guidance"]
    how = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(tmp_path, str(model), *options) as server:
        found = post(server, "/v1/completions", prompt=PROMPTS[3], guidance_scale=7.0, negative_prompt=NEGATIVES[3], **how)
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(server, "/v1/completions", prompt=PROMPTS[3], guidance_scale=7.0, use_beam_search=True, n=2, max_tokens=3)
    assert found["choices"][0]["token_ids"] == expected(model)[3]
    assert found["usage"]["prompt_tokens"] == len(PROMPTS[3])
    assert "does not go with use_beam_search" in refused.value.read().decode()
