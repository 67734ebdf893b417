"""A GGUF file gives the logits of the checkpoint that it was made from, bit for bit, and any part of its tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from family_cases import CASES, LATENT, MSCALE, MULTIPLIERS, VOCAB_SIZE, Case, save_case
from gguf_writing import convert
from model_helpers import Chunk, load_model

from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.gguf_tensors import file_names, gguf_tensors, name_map
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.unread import unread

PROMPT = [int(token) for token in np.random.default_rng(5).integers(VOCAB_SIZE, size=60)]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 17}
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
WARM = {**MSCALE, "mscale": 0.9}
FORMS = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", {}),
    "llama_tied_bias": Case("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama31": Case("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": LLAMA31}),
    "mixtral": CASES["mixtral"],
    "qwen2": CASES["qwen2"],
    "qwen3": CASES["qwen3"],
    "qwen3_moe": CASES["qwen3_moe"],
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": Case("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "olmo2": CASES["olmo2"],
    "smollm3": Case("SmolLM3ForCausalLM", "SmolLM3Config", {}),
    "granite": Case("GraniteForCausalLM", "GraniteConfig", {**MULTIPLIERS, "attention_bias": False}),
    **{name: CASES[name] for name in ("glm4", "cohere", "starcoder2", "stablelm", "stablelm_parallel")},
    "cohere2": Case("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": 40}),
    "exaone4": Case("Exaone4ForCausalLM", "Exaone4Config", {"sliding_window": 40, "head_dim": 24, "num_hidden_layers": 5}),
    "seed_oss": CASES["seed_oss"],
    "gpt_oss": CASES["gpt_oss"],
    "arcee": Case("ArceeForCausalLM", "ArceeConfig", {}),
    "deepseek_v2": CASES["deepseek_v2"],
    "deepseek_v3": CASES["deepseek_v3"]._replace(changes={**CASES["deepseek_v3"].changes, "attention_bias": False, "rope_parameters": WARM}),
    "youtu": Case("YoutuForCausalLM", "YoutuConfig", LATENT),
}


@pytest.fixture(params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint's folder, and that of the GGUF file made from it."""
    monkeypatch.setitem(CASES, request.param, FORMS[request.param])
    save_case(tmp_path / "checkpoint", request.param)
    return tmp_path / "checkpoint", gguf_folder(convert(tmp_path / "checkpoint", tmp_path / "model.gguf"), tmp_path / "folders")


@torch.inference_mode()
def test_logits_are_those_of_the_checkpoint(pair: tuple[Path, Path]) -> None:
    first, second = (load_model(path).logits(Chunk(PROMPT, 0, range(4))) for path in pair)
    assert torch.equal(first, second)
    assert unread(pair[1]) == ""


def test_parts_of_tensors_are_those_of_the_checkpoint(pair: tuple[Path, Path]) -> None:
    """What ranks read: some rows, some columns."""
    with open_checkpoint(pair[0]) as plain, open_checkpoint(pair[1]) as written:
        alike = [name for name in plain.names() if name in written.names()]
        others = [name for name in plain.names() if name not in alike]
        assert all("kv_b_proj" in name for name in others) and len(written.names()) == len(alike) + 2 * len(others)
        for name in alike:
            shape = plain.shape(name)
            assert shape is not None and written.shape(name) == shape
            ranges = tuple(slice(size // 4, size // 4 + size // 2) for size in shape)
            one = np.float32(name.endswith("norm.weight"))  # Gemma multiplies by 1 + weight, and the file has the rounded sum
            assert np.array_equal(written.part(name, shape, ranges) + one, plain.part(name, shape, ranges) + one), name


def test_experts_are_counted(tmp_path: Path) -> None:
    """One more than there are would be the numbers of the tensor behind."""
    save_case(tmp_path / "checkpoint", "mixtral")
    file = convert(tmp_path / "checkpoint", tmp_path / "m.gguf")
    key = b"llama.expert_count" + struct.pack("<I", 4)
    data = file.read_bytes()
    file.write_bytes(data.replace(key + struct.pack("<I", 5), key + struct.pack("<I", 6)))
    with pytest.raises(ModelError, match=r"has the shape \[5, .* of other experts"):
        gguf_tensors(gguf_folder(file, tmp_path / "folders"))


def test_names_of_all_layers_follow_from_those_of_the_first() -> None:
    before = name_map("llama", 1).mapping
    for architecture in gguf.MODEL_ARCH_NAMES.values():
        names = file_names(architecture, SimpleNamespace(layer_count=12))
        whole = name_map(architecture, 12).mapping.items()
        known = {key: name for key, (_, name) in whole if architecture not in ("clip", "wavtokenizer-dec")}  # no text models
        assert {key: names.of(f"{key}.bias") for key in known} == {key: f"{name}.bias" for key, name in known.items()}
        assert names.of("model.layers.12.self_attn.q_proj.weight") == ""
    assert name_map("llama", 1).mapping == before, "no architecture leaves its names to the next"
