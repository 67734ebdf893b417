"""A GGUF file gives the logits of the checkpoint that it was made from, bit for bit, and any part of its tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import gguf_writing
import numpy as np
import pytest
import torch
from family_cases import CASES, GROUPED, HALF, LATENT, MSCALE, MULTIPLIERS, VOCAB_SIZE, YARN, Case, save_case
from gguf_writing import BYTE_LEVEL, convert
from hybrids import CASES as HYBRIDS, Row, load_hybrid, save_hybrid
from model_helpers import Chunk, load_model

from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.gguf.header import name_map
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.gguf_tensors import Names, gguf_tensors
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
    **{name: CASES[name] for name in ("mistral", "ministral3")},
    "qwen2": CASES["qwen2"],
    "qwen3": CASES["qwen3"],
    "qwen3_moe": CASES["qwen3_moe"],
    "gemma": CASES["gemma"],
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
    **{
        name: CASES[name]
        for name in ("hunyuan", "hunyuan_moe", "olmoe", "glm4_moe", "minimax_m2", "ernie_moe", "granite_moe", "granite_moe_shared")
    },
    "ernie": Case("Ernie4_5ForCausalLM", "Ernie4_5Config", {"head_dim": 24}),
    "qwen2_moe": Case(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {"num_experts": 5, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "num_experts_per_tok": 2},
    ),
    **{name: CASES[name] for name in ("phi3", "phi3_longrope")},
    "nemotron": Case("NemotronForCausalLM", "NemotronConfig", {"rope_parameters": HALF}),
    "olmo3": Case(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            "num_hidden_layers": 5, "sliding_window": 40,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]}},
        },
    ),
    "afmoe": CASES["afmoe"]._replace(changes={**CASES["afmoe"].changes, "num_hidden_layers": 5, "global_attn_every_n_layers": 4}),
    "exaone_moe": CASES["exaone_moe"]._replace(
        changes={**CASES["exaone_moe"].changes, "num_hidden_layers": 5, "sliding_window_pattern": 4}
    ),
    "dots1": CASES["dots1"]._replace(changes=GROUPED),
    **{name: CASES[name] for name in ("apertus", "gemma3n", "gemma4_shared")},
    "gemma4": CASES["gemma4"],
    "gemma4_dense": CASES["gemma4"]._replace(changes={**CASES["gemma4"].changes, "enable_moe_block": False, "num_experts": None}),
}
MIXED = ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "granite_h", "granite_h_moe", "falcon_h1_norm", "nemotron_h", "bamba",
         "nemotron_h_moe", "nemotron_h_narrow")  # fmt: skip
SPLIT = {"kv_b_proj": 2, "in_proj_qkvz": 2, "shared_mlp.input_linear": 2, "shared_mlp.output_linear": 1,
         "act_fn.beta": 0, "act_fn.eps": 0, "gate_proj": 1, "up_proj": 0}  # fmt: skip
"""Tensors in whose place a file has others, and how many; numbers of an activation are the same in all models, and the last two may
be one."""
POWERS = {
    "mlp_multipliers": [0.5, 2.0], "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5], "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.5, "key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5,
}  # fmt: skip


class Pair(NamedTuple):
    """A checkpoint's folder, and that of the GGUF file made from it."""

    plain: Path
    written: Path


@pytest.fixture(params=[*FORMS, *MIXED])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    if request.param in FORMS:
        monkeypatch.setitem(CASES, request.param, FORMS[request.param])
    if request.param in ("nemotron_h_moe", "nemotron_h_narrow"):  # such files have no MLPs alone, or groups of which some are kept
        name, config, changes = HYBRIDS[request.param]
        kinds = [kind.replace("mlp", "moe") for kind in changes["layers_block_type"]]
        monkeypatch.setitem(HYBRIDS, request.param, (name, config, {**changes, "layers_block_type": kinds}))
    if request.param == "qwen3_next":  # no such file has layers without experts, or shares that sum to less than one
        name, config, changes = HYBRIDS["qwen3_next"]
        monkeypatch.setitem(HYBRIDS, "qwen3_next", (name, config, {**changes, "mlp_only_layers": [], "norm_topk_prob": True}))
    (save_case if request.param in FORMS else save_hybrid)(tmp_path / "checkpoint", request.param)
    return converted(tmp_path)


def converted(path: Path) -> Pair:
    return Pair(path / "checkpoint", gguf_folder(convert(path / "checkpoint", path / "model.gguf"), path / "folders"))


def logits_of(path: Path) -> torch.Tensor:
    if load_config(path).recurrent is None:
        return load_model(path).logits(Chunk(PROMPT, 0, range(4)))
    return load_hybrid(path).logits(Row(Chunk(PROMPT, 0, range(4)), 3))


@torch.inference_mode()
def test_logits_are_those_of_the_checkpoint(pair: Pair) -> None:
    """Bit for bit, but where a file has what decays are and not their logarithms."""
    first, second = map(logits_of, pair)
    recurrent = load_config(pair.plain).recurrent
    if recurrent is None or not recurrent.key_dim:
        assert torch.equal(first, second)
    else:
        assert (first - second).abs().max() <= 1e-5 * first.abs().max()
    assert unread(pair.written) == ""


