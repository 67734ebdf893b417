"""The Llama family gives the logits of transformers on small random checkpoints and on the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import DEMO_MODEL, Chunk, load_model
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

PROMPT = [int(token) for token in torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(1))]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_kv_heads": {"num_key_value_heads": 4},
    "own_head_dim": {"head_dim": 24},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def randomise(model: torch.nn.Module) -> None:
    """Give biases and norms values too, which are constants in a fresh model."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def save_model(path: Path, shard: str = "5GB", **changes: Any) -> torch.nn.Module:
    """A random transformers model, saved into `path`."""
    torch.manual_seed(3)
    plain: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=120,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**plain, **changes})).eval()
    randomise(model)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def expected_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_same_logits(path: Path, model: torch.nn.Module, tokens: list[int]) -> None:
    blocks = [7, 3, 60, 1, 9, 30, 31, 2, 40, 41, 6]
    found = load_model(path).logits(Chunk(tokens, 0, blocks))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected_logits(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = save_model(tmp_path, **CASES[case])
    assert expected_logits(model, PROMPT).std() > 0.3, "a model that says nothing would prove nothing"
    assert_same_logits(tmp_path, model, PROMPT)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = save_model(tmp_path, shard="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(tmp_path, model, PROMPT)


def test_mistral_without_sliding_window(tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        initializer_range=0.15,
    )
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    assert_same_logits(tmp_path, model, PROMPT)


def test_demo_model() -> None:
    if not DEMO_MODEL.is_dir():
        pytest.skip(f"the demo model is not at {DEMO_MODEL}")
    model = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokens = [1] + [token + 3 for token in PROMPT]
    assert_same_logits(DEMO_MODEL, model, tokens)
