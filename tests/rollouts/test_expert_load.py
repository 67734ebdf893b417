"""The load of experts that metrics have is that of the routes a plain forward takes, in one call or by parts, on one rank or two."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_here import engines_here
from test_routed_experts import (
    PROMPTS,
    model as model,  # both have the same fixture
    routes,
)

from vnext import LLM, SamplingParams
from vnext.runtime.processes.launch import StartRefused
from vnext.runtime.protocol.stats import ExpertStats

COMMON: dict[str, Any] = {
    "log": "off", "threads": 1, "dtype": "float32", "max_model_len": 256, "digest_interval": 1, "async_scheduling": False,
    "enable_prefix_caching": False, "enable_expert_load": True,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "one call": {"executor": "inproc"},
    "by parts": {"executor": "inproc", "enable_return_routed_experts": True},
    "parts of experts": {"tensor_parallel_size": 2},
    "whole experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


def expected_of(ids: np.ndarray, prompt: int, experts: int, ranks: int) -> list[tuple[int, int, int]]:
    """The sums of each layer over a step of the prompt and one of every token behind it; ids [tokens, layers, experts of a token]."""
    found = np.zeros((ids.shape[1], 3), int)
    for step in (ids[:prompt], *ids[prompt:, None]):
        for layer, own in enumerate(step.transpose(1, 0, 2)):
            counts = np.bincount(own.ravel(), minlength=experts)
            busiest_rank = max(counts[rank * experts // ranks : (rank + 1) * experts // ranks].sum() for rank in range(ranks))
            found[layer] += counts.sum(), counts.max(), busiest_rank
    return [tuple(map(int, each)) for each in found]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_load_is_that_of_a_plain_forward(model: Path, way: dict[str, Any]) -> None:
    here = engines_here() if "executor" in way else pytest.MonkeyPatch.context()
    with here, LLM(str(model), **COMMON, **way) as llm:
        output = llm.generate(PROMPTS[9], SamplingParams(max_tokens=9, temperature=0), use_tqdm=False)[0].outputs[0]
        while (told := llm._client.stats) is None or told.running or told.generated_tokens < 9:
            time.sleep(0.05)
    stats = told.experts
    ranks = 2 if "enable_expert_parallel" in way else 1
    assert isinstance(stats, ExpertStats) and stats.ranks == ranks
    ids, prompt = routes(model, (PROMPTS[9] + output.token_ids)[:-1]), len(PROMPTS[9])
    expected = expected_of(ids, prompt, stats.experts, ranks)
    if "enable_return_routed_experts" not in way:  # the last layer computes what is sampled
        expected[-1] = expected_of(ids[prompt - 1 :, -1:], 1, stats.experts, ranks)[0]
    assert [(each.all, each.busiest, each.busiest_rank) for each in stats.layers] == expected


def test_only_models_with_experts_have_a_load() -> None:
    with engines_here(), pytest.raises(StartRefused, match="--enable-expert-load: this model has no experts"):
        LLM(executor="inproc", enable_expert_load=True)
