"""Dummy weights: every family runs from its config.json alone, with the same numbers however it is split."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engine_here import engines_here
from family_cases import BASE, CASES, VOCAB_SIZE, config_of
from hybrids import CASES as HYBRIDS, hybrid_config

from vnext import LLM, SamplingParams
from vnext.models.config.folder import weight_files
from vnext.models.loading.checkpoint import fingerprint, folder_tensors, open_checkpoint, weights_digest
from vnext.models.loading.overlay import Overrides, overlay
from vnext.models.registry import FAMILIES
from vnext.runtime.processes import launch

MORE = {
    "LlamaForCausalLM": {**BASE, "model_type": "llama"},
    "MiMoForCausalLM": {**BASE, "model_type": "mimo", "num_nextn_predict_layers": 1},
    "DeepseekForCausalLM": {**BASE, "n_routed_experts": 8, "moe_intermediate_size": 40},
    "BailingMoeForCausalLM": {**BASE, "num_experts": 8, "moe_intermediate_size": 40},
    "BailingMoeV2ForCausalLM": {**BASE, "num_experts": 16, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "head_dim": 24},
    "Llama4ForConditionalGeneration": {"text_config": {**BASE, "head_dim": 16, "num_local_experts": 4}, "vision_config": {}},
    "InternLM3ForCausalLM": {**BASE, "model_type": "internlm3", "qkv_bias": True},
    "Mistral3ForConditionalGeneration": {"text_config": {**BASE, "model_type": "mistral"}, "vision_config": {}},
    "LlavaOnevisionForConditionalGeneration": {"text_config": {**BASE, "model_type": "qwen2"}, "vision_config": {}},
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {**BASE, "rope_parameters": {"mrope_section": [BASE["hidden_size"] // BASE["num_attention_heads"] // 2, 0, 0]}},
        "vision_config": {"hidden_size": 64, "depth": 2},
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": {**BASE, "head_dim": 16, "rope_parameters": {"mrope_section": [4, 2, 2]}},
        "vision_config": {"hidden_size": 64, "depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {**BASE, "head_dim": 16, "num_experts": 6, "moe_intermediate_size": 40, "rope_parameters": {"mrope_section": [4, 2, 2]}},
        "vision_config": {"hidden_size": 64, "depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    },
    "CohereCompassForConditionalGeneration": {
        "text_config": {**BASE, "rope_parameters": {"mrope_section": [4, 2, 2]}},
        "vision_config": {"hidden_size": 64, "depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {**BASE, "head_dim": 16, "sliding_window": 40, "model_type": "gemma3_text"}, "vision_config": {},
    },
    "Qwen2_5OmniForConditionalGeneration": {
        "thinker_config": {
            "text_config": {**BASE, "rope_parameters": {"mrope_section": [BASE["hidden_size"] // BASE["num_attention_heads"] // 2, 0, 0]}},
            "vision_config": {"hidden_size": 64, "depth": 2}, "audio_config": {},
        }
    },
    "Qwen2AudioForConditionalGeneration": {"text_config": {**BASE, "model_type": "qwen2"}, "audio_config": {}},
    "Gemma3nForConditionalGeneration": {
        "text_config": {**BASE, "num_hidden_layers": 5, "num_kv_shared_layers": 0, "head_dim": 16, "sliding_window": 40}, "audio_config": {},
    },
    "Gemma4ForConditionalGeneration": {
        "text_config": {**BASE, "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB_SIZE}, "audio_config": {},
    },
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {**BASE, "head_dim": 16, "global_head_dim": 32}, "audio_config": {}},
    **dict.fromkeys(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        {"text_config": {**BASE, "model_type": "llama"}, "vision_config": {"image_size": 32, "patch_size": 8}},
    ),
}  # fmt: skip
"""Configurations of the families that are no cases of their own."""
CHOICE = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 9, 60, 2, 17]}, {"prompt_token_ids": [7]}]


@pytest.fixture(autouse=True)
def overlays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "OVERLAYS", str(tmp_path / "overlays"))
    return tmp_path / "overlays"


def config_alone(folder: Path, architecture: str) -> Path:
    """A folder with a config.json and nothing else."""
    hybrid = next((name for name, (own, *_) in HYBRIDS.items() if own == architecture), "")
    if architecture in MORE:
        raw = MORE[architecture]
    elif hybrid:
        raw = hybrid_config(hybrid).to_dict()
    else:
        raw = config_of(next(case for case in CASES.values() if case.architecture == architecture)).to_dict()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": [architecture], "torch_dtype": "float32"}))
    return folder


def answers(folder: Path, **settings: object) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities of each prompt."""
    with LLM(str(folder), load_format="dummy", log="off", **settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, CHOICE, use_tqdm=False)]
    return [(output.token_ids, [{id_: each.logprob for id_, each in row.items()} for row in output.logprobs]) for output in outputs]


