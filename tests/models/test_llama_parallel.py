"""Ranks that share a model give the logits of one rank alone, also with fewer key-value heads than ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from model_helpers import DEMO_MODEL, Chunk, ThreadGroup, load_model
from msgspec.structs import replace

from vnext.models.layers.sharding import Parallel

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


def test_sums_beside_the_work_give_the_same_logits(tmp_path: Path) -> None:
    """By a group that is late: a sum is not there before it is ended. Of 150 tokens the first 128 are summed apart."""
    save_checkpoint(tmp_path)
    group, tokens, begun = ThreadGroup(2), [index % 61 for index in range(150)], []

    def late(parallel: Parallel) -> Parallel:
        def begin(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            begun.append(tensor.shape[0])
            total = torch.full_like(tensor, float("nan"))
            kept = tensor.clone()
            tensor.fill_(float("nan"))  # nobody may look at a part again
            return lambda: total.copy_(parallel.all_reduce(kept))

        return replace(parallel, begin_all_reduce=begin)

    def logits(parallel: Parallel) -> torch.Tensor:
        model = load_model(tmp_path, parallel=parallel, page_count=64)
        return model.logits(Chunk(tokens, 0, list(range(40))))

    expected = group.run(logits)
    assert not begun
    for found in group.run(lambda parallel: logits(late(parallel))):
        assert torch.equal(found, expected[0])
    assert set(begun) == {128, 22}


def test_ranks_agree_on_the_demo_model() -> None:
    if not DEMO_MODEL.is_dir():
        pytest.skip(f"the demo model is not at {DEMO_MODEL}")
    assert_ranks_agree(DEMO_MODEL, 2, [1, *range(300, 340)])
