"""gpt-oss from its published form: experts of MXFP4 in one tensor a layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_here import engines_here
from family_cases import CASES, VOCAB_SIZE, make_model, save_case
from model_helpers import Chunk, ThreadGroup, load_model
from safetensors.torch import load_file, save_file

from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config, parse_config
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import shard_count
from vnext.models.loading.gguf_out import GgufQuantiser
from vnext.models.loading.unread import unread
from vnext.runtime.processes.launch import DEMO_MODEL

PROMPT = [int(token) for token in torch.randint(0, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(4))]
FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
WIDE, COUNT = 128, 12


def in_mxfp4(folder: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A model whose experts are numbers of MXFP4, saved as the published ones are."""
    case = CASES["gpt_oss"]
    monkeypatch.setitem(CASES, "gpt_oss", case._replace(changes={**case.changes, "intermediate_size": WIDE}))
    model, generator, stored = make_model("gpt_oss"), torch.Generator().manual_seed(5), {}
    for name, weight in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        numbers = torch.stack((FLOATS[(blocks & 15).long()], FLOATS[(blocks >> 4).long()]), -1).flatten(3)
        numbers = numbers * torch.exp2(scales.float() - 127)[..., None]
        weight.data.copy_(numbers.flatten(2).transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    plain = {name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in stored}
    save_file({**plain, **stored}, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    named = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": named}))
    return model


@torch.inference_mode()
def test_the_published_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As floats, and as the file has it: in bfloat16 the experts stay of few bits, and what they give is near."""
    expected = in_mxfp4(tmp_path, monkeypatch)(torch.tensor([PROMPT])).logits[0]
    found = load_model(tmp_path).logits(Chunk(PROMPT, 0, range(6)))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    ranks = ThreadGroup(2).run(torch.inference_mode()(lambda rank: load_model(tmp_path, parallel=rank).logits(Chunk(PROMPT, 0, range(6)))))
    assert all(torch.equal(each, found) for each in ranks)
    kept, floats = (load_model(tmp_path, quantization=each, dtype=torch.bfloat16) for each in ("codes", "none"))
    for part in ("gate_up", "down"):
        few, many = (getattr(model.params.layers[0].mlp, part).weights[0].linear.buffer.nbytes for model in (kept, floats))
        assert few < 0.65 * many
    found, other = (model.logits(Chunk(PROMPT, 0, range(6))) for model in (kept, floats))
    error, usual = ((each - expected).square().mean(1).sqrt().median() for each in (found, other))
    assert error <= 3 * usual < 0.1 * expected.square().mean().sqrt()
    raw = json.loads((tmp_path / "config.json").read_text()) | {"initial_context_length": 4096, "experts_per_token": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert unread(tmp_path) == ""


def test_a_gguf_file_has_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No float checkpoint is published of these models."""
    case, size = CASES["gpt_oss"], json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    monkeypatch.setitem(CASES, "gpt_oss", case._replace(changes={**case.changes, "vocab_size": size}))
    model, out = in_mxfp4(tmp_path / "model", monkeypatch), tmp_path / "model.gguf"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path / "model")
    lost = {each.name: each.share for each in GgufQuantiser(tmp_path / "model", out, "mxfp4", {}).run()}
    assert lost["blk.0.ffn_gate_exps.weight"] == lost["blk.1.ffn_down_exps.weight"] == 0 < lost["blk.0.attn_q.weight"]
    stored = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(out).tensors}
    experts = model.model.layers[0].mlp.experts
    joined = experts.gate_up_proj.detach().numpy().swapaxes(1, 2)
    assert np.array_equal(stored["blk.0.ffn_up_exps.weight"], joined[:, 1::2])
    assert np.array_equal(stored["blk.0.ffn_down_exps.weight"], experts.down_proj.detach().numpy().swapaxes(1, 2))


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mxfp4(tmp_path, monkeypatch)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = load_config(tmp_path)
    assert config.windows == (40, 0, 40) and config.form.has_sinks and config.rope.truncate is False
    assert shard_count(config) == 4, "no scale's 32 inputs are divided, of 128"
    with pytest.raises(ModelError, match="swiglu_limit 5.0 is not supported; supported is 7.0"):
        parse_config(raw | {"swiglu_limit": 5.0}, {})


@torch.inference_mode()
def test_served_it_answers_the_same_in_any_batch(tmp_path: Path) -> None:
    """Greedy tokens of transformers, with chunks of 7, with hits, and where blocks are short."""
    oracle = save_case(tmp_path / "gpt_oss", "gpt_oss")
    prompts = [PROMPT[:3], PROMPT, [*PROMPT[:64], *PROMPT[:20]], PROMPT]
    expected = []
    for prompt in prompts:
        greedy = oracle.generate(
            given := torch.tensor([prompt]), attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=COUNT, pad_token_id=0
        )
        expected.append(greedy[0, len(prompt) :].tolist())
    greedily = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path / "gpt_oss")
    usual: dict[str, Any] = {"executor": "inproc", "log": "off", "threads": 1, "dtype": "float32", "max_model_len": 256}
    short = {"num_blocks_override": 36, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 7}
    with engines_here(), LLM(tmp_path / "gpt_oss", **usual, **short) as llm:
        for _ in range(2):
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedily, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in found] == expected