@pytest.mark.parametrize("architecture", sorted(name for name, file in FAMILIES.items() if not file.startswith(("encoders.", "towers.whisper"))))
def test_every_family_generates_from_its_configuration_alone(architecture: str, tmp_path: Path) -> None:
    with engines_here():
        found = answers(config_alone(tmp_path / "model", architecture), executor="inproc")
    assert all(len(tokens) == 6 and all(0 <= token < VOCAB_SIZE for token in tokens) for tokens, _ in found)
    assert all(np.isfinite(list(row.values())).all() for _, rows in found for row in rows)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"])
def test_ranks_and_stages_have_the_same_model(architecture: str, tmp_path: Path) -> None:
    folder = config_alone(tmp_path / "model", architecture)
    with engines_here():
        alone = answers(folder, executor="inproc")
    assert answers(folder, tensor_parallel_size=2) == alone
    assert answers(folder, pipeline_parallel_size=2) == alone


def test_weights_may_be_rounded(tmp_path: Path) -> None:
    folder = config_alone(tmp_path / "model", "LlamaForCausalLM")
    exact, rounded = answers(folder, dtype="bfloat16"), answers(folder, quantization="int8")
    assert exact != rounded and answers(folder, quantization="int8", tensor_parallel_size=2) == rounded


def test_the_numbers_of_the_parts_are_those_of_the_whole(overlays: Path, tmp_path: Path) -> None:
    folder = overlay(config_alone(tmp_path / "model", "GPT2LMHeadModel"), Overrides({}, {}, is_dummy=True), overlays)
    with open_checkpoint(folder) as tensors:
        assert tensors.size_bytes == sum(4 * np.prod(tensors.shape(name)) for name in tensors.names())
        for name in tensors.names():
            shape = tensors.shape(name)
            whole = tensors.part(name, shape, ())
            ranges = tuple(slice(size // 3, size - 1) for size in shape)
            assert whole.shape == shape and whole.dtype == np.float32 and np.isfinite(whole).all()
            assert np.array_equal(tensors.part(name, shape, ranges), whole[ranges]), name
        one, other = (tensors.part(f"transformer.h.{layer}.mlp.c_fc.weight", (64, 256), ()) for layer in (0, 1))
        assert np.abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.03 and abs(one.mean()) < 0.01


def test_a_checkpoints_own_weights_are_not_read(overlays: Path, tmp_path: Path) -> None:
    folder = config_alone(tmp_path / "model", "LlamaForCausalLM")
    before = answers(folder)
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert answers(folder) == before
    shown = overlay(folder, Overrides({}, {}, is_dummy=True), overlays)
    assert weight_files(shown) == [] and "lm_head.weight" in folder_tensors(shown)


def test_digests_are_those_of_the_configuration(overlays: Path, tmp_path: Path) -> None:
    names = ("LlamaForCausalLM", "Qwen2ForCausalLM")
    folders = [overlay(config_alone(tmp_path / name, name), Overrides({}, {}, is_dummy=True), overlays) for name in names]
    assert len({fingerprint(folder) for folder in folders}) == len({weights_digest(folder) for folder in folders}) == 2


def test_a_part_of_the_weights_may_be_replaced(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = config_alone(tmp_path / "model", "LlamaForCausalLM")
    save_file({"lm_head.weight": np.eye(VOCAB_SIZE, 64, dtype=np.float32)}, tmp_path / "head.safetensors")
    with LLM(str(folder), load_format="dummy", log="off") as llm:
        old = llm.generate(PROMPTS, CHOICE, use_tqdm=False)[0].outputs[0].token_ids
        llm.update_weights(str(tmp_path / "head.safetensors"), partial=True)
        new = llm.generate(PROMPTS, CHOICE, use_tqdm=False)[0].outputs[0].token_ids
        llm.update_weights(str(tmp_path / "head.safetensors"), partial=True)
        assert old != new == llm.generate(PROMPTS, CHOICE, use_tqdm=False)[0].outputs[0].token_ids
