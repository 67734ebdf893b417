"""Models that transformers computes give its logits and greedy tokens, with the same bits in every batch and on any ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_here import llm_here
from family_cases import VOCAB_SIZE
from hosted_cases import CASES, save_hosted
from model_helpers import Chunk, Model, ThreadGroup, load_model
from transformers import CONFIG_MAPPING

from vnext import LLM, SamplingParams
from vnext.models import outside
from vnext.models.config.folder import architecture
from vnext.models.config.model_config import load_config, parse_config
from vnext.models.config.stages import of_stage
from vnext.models.errors import ModelError
from vnext.models.hosted import modules, skeleton
from vnext.models.hosted.looking import FUNCTIONS
from vnext.models.hosted.modules import ACTIVATIONS
from vnext.models.layers.sharding import Parallel, alone, check_world_size
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.kept import Kept
from vnext.models.loading.weights import load_params, refill_params
from vnext.models.registry import IMPLEMENTATION, require_family
from vnext.runtime.processes.launch import DEMO_MODEL

PROMPT = [int(token) for token in torch.randint(0, VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(1))]
BLOCKS = [9, 2, 30, 4, 11, 8, 50, 51, 52, 53, 0, 1, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 31]
STRANGER = Chunk(PROMPT[10:31], 0, [40, 41])
TOKEN_COUNT = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosted")


def prompt_logits(model: Model, sizes: list[int], *strangers: Chunk) -> torch.Tensor:
    """Those of the prompt [300, V] in chunks of these sizes."""
    found, done = [], 0
    for size in sizes:
        chunk = Chunk(PROMPT[done : done + size], done, BLOCKS)
        found.append(model.logits(chunk, *strangers)[:size])
        done += size
    return torch.cat(found)


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_tokens_and_bits(saved: Path, name: str) -> None:
    oracle, path = save_hosted(saved / name, name), saved / name
    ids, asked = torch.tensor([PROMPT]), {"do_sample": False, "max_new_tokens": TOKEN_COUNT, "min_new_tokens": TOKEN_COUNT}
    oracle.generation_config.eos_token_id = None
    greedy = oracle.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **asked)
    expected = oracle(ids).logits[0]
    model = load_model(path)
    logits = prompt_logits(model, [143, 157])
    assert model.config.architecture.startswith("transformers/")
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < TOKEN_COUNT:
        tokens.append(int(model.logits(Chunk(tokens[-1:], len(PROMPT) + len(tokens) - 1, BLOCKS), STRANGER)[0].argmax()))
    assert tokens == greedy[0, len(PROMPT) :].tolist()
    assert torch.equal(prompt_logits(load_model(path), [7] * 42 + [6], STRANGER), logits)
    if not model.config.hosted.whole:
        ranks = ThreadGroup(2).run(lambda parallel: on_rank(path, parallel))
        assert all(torch.equal(each, logits) for each in ranks)


@torch.inference_mode()
def on_rank(path: Path, parallel: Parallel) -> torch.Tensor:
    return prompt_logits(load_model(path, parallel=parallel), [143, 157])


@pytest.mark.parametrize("name", ["stablelm", "cohere2", "dbrx", "jetmoe", "nemotron", "bloom", "codegen", "doge", "falcon rw"])
@torch.inference_mode()
def test_bits_in_bfloat16(saved: Path, name: str) -> None:
    save_hosted(saved / f"{name}-16", name)
    model = load_model(saved / f"{name}-16", dtype=torch.bfloat16)
    logits = prompt_logits(model, [143, 157])
    again = load_model(saved / f"{name}-16", dtype=torch.bfloat16)
    assert torch.equal(prompt_logits(again, [1] * 9 + [284, 7], STRANGER), logits) and logits.std() > 0.01


NOT_SERVED = ", which --model-impl transformers does not serve"
REFUSED = {
    "cpmant": "CpmAntForCausalLM attends by code of its own, not by the interface of transformers",
    "falcon": "Falcon shares keys among heads that have biases of their own (alibi)",
    "doge": "Doge chooses experts by the scores of other tokens (is_moe)",
    "hrm_text": "HrmTextForCausalLM reads a prompt in both directions (prefix_lm)",
    "gpt_oss": "model.layers.0.self_attn (GptOssAttention) attends with s_aux",
    "deepseek_v3": "model.layers.0.self_attn (DeepseekV3Attention) has queries, keys and values of unlike heads and sizes [128, 192], "
    "[128, 192] and [128, 128]",
    "rwkv": "RwkvForCausalLM needs layers with a state (Mamba, linear attention, recurrence)",
    "zaya": "ZayaModel computes by numbers, where vnext knows shapes alone",
    "blt": "patcher (BltPatcher) computes by numbers, where vnext knows shapes alone",
}  # fmt: skip


def raw_config(name: str, **members: object) -> dict[str, Any]:
    """A config.json of two layers, as its authors' class has it."""
    config = CONFIG_MAPPING[name](num_hidden_layers=2, **members).to_dict()
    return config | {"architectures": [outside.writers(name)[0]]}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """From the configuration alone."""
    with pytest.raises(ModelError) as error:
        parse_config(raw_config(name) | {IMPLEMENTATION: "transformers", "alibi": True, "is_moe": True}, {})
    assert str(error.value) == REFUSED[name] + NOT_SERVED