@torch.inference_mode()
def test_multipliers_are_in_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two, by which each sum stays as it is rounded."""
    name, config, changes = HYBRIDS["falcon_h1"]
    monkeypatch.setitem(HYBRIDS, "falcon_h1", (name, config, {**changes, **POWERS}))
    save_hybrid(tmp_path / "checkpoint", "falcon_h1")
    first, second = map(logits_of, converted(tmp_path))
    assert (first - second).abs().max() <= 1e-5 * first.abs().max()


def test_parts_of_tensors_are_those_of_the_checkpoint(pair: Pair) -> None:
    """What ranks read: some rows, some columns."""
    with open_checkpoint(pair.plain) as plain, open_checkpoint(pair.written) as written:
        alike = [name for name in plain.names() if name in written.names()]
        others = [next(part for part in SPLIT if part in name) for name in plain.names() if name not in alike]
        assert len(written.names()) == len(alike) + sum(SPLIT[part] for part in others)
        for name in alike:
            shape = plain.shape(name)
            assert shape is not None and written.shape(name) == shape
            ranges = tuple(slice(size // 4, size // 4 + -(-size // 2)) for size in shape)
            one = np.float32(name.endswith("norm.weight"))  # Gemma multiplies by 1 + weight, and the file has the rounded sum
            found, wanted = written.part(name, shape, ranges) + one, plain.part(name, shape, ranges) + one
            assert np.allclose(found, wanted, rtol=0, atol=1e-6) if name.endswith("A_log") else np.array_equal(found, wanted), name


@torch.inference_mode()
def test_experts_may_have_gate_and_up_in_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the converter makes files of any architecture that its loader lets have them."""
    save_hybrid(tmp_path / "checkpoint", "qwen3_5_moe")
    apart = logits_of(converted(tmp_path).written)
    monkeypatch.setattr(gguf_writing, "FUSED", {"qwen35moe"})
    joined = gguf_folder(convert(tmp_path / "checkpoint", tmp_path / "joined.gguf"), tmp_path / "folders")
    assert "blk.0.ffn_gate_up_exps.weight" in {tensor.own_name for tensor in gguf_tensors(joined).values()}
    assert torch.equal(apart, logits_of(joined))


def test_experts_are_counted(tmp_path: Path) -> None:
    """One more than there are would be the numbers of the tensor behind."""
    save_case(tmp_path / "checkpoint", "mixtral")
    file = convert(tmp_path / "checkpoint", tmp_path / "m.gguf")
    key = b"llama.expert_count" + struct.pack("<I", 4)
    data = file.read_bytes()
    file.write_bytes(data.replace(key + struct.pack("<I", 5), key + struct.pack("<I", 6)))
    with pytest.raises(ModelError, match=r"has the shape \[5, .* of other experts"):
        gguf_tensors(gguf_folder(file, tmp_path / "folders"))


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("gemma3n", {"gemma3n.attention.sliding_window_pattern": [True] * 4}, "has 4 numbers for 5 layers"),
        ("gemma3n", {"gemma3n.embedding_length_per_layer_input": 0, "gemma3n.altup.num_inputs": "4"}, "altup.num_inputs is '4'"),
        ("gemma4_shared", {"gemma4.expert_count": 4}, "gemma4.expert_used_count is None"),
        ("apertus", {"xielu.beta": [0.5, 0.5, 0.4]}, "xielu.beta is not 0.5"),
    ],
)
def test_members_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, object], sentence: str
) -> None:
    monkeypatch.setitem(CASES, name, FORMS[name])
    save_case(tmp_path / "checkpoint", name)
    file = convert(tmp_path / "checkpoint", tmp_path / "m.gguf", BYTE_LEVEL | changes)
    with pytest.raises(ModelError, match=sentence):
        gguf_tensors(gguf_folder(file, tmp_path / "folders"))


def test_rows_that_turn_are_pairs_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_writing, "neighbours", lambda array, heads: array[:-1])
    monkeypatch.setitem(CASES, "llama", FORMS["llama"])
    save_case(tmp_path / "checkpoint", "llama")
    with pytest.raises(ModelError, match=r"attn_k has \d+ rows, which are no pairs of 2 heads"):
        gguf_tensors(converted(tmp_path).written)


def test_names_of_all_layers_follow_from_those_of_the_first() -> None:
    before = name_map("llama", 1).mapping
    for architecture in gguf.MODEL_ARCH_NAMES.values():
        first = {key: name for key, (_, name) in name_map(architecture, 1).mapping.items()}
        names = Names(architecture, first, layer_count=12)
        whole = name_map(architecture, 12).mapping.items()
        known = {key: name for key, (_, name) in whole if architecture not in ("clip", "wavtokenizer-dec")}  # no text models
        assert {key: names.of(f"{key}.bias") for key in known} == {key: f"{name}.bias" for key, name in known.items()}
        assert names.of("model.layers.12.self_attn.q_proj.weight") == ""
    assert name_map("llama", 1).mapping == before, "no architecture leaves its names to the next"
