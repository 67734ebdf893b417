"""The whole engine, end to end, with the bundled model: tokens a second. `python -m pytest perf/bench_engine.py`

Real processes, channel, scheduler, forward pass, sampling and log, through `LLM`. Each round has new prompts, because
repeated ones would come from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vnext.api.llm import LLM
from vnext.commands.bench.engine_runs import prompts_of_repeats, warm_up
from vnext.commands.bench.workload import Workload, params

ROUNDS = 5


@pytest.fixture(scope="module", params=("mp", "inproc"))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    log_dir: Path = tmp_path_factory.mktemp("logs")
    with LLM(executor=request.param, log_dir=log_dir) as engine:
        warm_up(engine)
        yield engine


@pytest.mark.parametrize("batch_size", (1, 8, 64))
def test_generate(benchmark, llm: LLM, batch_size: int) -> None:
    """Prompts of 128 tokens, answers of 64."""
    workload = Workload(prompt_count=batch_size, input_length=128, output_length=64)
    batches = iter(prompts_of_repeats(llm, workload, ROUNDS))
    asked = params(workload)

    def next_batch() -> tuple[tuple, dict]:
        return (next(batches), asked, False), {}

    benchmark.pedantic(llm.generate, setup=next_batch, rounds=ROUNDS)
    tokens = batch_size * workload.output_length
    benchmark.extra_info["output_tokens"] = tokens
    benchmark.extra_info["output_tokens_per_s_median"] = round(tokens / benchmark.stats.stats.median, 1)
