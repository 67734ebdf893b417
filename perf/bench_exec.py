"""Benchmark and check of re-executing a log with its model: `python -m pytest perf/bench_exec.py`.

The bundled model serves requests in an engine with a small cache; then its log is re-executed: all of it in its batches, two
requests of five alone, some steps from the middle, and every operation on its own. A third of the requests are greedy, the
others are sampled; a quarter share a prefix. The log must show chunked prompts, preemptions and prefix hits. `extra_info` has
the number of tokens compared and of those that differ, which must be zero. The run took 259 s on two busy cores (load 4.7).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vnext.api.llm import LLM
from vnext.replay.answers.stat import stat
from vnext.replay.console.commands import index_of
from vnext.replay.execution.bisection import bisect
from vnext.replay.execution.execution import Executed, ModelChoice, execute
from vnext.replay.execution.recorded import Selection
from vnext.runtime.protocol.sampling_params import SamplingParams

REQUESTS, TOKENS = 1040, 100
SETTINGS = dict(executor="inproc", num_blocks_override=220, max_num_seqs=32, max_num_batched_tokens=96, log="full", seed=1)
ALONE = frozenset(index for index in range(REQUESTS) if index % 5 < 2)
"""Requests that also run alone: two of five of every kind, because no kind repeats with period five."""
SAME = ModelChoice(changes={"threads": 2})


def prompt(index: int) -> list[int]:
    """Return 3 to 120 tokens; every fourth prompt shares a prefix with others."""
    shared = [7 + 11 * place % 400 for place in range(40)] if index % 4 == 0 else []
    return shared + [5 + (13 * index + 7 * place + place * place // 3) % 500 for place in range(3 + index * 7 % 80)]


def params(index: int) -> SamplingParams:
    temperature = 0.0 if index % 3 == 0 else 0.9
    return SamplingParams(temperature=temperature, top_p=0.95, seed=index, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with LLM(log_dir=str(tmp_path_factory.mktemp("logs")), **SETTINGS) as llm:
        llm.generate([prompt(index) for index in range(REQUESTS)], [params(index) for index in range(REQUESTS)], use_tqdm=False)
        path = Path(llm.log_dir)
    found = stat(index_of(path))
    assert found.preemptions > 0 and found.hit_tokens > 0
    return path


def ran(benchmark, path: Path, selection: Selection, alone: bool) -> None:
    """Re-execute once and check that every token is reproduced."""
    found: list[Executed] = []
    benchmark.pedantic(lambda: found.append(execute(path, selection, SAME, alone)), rounds=1)
    (answer,) = found
    names = ("mode", "steps", "requests", "tokens", "differ", "rebuilt_tokens", "invariance")
    benchmark.extra_info.update({name: getattr(answer, name) for name in names} | {"numerics": answer.numerics})
    assert answer.same and answer.tokens > 0


def test_batches(benchmark, log) -> None:
    ran(benchmark, log, Selection(), alone=False)


def test_alone(benchmark, log) -> None:
    ran(benchmark, log, Selection(requests=ALONE), alone=True)


def test_a_hundred_steps_in_the_middle(benchmark, log) -> None:
    ran(benchmark, log, Selection(first=1000, end=1100), alone=False)


@pytest.mark.parametrize("changes", [{}, {"kernels": "torch"}], ids=["alone", "torch"])
def test_bisect_two_hundred_steps(benchmark, log, changes) -> None:
    """Repeat every operation of these steps: each request alone, or in plain torch."""
    chosen = msgspec.structs.replace(SAME, changes=SAME.changes | changes)
    found = []
    benchmark.pedantic(lambda: found.append(bisect(log, Selection(end=200), chosen, not changes)), rounds=1)
    (answer,) = found
    calls = {each.operation: [each.calls, each.max_rel] for each in answer.operations}
    benchmark.extra_info.update({"steps": answer.steps, "tolerance": answer.tolerance, "calls_and_largest": calls})
    assert answer.same
