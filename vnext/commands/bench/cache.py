"""`vnext-bench cache`: throughput by the share of each prompt that the prefix cache holds, with the cache and without it.

All prompts of a batch begin with the same tokens, in whole blocks, which a request before the clock has computed. What attention
reads is counted in the engine's own log: the tokens before the ends of a step's rows, and the same where the blocks that all rows
share are read once (runtime/gpu/cascade.py).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.api.llm import LLM
from vnext.commands.bench.engine_runs import WARM_UP_PROMPT, timed, token_counts, warm_up
from vnext.commands.bench.figures import rates
from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.commands.bench.workload import Workload, numbers_of, params, prompts
from vnext.options.parser import Given
from vnext.options.reader import engine_of
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.gpu.cascade import common_blocks
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.runtime.protocol.settings import EngineSettings
from vnext.state.events import RequestArrived
from vnext.state.state import State

COLUMNS = {
    "share": "asked %", "hit_share": "hits %", "on": "tokens/s, on", "off": "tokens/s, off", "gain": "gain", "flat": "reads",
    "cascade": "of a cascade", "saved": "saved %",
}  # fmt: skip


class Ran(NamedTuple):
    """One batch: tokens a second, prompts' and answers' together, and the percentage of the prompts' tokens that were hits."""

    tokens_per_s: float
    hit_share: float


class Reads(NamedTuple):
    """Tokens whose keys and values one layer's attention reads: once for each row, and shared blocks once for all."""

    flat: int
    cascade: int


def measure(given: Given) -> Result:
    """Every share with the cache, then without. Raises SettingsError, StartFailed."""
    shares = numbers_of(given.values["hit_rates"], "--hit-rates", 0, 100)
    workload = Workload(
        prompt_count=given.values["num_prompts"], input_length=given.values["input_len"],
        output_length=given.values["output_len"], random=True, seed=given.values["workload_seed"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="vnext-bench-") as folder:
        engine = msgspec.structs.replace(engine_of(given), log="shape", log_dir=folder)
        on, off = list[Ran](), list[Ran]()
        with until_cut(on) as cut:
            ran(engine, True, shares, workload, on)
            ran(msgspec.structs.replace(engine, log="off"), False, shares, workload, off)
        counted = reads_of(next(Path(folder).glob("*/")), 1 + workload.prompt_count)
    runs = [row(*each) for each in zip(shares, on, [*off, *[None] * (len(on) - len(off))], counted)]
    figures = {f"{name}_{run['share']}": run[name] for run in runs for name in ("gain", "hit_share", "saved") if name in run}
    asked = msgspec.to_builtins(workload) | {"hit_rates": shares}
    return Result(
        figures=figures, workload=asked, runs=tuple(runs), shown=runs_table(COLUMNS, runs),
        wrong=cut.wrong(len(on) + len(off), 2 * len(shares), "batches"),
    )  # fmt: skip


def ran(engine: EngineSettings, is_on: bool, shares: list[int], workload: Workload, found: list[Ran]) -> None:
    """Add what a batch for each share on one new engine `found`."""
    with LLM(**msgspec.structs.asdict(engine) | {"enable_prefix_caching": is_on}) as llm:
        warm_up(llm)
        for share in progress("batches", shares):
            found.append(batch_ran(llm, share, workload))


def batch_ran(llm: LLM, share: int, workload: Workload) -> Ran:
    """Prompts that share so many percent of their tokens, and before them what they share."""
    block_size = llm.ready.config.block_size
    shared = workload.input_length * share // 100 // block_size * block_size
    batch = prompts(msgspec.structs.replace(workload, shared_length=shared, seed=101 * workload.seed + share), llm.tokenizer)
    llm.generate([batch[0][:shared] or WARM_UP_PROMPT], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    elapsed_s, answers = timed(llm, batch, params(workload))
    read, written = token_counts(answers)
    hits = sum(answer.num_cached_tokens for answer in answers)
    return Ran(rates(len(answers), read, written, elapsed_s)["total_tokens_per_s"], round(100 * hits / read, 1))


def row(share: int, on: Ran, off: Ran | None, reads: Reads) -> dict[str, float]:
    """A line of the table. `off`: None if it was not measured."""
    gained = {} if off is None else {"off": off.tokens_per_s, "gain": round(on.tokens_per_s / off.tokens_per_s, 3)}
    return {"share": share, "hit_share": on.hit_share, "on": on.tokens_per_s} | gained | {
        "flat": reads.flat, "cascade": reads.cascade, "saved": round(100 * (1 - reads.cascade / reads.flat), 1),
    }  # fmt: skip


def reads_of(log: Path, batch: int) -> list[Reads]:
    """Of each batch of so many requests, the first of which is left out; one request came before all of them."""
    counted: dict[int, Reads] = {}
    place_of: dict[int, int] = {}
    for item in fold(open_log(log)):
        if not isinstance(item, Folded):
            continue
        if isinstance(item.event, RequestArrived):
            place_of[item.event.id] = len(place_of) - 1
        if item.plan is not None and (place := place_of[int(item.after.in_flight[-1].ids[0])]) > 0 and place % batch:
            before, now = counted.get(place // batch, Reads(0, 0)), step_reads(item.after)
            counted[place // batch] = Reads(before.flat + now.flat, before.cascade + now.cascade)
    return [reads for _, reads in sorted(counted.items())]


def step_reads(state: State) -> Reads:
    """Of the newest step."""
    scheduled = state.in_flight[-1]
    flat = int((scheduled.starts + scheduled.counts).sum())
    shared = common_blocks(state, np.isin(state.rows.id, scheduled.ids), scheduled.starts) * state.config.block_size
    return Reads(flat, flat - shared * (len(scheduled.ids) - 1))
