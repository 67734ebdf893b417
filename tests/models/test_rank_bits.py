"""Any number of ranks that share a model gives the logits of one rank alone, bit for bit, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from model_helpers import DEMO_MODEL, Chunk, ThreadGroup, load_model, tiny_config
from msgspec.structs import replace

from vnext.models.layers.sharding import Parallel, alone, local_shards, shard_count, sums_alike

BLOCKS = list(range(40))
TOKENS = [(7 * index + 3) % 61 for index in range(150)]
CUT = 66
FAMILIES = (
    "smollm3", "mistral", "mixtral", "qwen2_tied_yarn", "qwen3_bias_yarn", "qwen3_moe", "gemma2", "gemma3", "gemma3n",
    "gemma4", "gemma4_shared", "phi3", "gpt2", "olmo2", "olmo2_one_key", "exaone4", "ministral3", "granite", "cohere2", "cohere_compass",
    "glm4", "hunyuan", "apertus", "starcoder2", "gpt_neox", "qwen2_moe", "olmoe", "glm4_moe", "minimax_m2", "ernie_moe",
    "hunyuan_moe", "flex_olmo", "gpt_oss", "mimo_v2", "laguna", "minicpm3", "deepseek_v2",
    "deepseek_v3", "longcat", "hy_v4", "muse_glimmer",
)  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"tie_word_embeddings": True}),
    (2, {"attention_bias": True, "mlp_bias": True}),
    (4, {"num_key_value_heads": 1}),
    (4, {"num_key_value_heads": 2, "attention_bias": True}),
]


def logits_of(path: Path, parallel: Parallel | None, **given: Any) -> torch.Tensor:
    """Logits of two chunks of a prompt and of a decode behind it."""
    model = load_model(path, parallel=parallel, page_count=64, **given)
    cuts = [(0, CUT), (CUT, len(TOKENS) - 1), (len(TOKENS) - 1, len(TOKENS))]
    return torch.cat([model.logits(Chunk(TOKENS[first:end], first, BLOCKS)) for first, end in cuts])


def differing(path: Path, ranks: int, **given: Any) -> int:
    """How many logits differ from those of one rank; every rank has the same ones."""
    expected = logits_of(path, None, **given)
    found = ThreadGroup(ranks).run(lambda parallel: logits_of(path, parallel, **given))
    assert all(torch.equal(each, found[0]) for each in found) and expected.abs().max() > 0.1
    return int((found[0] != expected).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_logit_differs(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    cases = pytest.importorskip("family_cases", reason="transformers makes the models: pip install transformers")
    cases.save_case(tmp_path, name)
    for ranks in (2, 4):
        assert differing(tmp_path, ranks, dtype=dtype) == 0, f"{ranks} ranks"


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_no_logit_of_int8_weights_differs(tmp_path: Path, name: str) -> None:
    cases = pytest.importorskip("family_cases", reason="transformers makes the models: pip install transformers")
    cases.save_case(tmp_path, name)
    assert differing(tmp_path, 2, dtype=torch.bfloat16, quantization="int8") == 0


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 56, "attention_bias": True}, (2, 4, 8)),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 96}, (3,)),
    ],
)
def test_no_logit_differs_for_many_ranks(tmp_path: Path, changes: dict[str, Any], ranks: tuple[int, ...]) -> None:
    save_checkpoint(tmp_path, **changes)
    for dtype in DTYPES:
        assert [differing(tmp_path, count, dtype=dtype) for count in ranks] == [0] * len(ranks)


def test_another_number_of_ranks_has_an_order_of_its_own(tmp_path: Path) -> None:
    """Twelve heads in four shards: three ranks have no whole shards, and say so."""
    save_checkpoint(tmp_path, num_attention_heads=12, num_key_value_heads=12, head_dim=8, intermediate_size=96)
    assert differing(tmp_path, 4) == 0 < differing(tmp_path, 3)


def test_the_model_says_how_many_shards_there_are() -> None:
    sizes = {(32, 8, 11008): 8, (8, 4, 640): 8, (12, 2, 8960): 4, (9, 3, 1536): 3, (14, 2, 4864): 2, (15, 5, 2560): 5, (7, 7, 10): 1}
    for (heads, kv_heads, wide), expected in sizes.items():
        config = tiny_config(head_count=heads, kv_head_count=kv_heads, intermediate_size=wide)
        assert shard_count(config) == expected
        for ranks in range(1, 9):
            of = replace(alone(), world_size=ranks)
            assert local_shards(config, of) == (expected // ranks if sums_alike(config, ranks) else 1)
            assert local_shards(config, replace(of, is_exact=False)) == 1


@pytest.mark.parametrize(("world_size", "changes"), CASES)
def test_no_logit_of_llama_differs(tmp_path: Path, world_size: int, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **changes)
    assert differing(tmp_path, world_size) == 0


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


def test_no_logit_of_stories_differs() -> None:
    if not DEMO_MODEL.is_dir():
        pytest.skip(f"the demo model is not at {DEMO_MODEL}")
    assert differing(DEMO_MODEL, 2) == 0
