"""Measurements of an engine that this program starts: without HTTP and without tokenizing prompts.

Owns the bound that memory sets to a decoded step on the CPU: it reads each weight once, and memory gives so many bytes a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np

from vnext.api.generated import Generated
from vnext.api.llm import LLM
from vnext.commands.bench.figures import rates, spread_ms
from vnext.commands.bench.report import Wrong, progress, until_cut
from vnext.commands.bench.workload import Workload, params, prompts
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.runtime.protocol.settings import EngineSettings

WARM_UP_PROMPT = [1] * 8
WARM_UP_TOKENS = 8
Found = TypeVar("Found")


def with_engine(
    engine: EngineSettings, measure: Callable[[LLM, Workload], Found], workload: Workload
) -> Found:
    """Start an engine, measure, and end it. Raises StartFailed."""
    with LLM(**msgspec.structs.asdict(engine)) as llm:
        return measure(llm, workload)


def measure_throughput(llm: LLM, workload: Workload) -> dict[str, float]:
    """Send all prompts at once and measure the time until all answers are complete."""
    batch = prompts(workload, llm.tokenizer)
    warm_up(llm)
    elapsed_s, answers = timed(llm, batch, params(workload), sys.stderr.isatty())
    return rates(len(answers), *token_counts(answers), elapsed_s)


def measure_latency(llm: LLM, workload: Workload, repeats: int) -> tuple[dict[str, float], Wrong]:
    """Send one batch repeatedly and measure the time until its last answer, beside the bound that memory sets. Each repeat has
    different prompts. The figures, and why they are not of all repeats."""
    elapsed_s: list[float] = []
    with until_cut(elapsed_s) as cut:
        batches = prompts_of_repeats(llm, workload, repeats)
        warm_up(llm)
        for batch in progress("batches", batches):
            elapsed_s.append(timed(llm, batch, params(workload))[0])
    tokens = workload.prompt_count * workload.output_length
    per_token_s = [each / workload.output_length for each in elapsed_s]
    figures: dict[str, float] = {"repeats": len(elapsed_s), "batch": workload.prompt_count, "output_tokens_a_batch": tokens}
    figures |= spread_ms(elapsed_s, "batch") | spread_ms(per_token_s, "step")
    figures |= memory_bound(llm.ready.environment, llm.ready.world_size, figures["step_p50_ms"])
    return figures, cut.wrong(len(elapsed_s), repeats, "batches")


def measure_startup(engine: EngineSettings, repeats: int) -> tuple[dict[str, float], Wrong]:
    """Start an engine of these options so often, each in processes of its own. The first start may read the model from the disk:
    it counts apart. The figures, and why they are not of all starts."""
    ready_s: list[float] = []
    token_s: list[float] = []
    with until_cut(token_s) as cut:
        for _ in progress("starts", range(repeats)):
            begin_s = time.perf_counter()
            with LLM(**msgspec.structs.asdict(engine)) as llm:
                up_s = time.perf_counter() - begin_s
                warm_up(llm, tokens=1)
                token_s.append(time.perf_counter() - begin_s)
                ready_s.append(up_s)
    figures: dict[str, float] = {"starts": len(ready_s), "first_start_ms": round(1e3 * token_s[0], 3)}
    figures |= spread_ms(ready_s, "ready") | spread_ms(token_s, "first_token")
    return figures, cut.wrong(len(ready_s), repeats, "starts")


def prompts_of_repeats(llm: LLM, workload: Workload, repeats: int) -> list[list[list[int]]]:
    """A batch for each repeat: the prefix cache would serve repeated prompts."""
    count = workload.prompt_count
    many = Workload(
        prompt_count=count * repeats,
        input_length=workload.input_length,
        output_length=workload.output_length,
        shared_length=workload.shared_length,
        random=workload.random,
        seed=workload.seed,
    )
    everything = prompts(many, llm.tokenizer)
    return [everything[start : start + count] for start in range(0, len(everything), count)]


def warm_up(llm: LLM, tokens: int = WARM_UP_TOKENS) -> None:
    """Run the first steps, which load code and allocate memory."""
    llm.generate([WARM_UP_PROMPT], SamplingParams(max_tokens=tokens, ignore_eos=True), use_tqdm=False)


def timed(llm: LLM, batch: Sequence[list[int]], params: SamplingParams, use_tqdm: bool = False) -> tuple[float, list[Generated]]:
    begin_s = time.perf_counter()
    answers = llm.generate(batch, params, use_tqdm=use_tqdm)
    return time.perf_counter() - begin_s, answers


def token_counts(answers: Sequence[Generated]) -> tuple[int, int]:
    """Tokens read and tokens written."""
    read = sum(len(answer.prompt_token_ids) for answer in answers)
    return read, sum(len(output.token_ids) for answer in answers for output in answer.outputs)


# ---- the bound of memory -----------------------------------------------------------------------------------------


READ_BYTES = 256 * 2**20  # of all threads together: more than caches hold
REPEATS = 7


def memory_bound(environment: Mapping[str, str], ranks: int, step_ms: float) -> dict[str, float]:
    """The weights that a step of all ranks reads, the rate at which as many threads read memory, and the share of that bound that a
    step of `step_ms` reaches; more than 1 where weights stay in the cache. {} on a GPU."""
    if "token_bytes" not in environment:
        return {}
    weights_bytes, gb_per_s = ranks * int(environment["token_bytes"]), read_gb_per_s(ranks * int(environment["threads"]))
    bound_ms = weights_bytes / gb_per_s / 1e6
    return {
        "weights_mb_a_step": round(weights_bytes / 1e6, 1), "memory_read_gb_per_s": round(gb_per_s, 1),
        "share_of_memory_bound": round(bound_ms / step_ms, 3),
    }  # fmt: skip


def read_gb_per_s(threads: int) -> float:
    """10^9 bytes a second that so many threads read together, each its own part; the best of several times."""
    parts = [np.ones(READ_BYTES // 8 // threads, np.int64) for _ in range(threads)]
    spent_s = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            list(pool.map(np.sum, parts))
            spent_s.append(time.perf_counter() - began_s)
    return READ_BYTES / min(spent_s) / 1e9