def test_the_rope_of_dbrx(saved: Path) -> None:
    """As its authors' config.json has it, where transformers does not look."""
    raw = raw_config("dbrx", attn_config={"rope_theta": 5e5})
    del raw["rope_parameters"]
    for more, theta in (({}, 5e5), ({"rope_theta": 7e5}, 7e5), ({"rope_parameters": {"rope_theta": 9e5}}, 9e5)):
        made = skeleton.make_model(json.dumps(raw | more), torch.float32)
        assert made.config.rope_parameters["rope_theta"] == theta


def test_tensors_that_are_cut_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^HrmTextForCausalLM cuts model.L_module.layers.0.attn.gqkv_proj.weight of a checkpoint into"):
        parse_config(raw_config("hrm_text", prefix_lm=False) | {IMPLEMENTATION: "transformers"}, {})


def test_operations_that_depend_on_the_batch_are_refused() -> None:
    """Without this tree's activations a model of silu is not served."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeleton, "ACTIVATIONS", {})
        patch.setattr(modules, "FUNCTIONS", {})
        with pytest.raises(ModelError, match=r"^layers.0.mlp.act_fn \(SiLUActivation\) computes silu in a way whose rounding may"):
            parse_config(raw_config("stablelm", vocab_size=501) | {IMPLEMENTATION: "transformers"}, {})


@torch.inference_mode()
def test_a_model_whose_rows_depend_on_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its numbers, at the start."""
    save_hosted(tmp_path, "arcee")
    monkeypatch.setattr(modules.Product, "forward", lambda self, x: x.new_zeros((*x.shape[:-1], self.outputs)) + x.shape[1] / 7)
    with pytest.raises(ModelError, match="^ArceeForCausalLM computes tokens otherwise alone than together, so --model-impl"):
        load_model(tmp_path)


def test_ranks_and_stages(saved: Path) -> None:
    save_hosted(saved / "whole", "olmo3")
    config = load_config(saved / "whole")
    with pytest.raises(ModelError, match="^ranks cannot share a model that transformers computes so: model.layers.0.self_attn.q_proj is"):
        check_world_size(config, 2)
    with pytest.raises(ModelError, match="^--model-impl transformers computes no stages of a model"):
        load_params(saved / "whole", of_stage(config, 0, 2), alone(), torch.float32, "cpu")


