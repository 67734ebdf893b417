"""Ranks that have whole experts each give the bits of one rank alone, however many they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import save_case
from model_helpers import ThreadGroup, tiny_config
from msgspec.structs import replace

from vnext.kernels.calls import Router
from vnext.models.config.layer_kinds import Hosted
from vnext.models.config.model_config import Experts
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel, alone, with_whole_experts
from vnext.models.layers.whole_step import WholeStep, whole_step

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))  # cpu_levels is shared with the kernels' tests
sys.path.append(str(Path(__file__).resolve().parents[1]))
from cpu_levels import needs_native
from test_rank_bits import logits_of
from test_whole_step import STEPS, load, make_batch, sampling_of

CASES: list[tuple[str, torch.dtype, str, int]] = [
    ("mixtral", torch.float32, "none", 4),  # five experts: some ranks have two
    ("glm4_moe", torch.bfloat16, "none", 2),
    ("mixtral", torch.bfloat16, "int8", 2),
    ("mixtral", torch.bfloat16, "int4", 2),
    ("gpt_oss", torch.float32, "none", 2),
    ("longcat", torch.float32, "none", 2),
    ("mimo_v2", torch.bfloat16, "none", 4),
    ("gpt_oss", torch.bfloat16, "none", 2),
]


def divided(parallel: Parallel) -> Parallel:
    return replace(parallel, by_expert=True)


@pytest.mark.parametrize(("name", "dtype", "quantization", "ranks"), CASES)
def test_no_logit_differs(tmp_path: Path, name: str, dtype: torch.dtype, quantization: str, ranks: int) -> None:
    save_case(tmp_path, name)
    given: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    expected = logits_of(tmp_path, None, **given)
    found = ThreadGroup(ranks).run(lambda parallel: logits_of(tmp_path, divided(parallel), **given))
    assert all(torch.equal(each, expected) for each in found) and expected.abs().max() > 0.1


@needs_native
@pytest.mark.parametrize(("name", "count"), [("glm4_moe", 4), ("gpt_oss", 3)])
def test_one_call_is_layer_by_layer(tmp_path: Path, name: str, count: int) -> None:
    save_case(tmp_path, name)

    def work(parallel: Parallel) -> list[int]:
        parallel = divided(parallel)
        chosen, params, kv, plain_kv, config = load(tmp_path, torch.bfloat16, "none", parallel)
        whole, found = whole_step(params, kv, config, parallel), []
        assert isinstance(whole, WholeStep) and params.layers[1].mlp.gate_up.shape[0] == count
        for chunks in STEPS:
            batch = make_batch(chunks, 16, len(kv_groups(config).windows))
            chosen.forward(params, plain_kv, batch, config, parallel)
            found += whole.run(batch, sampling_of(batch.positions)).tolist()
            assert all(torch.equal(*pair) for ours, theirs in zip(kv, plain_kv) for pair in zip(ours, theirs))
        return found

    ranks = ThreadGroup(2).run(work)
    assert ranks[0] == ranks[1] and len(set(ranks[0])) > 9


def test_what_cannot_be_divided_is_refused() -> None:
    few = tiny_config(experts=Experts(count=2, intermediate_size=8, router=Router(1, True)))
    assert with_whole_experts(few, replace(alone(), world_size=2)).by_expert
    for config, words in (
        (few, "cannot divide 2 experts among 4 ranks: choose a smaller --tensor-parallel-size"),
        (tiny_config(), "divides experts, and this is a model without experts: leave it out"),
        (tiny_config(hosted=Hosted(settings="", whole="")), "this is a model that transformers computes: leave it out"),
    ):
        with pytest.raises(ModelError, match=words):
            with_whole_experts(config, replace(alone(), world_size=4))
