"""A hundred thousand tokens: every drafter, and one that lies, under every way to run, against an engine without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_here import engines_here
from rank_drive import Liar

from vnext import LLM, SamplingParams
from vnext.replay.cli.main import main as replay
from vnext.runtime.batch import draft_rows
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.sampling_params import StructuredOutputsParams

Answer = tuple[Any, ...]
REQUESTS = 48
WORDS = ("def add(a, b):\n    return a + b\n", "for name in names:\n    print(name)\n", "The module is a module. ", "one two three ")
CONSTRAINTS = (
    StructuredOutputsParams(regex=r"((red|green|blue) [0-9]{1,3} ){1,9}end"), StructuredOutputsParams(choice=["the first", "the second"]),
    StructuredOutputsParams(json={
        "type": "object", "properties": {"first_name": {"type": "string", "maxLength": 6}, "is_known": {"type": "boolean"}},
        "required": ["first_name", "is_known"], "additionalProperties": False,
    }),
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "scheduled ahead": {}, "in step": {"async_scheduling": False}, "preempted": {"num_blocks_override": 60, "max_model_len": 512},
    "uncached": {"enable_prefix_caching": False}, "in chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 40},
    "in step, preempted, uncached": {
        "async_scheduling": False, "num_blocks_override": 60, "max_model_len": 512, "enable_prefix_caching": False,
    },
    "two ranks": {"tensor_parallel_size": 2}, "two ranks, preempted": {"tensor_parallel_size": 2, "num_blocks_override": 60, "max_model_len": 512},
}  # fmt: skip
METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "row_cost": 0},
    "grammar": {"method": "grammar", "row_cost": 0},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7, "row_cost": 0},
    "draft model": {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 3, "row_cost": 0},
    "liar": {"method": "ngram", "num_speculative_tokens": 3, "row_cost": 0},
}  # fmt: skip


def wishes() -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(29)
    prompts = ["".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5))) for _ in range(REQUESTS)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(40, 150), temperature=rng.choice((0, 0, 0.5, 1.0)), seed=rng.randrange(99),
            repetition_penalty=rng.choice((1, 1, 1.1)), frequency_penalty=rng.choice((0, 0, 0.2)), min_tokens=rng.choice((0, 9)),
            top_p=rng.choice((1, 0.9)), logprobs=rng.choice((None, None, 1)), stop_token_ids=rng.choice(([], [], [7, 300])),
            stop=rng.choice(([], [], ["print("])), ignore_eos=rng.random() < 0.8,
        )
        for _ in prompts
    ]  # fmt: skip
    for place, asked in enumerate(CONSTRAINTS * 3):
        params[5 * place] = SamplingParams(max_tokens=90, temperature=place % 2, seed=place, structured_outputs=asked)
    return prompts, params


def answers(**settings: Any) -> list[Answer]:
    prompts, params = wishes()
    with LLM(threads=1, seed=1, **settings) as llm:
        found = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs) for each in found]


@cache
def undrafted() -> list[Answer]:
    """Of one rank, for any number of them."""
    return answers(log="off")


CASES = [(method, way) for method in METHODS for way in WAYS if method != "liar" or "two" not in way]  # two liars: tests/sim


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(draft_rows, "drafter_of", lambda speculation: Liar(300))
    with engines_here():
        yield


@pytest.mark.parametrize(("method", "way"), CASES)
def test_a_hundred_thousand_tokens(
    method: str, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    settings = {"log": "full", "log_dir": str(tmp_path), "digest_interval": 16, **WAYS[way]}
    expected = undrafted()
    assert sum(len(answer[0]) for answer in expected) * len(CASES) > 100_000
    if method == "liar":
        request.getfixturevalue("lies")
        settings["executor"] = "inproc"
    assert answers(speculative_config=METHODS[method], **settings) == expected
    (log,) = tmp_path.iterdir()
    assert replay(["verify", "--laws", "--grammar", str(log)]) == 0 and capsys.readouterr()
    assert replay(["show", "--json", str(log)]) == 0
    counters = msgspec.json.decode(capsys.readouterr().out)["state"]["counters"]
    assert counters["draft_tokens"] > 0 and (counters["preempted"] > 0) >= ("preempted" in way)
