"""Checkpoints whose tensors are named or joined otherwise: each rank gets its own parts, whatever the names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_cases import CASES, save_case
from model_helpers import Chunk, Model, load_model, make_batch, tiny_config
from safetensors.torch import load_file, save_file

from vnext.kernels.calls import Router
from vnext.models.config.model_config import Experts, load_config
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel, check_world_size
from vnext.models.loading.weights import load_params

CHUNK = Chunk(list(range(5, 60)), 0, [9, 2, 30, 4])


def rank(index: int, ranks: int) -> Parallel:
    return Parallel(rank=index, world_size=ranks, all_reduce=lambda part: part, all_gather=lambda part, dim: part)


def rename(path: Path, old: str, new: str) -> None:
    file = path / "model.safetensors"
    tensors = {name.replace(old, new, 1): tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors, file)


def test_gpt2_without_its_prefix(tmp_path: Path) -> None:
    save_case(tmp_path, "gpt2")
    expected = load_model(tmp_path).logits(CHUNK)
    rename(tmp_path, "transformer.", "")
    assert torch.equal(load_model(tmp_path).logits(CHUNK), expected)


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(
    ("case", "whole"), [("gemma3", "Gemma3ForConditionalGeneration"), ("ministral3", "Mistral3ForConditionalGeneration"), ("llama4", "Llama4ForConditionalGeneration")]
)
def test_a_language_part_beside_a_vision_tower(tmp_path: Path, root: str, case: str, whole: str) -> None:
    save_case(tmp_path, case)
    expected = load_model(tmp_path).logits(CHUNK)
    rename(tmp_path, "model.", root)
    text = json.loads((tmp_path / "config.json").read_text())
    raw = {"architectures": [whole], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert torch.equal(load_model(tmp_path).logits(CHUNK), expected)


def test_internlm3_is_qwen2_with_other_keys(tmp_path: Path) -> None:
    """Its authors' code is not in transformers: `qkv_bias` is of queries, keys and values, `bias` of all else."""
    save_case(tmp_path, "qwen2")
    expected = load_model(tmp_path).logits(CHUNK)
    raw = json.loads((tmp_path / "config.json").read_text())
    own = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": False}
    (tmp_path / "config.json").write_text(json.dumps(raw | own))
    assert torch.equal(load_model(tmp_path).logits(CHUNK), expected)


def test_a_rank_takes_its_rows_of_each_joined_part(tmp_path: Path, plain_weights: None) -> None:
    save_case(tmp_path, "phi3")
    tensors = load_file(tmp_path / "model.safetensors")
    params = load_params(tmp_path, load_config(tmp_path), rank(1, 2), torch.float32, "cpu")
    query, key, value = tensors["model.layers.1.self_attn.qkv_proj.weight"].split((64, 32, 32))
    assert torch.equal(params.layers[1].attention.qkv.weight, torch.cat((query[32:], key[16:], value[16:])))
    gate, up = tensors["model.layers.1.mlp.gate_up_proj.weight"].chunk(2)
    assert torch.equal(params.layers[1].mlp.gate_up.weight, torch.cat((gate[60:], up[60:])))


