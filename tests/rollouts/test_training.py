"""A trainer's log-probabilities are the engine's in every bit, its gradients those of transformers, and the example says 0."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_here import engines_here
from safetensors.torch import load_file, save_file

from vnext import LLM, SamplingParams
from vnext.api.training import Trainer
from vnext.kernels import derivatives
from vnext.kernels.cpu import native
from vnext.kernels.table import operations, plain_operations
from vnext.runtime.processes.launch import DEMO_MODEL

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))  # family_cases is shared with the models' tests
from family_cases import save_case  # noqa: E402

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the CPU's kernels are not built here: no C++ compiler was found")
FAMILIES = (
    "demo", "smollm3_window", "mixtral", "qwen2_tied_yarn", "qwen3", "qwen3_moe_mixed", "gemma2", "gemma3_caps", "phi3", "gpt2_inner",
    "olmo2_one_key",
)  # fmt: skip
PROMPTS = [[(5 + 13 * index + 7 * place) % 97 for place in range(1 + 17 * index % 60)] for index in range(6)]


def model_of(family: str, folder: Path) -> Path:
    if family == "demo":
        return DEMO_MODEL
    save_case(folder, family)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    return folder


def rollouts(model: Path, dtype: str, **settings: Any) -> tuple[list[list[int]], np.ndarray]:
    """Answers to PROMPTS, and what the engine reports of all their tokens."""
    how = [SamplingParams(temperature=0.9, seed=index, max_tokens=20, ignore_eos=True, logprobs=0) for index in range(len(PROMPTS))]
    common = {"executor": "inproc", "log": "off", "threads": 1, "max_model_len": 256, "max_num_batched_tokens": 40}
    with engines_here(), LLM(str(model), dtype=dtype, **common, **settings) as llm:
        found = [each.outputs[0] for each in llm.generate(PROMPTS, how, use_tqdm=False)]
    logprobs = [entry[token].logprob for each in found for token, entry in zip(each.token_ids, each.logprobs, strict=True)]
    return [each.token_ids for each in found], np.array(logprobs, np.float32)


def unequal(ours: list[torch.Tensor], theirs: np.ndarray) -> int:
    bits = torch.cat(ours).detach().numpy().view(np.int32)
    assert bits.shape == theirs.shape == (20 * len(PROMPTS),)
    return int((bits != theirs.view(np.int32)).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_engine_s(family: str, dtype: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    answers, theirs = rollouts(model, dtype)
    assert unequal(Trainer(model, dtype, 256).logprobs(PROMPTS, answers), theirs) == 0


@pytest.mark.parametrize("isa", [level.name.lower() for level in native.levels()] if native.is_built() else [])
def test_on_every_instruction_set(isa: str) -> None:
    before = native.level()
    try:
        for dtype in ("float32", "bfloat16"):
            answers, theirs = rollouts(DEMO_MODEL, dtype, isa=isa)
            assert unequal(Trainer(DEMO_MODEL, dtype, isa=isa).logprobs(PROMPTS, answers), theirs) == 0
    finally:
        native.set_level(before)


def test_plain_torch_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trainers usually compute with: the comparison sees its rounding."""
    answers, theirs = rollouts(DEMO_MODEL, "bfloat16")
    trainer = Trainer(DEMO_MODEL, "bfloat16")
    monkeypatch.setattr("vnext.api.training.operations", lambda device: plain_operations())
    assert unequal(trainer.logprobs(PROMPTS, answers), theirs) > 20
    monkeypatch.undo()
    assert operations("cpu") is not plain_operations()


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path)
    answers = [[(3 + 5 * index + 11 * place) % 97 for place in range(9 + index)] for index in range(len(PROMPTS))]
    trainer = Trainer(model, "float32", 256)
    torch.cat(trainer.logprobs(PROMPTS, answers)).sum().backward()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, answer in zip(PROMPTS, answers):
        logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum().backward()
    theirs = {name: each.grad for name, each in oracle.named_parameters() if each.grad is not None}
    compared = {name for name in theirs.keys() & trainer.weights.keys() if not name.endswith("k_proj.bias")}  # 0: softmax cancels it
    assert len(compared) > 10 or family == "mixtral", "transformers calls its weights by the names of the files"
    for name in compared:
        gap = (trainer.weights[name].grad - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-3)
        assert gap < 1e-3, (name, float(gap))


def test_a_saved_step_is_what_the_engine_loads(tmp_path: Path) -> None:
    trainer = Trainer(DEMO_MODEL, "bfloat16")
    answers, before = rollouts(DEMO_MODEL, "bfloat16")
    torch.cat(trainer.logprobs(PROMPTS, answers)).sum().backward()
    torch.optim.SGD(trainer.weights.values(), lr=1e-4).step()
    saved = trainer.save(tmp_path / "stepped")
    answers, after = rollouts(saved, "bfloat16")
    assert unequal(trainer.logprobs(PROMPTS, answers), after) == 0
    assert (before != after).any()
    assert unequal(Trainer(saved, "bfloat16").logprobs(PROMPTS, answers), after) == 0


def test_a_copy_of_the_embedding_is_no_weight_of_its_own(tmp_path: Path) -> None:
    """It would stay behind when the embedding is trained; a head that differs is one."""
    save_case(tmp_path, "qwen2_tied_yarn")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    assert Trainer(tmp_path).weights.keys() == tensors.keys()
    save_file(tensors | {"lm_head.weight": embedding.flip(0)}, file)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    answers, theirs = rollouts(tmp_path, "float32")
    assert unequal(Trainer(tmp_path, "float32", 256).logprobs(PROMPTS, answers), theirs) == 0


def test_the_index_says_which_copy_is_trained(tmp_path: Path) -> None:
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    norm = tensors["model.norm.weight"]
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"model.norm.weight": norm + 1}, tmp_path / "model-2.safetensors")
    homes = dict.fromkeys(tensors, "model-1.safetensors") | {"no.such": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    assert torch.equal(Trainer(tmp_path).weights["model.norm.weight"], norm.float())


def test_the_derivative_is_of_what_was_computed() -> None:
    """Exact's two halves belong together: its gradient is that of its plain form at the given inputs."""
    x, weight = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    derivatives.exact(lambda a, b: (a * b).round(decimals=3), lambda a, b: a * b, x, weight).sum().backward()
    assert torch.equal(x.grad, weight.detach()) and torch.equal(weight.grad, x.detach())


def test_the_example(root: Path) -> None:
    """Two steps, the second with the weights of the first; as its documentation says it is run."""
    command = [sys.executable, root / "examples" / "policy_gradient.py", "--group", "3", "--tokens", "12"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"})
    assert said.returncode == 0, said.stderr
    steps = re.findall(r"^step (\d): loss (\S+), (\d+) of (\d+) log-probabilities differ$", said.stdout, re.MULTILINE)
    assert [(step, unequal, count) for step, _, unequal, count in steps] == [("0", "0", "144"), ("1", "0", "288")]