def test_who_computes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours where there is one, unless asked; without `architectures` by model_type; without the package one sentence."""
    named = {"model_type": "biogpt"}
    assert architecture(named) == architecture(named | {"architectures": ["BioGptForCausalLM"]}) == "transformers/BioGptForCausalLM"
    assert architecture(named | {IMPLEMENTATION: "vnext"}) == "BioGptForCausalLM"
    assert architecture({"model_type": "llama"}) == "LlamaForCausalLM"
    assert architecture({"model_type": "mpt", "architectures": ["MPTForCausalLM"]}) == "transformers/MptForCausalLM"
    llama = {"model_type": "llama", IMPLEMENTATION: "transformers"}
    assert architecture(llama) == "transformers/LlamaForCausalLM"
    assert architecture({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}) == "MambaForCausalLM"
    with pytest.raises(ModelError, match="^the installed transformers has no decoder 'OwnForCausalLM': leave --model-impl"):
        architecture(llama | {"architectures": ["OwnForCausalLM"]})
    outside.writers.cache_clear()
    monkeypatch.setattr("vnext.models.registry.package", lambda: None)
    with pytest.raises(ModelError, match=r"^--model-impl transformers needs the package transformers: pip install 'vnext\[transformers"):
        architecture(llama)
    with pytest.raises(ModelError, match=r"or transformers to compute it: pip install 'vnext\[transformers\]'; supported are"):
        require_family("BioGptForCausalLM")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_new_weights_take_the_place_of_all_old_ones(tmp_path: Path, dtype: torch.dtype) -> None:
    """Those of routers too, which are packed apart."""
    first, second = save_hosted(tmp_path / "a", "glm4_moe"), save_hosted(tmp_path / "b", "glm4_moe")
    for parameter in second.parameters():
        parameter.mul_(0.9)
    second.save_pretrained(tmp_path / "b")
    model, kept = load_model(tmp_path / "a", dtype=dtype), Kept()
    params = load_params(tmp_path / "a", model.config, alone(), dtype, "cpu", kept=kept)
    model = model._replace(params=params)
    before = model.logits(Chunk(PROMPT[:9], 0, BLOCKS))
    with open_checkpoint(tmp_path / "b") as tensors:
        refill_params(params, kept, tensors, model.config, alone(), dtype, "cpu")
    found = model.logits(Chunk(PROMPT[:9], 0, BLOCKS))
    expected = load_params(tmp_path / "b", model.config, alone(), dtype, "cpu")
    assert torch.equal(found, model._replace(params=expected).logits(Chunk(PROMPT[:9], 0, BLOCKS)))
    assert not torch.equal(found, before) and first is not second


@pytest.mark.parametrize(("name", "start"), [("biogpt", LLM), ("mpt", llm_here)])
def test_an_engine_serves_one(tmp_path: Path, name: str, start: Callable[..., AbstractContextManager[LLM]]) -> None:
    """By itself, in a process of its own and in this one; steps of few tokens change no answer, nor do hits."""
    save_hosted(tmp_path, name, forced=False, vocab_size=json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"])
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    params, prompts = SamplingParams(max_tokens=12, temperature=0.8, seed=2), ["def f(x):", "while", "class A: pass " * 3]
    with start(str(tmp_path), threads=1, log="off", max_num_batched_tokens=16) as llm:
        together = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
        alone = [llm.generate([each], params, use_tqdm=False)[0].outputs[0].token_ids for each in prompts * 2]
    assert together * 2 == alone and len({tuple(each) for each in together}) == 3


@pytest.mark.parametrize("name", [*sorted(FUNCTIONS), *ACTIVATIONS])
def test_functions_have_the_same_bits_at_any_place(name: str) -> None:
    function = ACTIVATIONS[name] if name in ACTIVATIONS else getattr(torch, name)
    numbers = torch.randn(1, 5003, generator=torch.Generator().manual_seed(4)).abs() * 3 + 0.1
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers.to(dtype)
        whole = function(x)
        for first, size in ((0, 1), (1, 2), (3, 15), (17, 33), (64, 127), (4999, 4)):
            assert torch.equal(function(x[:, first : first + size].clone()), whole[:, first : first + size])