def test_a_rank_takes_its_columns_of_flipped_weights(tmp_path: Path, plain_weights: None) -> None:
    save_case(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    params = load_params(tmp_path, load_config(tmp_path), rank(1, 2), torch.float32, "cpu")
    name = "transformer.h.2.attn.c_attn."
    parts = [tensors[name + "weight"].t().split(64), tensors[name + "bias"].split(64)]
    for found, (query, key, value) in zip(params.layers[2].attention.qkv, parts, strict=True):
        assert torch.equal(found, torch.cat((query[32:], key[32:], value[32:])))
    narrow = tensors["transformer.h.2.mlp.c_proj.weight"]
    assert torch.equal(torch.cat(params.layers[2].mlp.down.weight.pieces, 1), narrow.t()[:, 128:])


def test_a_rank_takes_a_part_of_each_expert(tmp_path: Path, plain_weights: None) -> None:
    save_case(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    params = load_params(tmp_path, load_config(tmp_path), rank(1, 2), torch.float32, "cpu")
    mlp = params.layers[2].mlp
    assert mlp.gate_up.shape == (9, 40, 64) and mlp.down.shape == (9, 64, 20) and mlp.router.shape == (9, 64)
    for expert in range(9):
        here = f"model.layers.2.mlp.experts.{expert}."
        gate, up, down = (tensors[f"{here}{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(mlp.gate_up[expert], torch.cat((gate[20:], up[20:])))
        assert torch.equal(torch.cat(mlp.down[expert].pieces, 1), down[:, 20:])


def test_experts_that_do_not_split_are_refused() -> None:
    experts = Experts(count=4, intermediate_size=6, router=Router(2, True))
    check_world_size(tiny_config(experts=experts), 2)
    with pytest.raises(ModelError, match=r"of 52 \(experts: 6\) do not split over 4 ranks; choose .* 1, 2$"):
        check_world_size(tiny_config(experts=experts), 4)


def set_tied(path: Path, tied: bool) -> None:
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))


FAMILIES = ("smollm3", "mistral", "mixtral", "qwen2_tied_yarn", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "olmo2")


@pytest.mark.parametrize("case", FAMILIES)
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_counts(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    save_case(tmp_path, case)
    caplog.clear()
    set_tied(tmp_path, True)
    file = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if name != "lm_head.weight"}
    embedding = next(each for name, each in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    save_file(tensors, file)
    tied = load_model(tmp_path).logits(CHUNK)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    assert torch.equal(load_model(tmp_path).logits(CHUNK), tied) and not caplog.messages
    save_file(tensors | {"lm_head.weight": embedding.flip(0)}, file)
    found = load_model(tmp_path).logits(CHUNK)
    (message,) = caplog.messages
    assert message.startswith("config.json ties lm_head.weight to ") and "has another one: the file's is used" in message
    set_tied(tmp_path, False)
    assert torch.equal(load_model(tmp_path).logits(CHUNK), found) and not torch.equal(found, tied)


@pytest.mark.parametrize("case", ["qwen2_tied_yarn", "gemma3", "gpt2"])
def test_only_the_head_of_a_tied_pair(tmp_path: Path, case: str) -> None:
    save_case(tmp_path, case)
    expected = load_model(tmp_path).logits(CHUNK)
    file = tmp_path / "model.safetensors"
    renamed = {"model.embed_tokens.weight": "lm_head.weight", "transformer.wte.weight": "lm_head.weight"}
    save_file({renamed.get(name, name): each for name, each in load_file(file).items()}, file)
    assert torch.equal(load_model(tmp_path).logits(CHUNK), expected)


def test_the_head_of_an_older_wrapper(tmp_path: Path) -> None:
    save_case(tmp_path, "gemma3")
    rename(tmp_path, "model.", "language_model.model.")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["language_model.model.embed_tokens.weight"].flip(0)
    tied = load_model(tmp_path).logits(CHUNK)
    save_file(tensors | {"language_model.lm_head.weight": head}, file)
    assert not torch.equal(load_model(tmp_path).logits(CHUNK), tied)


BODIES = {case: f"{CASES[case].architecture.removesuffix('ForCausalLM')}Model" for case in FAMILIES if case not in ("gemma3", "gpt2")}


@pytest.mark.parametrize("case", [*BODIES, "gemma3", "gpt2"])
def test_a_model_that_was_saved_without_its_head(tmp_path: Path, case: str) -> None:
    """As AutoModel saves it, and as Qwen3-Embedding is published: the hidden states are those of the whole model."""
    whole = save_case(tmp_path / "whole", case)
    body = getattr(whole, whole.base_model_prefix)
    body.save_pretrained(tmp_path / "body")
    raw = json.loads((tmp_path / "body/config.json").read_text())
    assert raw["architectures"] == [BODIES.get(case) or type(body).__name__]
    assert "model.norm.weight" not in load_file(tmp_path / "body/model.safetensors")
    ours, theirs = load_model(tmp_path / "body"), load_model(tmp_path / "whole")
    for one, other in zip(states_of(ours), states_of(theirs), strict=True):
        assert torch.equal(one, other)
    raw["architectures"] = [CASES[case].architecture]
    (tmp_path / "body/config.json").write_text(json.dumps(raw))
    assert torch.equal(states_of(load_model(tmp_path / "body"))[0], states_of(ours)[0])


def states_of(model: Model) -> list[torch.Tensor]:
    batch = make_batch([CHUNK], 16, len(kv_groups(model.config).windows))
    return [model.family.forward(model.params, model.kv, batch, model.config, model.parallel)[0]]
