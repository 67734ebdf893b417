"""Ranks that share a model give the logits of one rank alone, also with fewer key-value heads than ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from model_helpers import DEMO_MODEL, Chunk, ThreadGroup, load_model

from vnext.models.sharding import Parallel

BLOCKS = [3, 1, 2, 7]
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"tie_word_embeddings": True}),
    (2, {"attention_bias": True, "mlp_bias": True}),
    (4, {"num_key_value_heads": 1}),
    (4, {"num_key_value_heads": 2, "attention_bias": True}),
]


def run(path: Path, parallel: Parallel | None, tokens: list[int]) -> torch.Tensor:
    """Logits of a prefill and a decode step."""
    model = load_model(path, parallel=parallel)
    first = model.logits(Chunk(tokens[:-1], 0, BLOCKS))
    return torch.cat((first, model.logits(Chunk(tokens[-1:], len(tokens) - 1, BLOCKS))))


def assert_ranks_agree(path: Path, world_size: int, tokens: list[int]) -> None:
    expected = run(path, None, tokens)
    found = ThreadGroup(world_size).run(lambda parallel: run(path, parallel, tokens))
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, found[0])


@pytest.mark.parametrize(("world_size", "changes"), CASES)
def test_ranks_agree_with_one(tmp_path: Path, world_size: int, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **changes)
    assert_ranks_agree(tmp_path, world_size, [index % 61 for index in range(7, 57)])


def test_ranks_agree_on_the_demo_model() -> None:
    if not DEMO_MODEL.is_dir():
        pytest.skip(f"the demo model is not at {DEMO_MODEL}")
    assert_ranks_agree(DEMO_MODEL, 2, [1, *range(300, 340)])
