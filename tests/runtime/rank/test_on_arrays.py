"""A rank that computes on arrays gives every token and every bit of log-probabilities, scores and embeddings of one that uses torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from msgspec.structs import replace
from rank_drive import bound_arrivals, drive, host_rank, picky_arrivals, repetitive_arrivals, runner_of, started_with

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))
from cpu_levels import needs_native

from vnext.models.layers import whole_step
from vnext.runtime.protocol.messages import PromptResult
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import ModelRunner
from vnext.state.config import Speculation
from vnext.state.events import RequestArrived

pytestmark = needs_native
WISHES = ({"prompt_logprobs": 2}, {}, {"pooling": 1}, {"prompt_logprobs": 0, "pooling": 2}, {}, {"pooling": 3})
GRAMMARS = (LLMatcher.grammar_from_regex("(yes|no|perhaps)( indeed){2,9}"),)


def kinds_of(seed: int) -> dict[str, tuple[list[RequestArrived], dict[str, Any]]]:
    """Arrivals and settings of an engine: everything at once, prompts in pieces, drafts."""
    drafted = {"speculation": Speculation(method="ngram", num_speculative_tokens=4)}
    picky = picky_arrivals(14, seed)
    wishes = [replace(each, sampling=replace(each.sampling, **WISHES[at % 6])) for at, each in enumerate(picky)]
    return {
        "all parameters": (picky, {}),
        "lists and budgets, preempted": (bound_arrivals(14, seed), {"page_count": 24, "pipeline_depth": 3}),
        "prompts": (wishes, {"max_num_batched_tokens": 9}),
        "drafts": (repetitive_arrivals(10, seed, GRAMMARS), drafted),
    }


def answered(runner: ModelRunner, arrivals: list[RequestArrived], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tokens and log-probabilities of answers, and the results of prompts."""
    prompts: list[PromptResult] = []
    collect = Rank.collect

    def collected(self: Rank) -> list[Any]:
        completed = collect(self)
        for result in completed:
            prompts.extend(result.prompts)
        return completed

    with monkeypatch.context() as patch:
        patch.setattr(Rank, "collect", collected)
        return drive(host_rank(runner), started_with(runner, **changes), arrivals), prompts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*kinds_of(0)])
def test_answers_are_those_of_torch(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, by_torch = runner_of(dtype=dtype), runner_of(dtype=dtype)
    monkeypatch.setattr(by_torch, "run", by_torch.run_by_parts)
    monkeypatch.setattr(runner, "run_by_parts", None)
    for seed in (1, 2):
        arrivals, changes = kinds_of(seed)[kind]
        assert answered(runner, arrivals, changes, monkeypatch) == answered(by_torch, arrivals, changes, monkeypatch)


def test_logits_that_no_memory_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of()
    arrivals = picky_arrivals(6, 5)
    expected = answered(runner, arrivals, {}, monkeypatch)
    monkeypatch.setattr(whole_step, "LOGITS_MAX", runner.config.vocab_size)
    monkeypatch.setattr(runner, "run_by_parts", None)
    assert answered(runner, arrivals, {}, monkeypatch) == expected
    assert runner.cache._whole is not None and len(runner.cache._whole._room) <= runner.config.vocab_size
