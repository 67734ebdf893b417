"""Sampling parameters: every range has its sentence, and the answers to one prompt never share their noise."""

from __future__ import annotations

import math

import pytest

from vnext.runtime.protocol.sampling_params import InvalidRequest, SamplingParams, answer_seed, to_sampling, validate
from vnext.state.params import NO_LOGPROBS

VOCAB_SIZE = 100

BAD = [
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 2),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {100: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {"a": 1.0}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", ["x"] * 257),
    ("stop", ["x" * 1024] * 17),
    ("stop", "x" * 1025),
    ("stop", 5),
    ("stop_token_ids", [100]),
    ("stop_token_ids", [0] * 129),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_wrong_values_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        validate(SamplingParams(**{name: value}), VOCAB_SIZE)
    assert caught.value.param == name and caught.value.message.endswith(".")


def test_the_edges_of_the_ranges_are_allowed() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(n=128, temperature=0, top_k=-1, top_p=1, min_p=1, seed=-1, logprobs=20, max_tokens=None),
        SamplingParams(seed=2**64 - 1, stop=("a", "b"), stop_token_ids=(99,), logit_bias={99: -100.0}, min_tokens=16),
    ):
        validate(params, VOCAB_SIZE)


def test_translation() -> None:
    params = SamplingParams(
        temperature=1e-9, top_k=-1, top_p=0.5, logit_bias={7: 1.0, 3: 2.0}, stop_token_ids=[9, 2, 9], max_tokens=None
    )
    sampling = to_sampling(params, seed=5, prompt_length=10, model_length=64)
    assert (sampling.seed, sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 54, 0.0, 0)
    assert sampling.logit_bias == ((3, 2.0), (7, 1.0)) and sampling.stop_token_ids == (2, 9)
    assert sampling.logprobs == NO_LOGPROBS
    assert to_sampling(SamplingParams(logprobs=0), 0, 1, 64).logprobs == 0


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "param"), [(16, 49, "max_tokens"), (None, 64, "prompt"), (1, 65, "prompt")]
)
def test_what_cannot_fit(max_tokens: int | None, prompt: int, param: str) -> None:
    with pytest.raises(InvalidRequest, match="64") as caught:
        to_sampling(SamplingParams(max_tokens=max_tokens), 0, prompt, 64)
    assert caught.value.param == param


def test_answers_have_seeds_of_their_own() -> None:
    for seed in (0, 1, -1, 2**64 - 1):
        seeds = [answer_seed(seed, index) for index in range(1000)]
        assert len(set(seeds)) == 1000 and all(0 <= value < 2**64 for value in seeds)
        assert seeds[0] == seed % 2**64 and seeds == [answer_seed(seed, index) for index in range(1000)]
    assert answer_seed(0, 1) != answer_seed(1, 1)
