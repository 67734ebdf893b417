"""`vnext-bench simulate`: the real scheduler on a clock of modelled step times, for a model and a device that need not be here.

Steps take what a roofline says or, with --from-log, what was learnt from the steps of a log. The next step is planned when one has
ended, without time of its own: the engine decides it while the ranks compute. Loads come one after the other, as in `sweep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from vnext.commands.bench.control.roofline import Roofline, device_named, form_of
from vnext.commands.bench.control.steady import committed, started
from vnext.commands.bench.figures import server_figures
from vnext.commands.bench.load.events import Piece
from vnext.commands.bench.load.generator import Timeline, poisson
from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.commands.bench.serve import lost_notes
from vnext.commands.bench.sweep import COLUMNS, doubled, knee, loads_of
from vnext.commands.bench.vllm_figures import is_good, wanted_of
from vnext.options.parser import Given
from vnext.replay.futures.recording import recorded
from vnext.replay.futures.step_times import fit
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.runtime.protocol.settings import SettingsError
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestArrived, RequestId, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce
from vnext.state.state import StepInFlight

BLOCK_SIZE, VOCABULARY = 16, 1 << 20
PAGES_MAX = 1 << 20
"""More than any load here fills."""
StepTime = Callable[[StepInFlight], float]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A load: `count` requests, `rate` a second, prompts of `input` tokens, `shared` of them common, answers of `output` tokens."""

    count: int
    rate: float
    input: int
    output: int
    shared: int = 0
    seed: int = 0

    def at(self, rate: float) -> Asked:
        """The same load at another rate."""
        return msgspec.structs.replace(self, rate=rate)


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Steps' seconds, the tokens that the cache holds, and sentences on where they come from."""

    step_s: StepTime
    cache_tokens: int
    notes: tuple[str, ...] = ()


def measure(given: Given) -> Result:
    """One load after another. Raises SettingsError, ModelError."""
    values = given.values
    clock, goodput = clock_of(given), wanted_of("", "50", values["goodput"]).goodput
    runs: list[dict[str, float]] = []
    listed = loads_of(values["rates"])
    with until_cut(runs) as cut:
        for rate in progress("loads", listed or doubled(runs, bool(goodput))):
            asked = Asked(count=values["num_prompts"], rate=rate, input=values["input_len"], output=values["output_len"],
                          shared=values["shared_len"], seed=values["workload_seed"])  # fmt: skip
            runs.append(run_of(asked, clock, given, goodput))
    best = runs[knee(runs, bool(goodput))]
    columns = COLUMNS | {"price": "$/1M tokens"}
    shown = "\n".join([runs_table(columns, runs, best), *(f"note: {note}" for note in clock.notes)])
    figures = {"knee_request_rate": best["load"]} | {key: value for key, value in best.items() if key != "load"}
    return Result(
        figures=figures, workload=dict(values), runs=tuple(runs), shown=shown, notes=clock.notes,
        wrong=cut.wrong(len(runs), len(listed), "loads"),
    )  # fmt: skip


def clock_of(given: Given) -> Clock:
    """Raises SettingsError, ModelError."""
    values = given.values
    form, ranks = form_of(values.get("model", "")), values["tensor_parallel_size"]
    roofline = Roofline(form, device_named(values["bench_device"]), ranks)
    if not roofline.cache_tokens:
        raise SettingsError(f"{form.weight_bytes / 1e9:.0f} GB of weights do not fit on {ranks} such devices: give more of them.")
    if not values["from_log"]:
        note = f"steps by a roofline of {ranks} x {values['bench_device']}: nothing was run"
        return Clock(step_s=roofline.step_s, cache_tokens=roofline.cache_tokens, notes=(note,))
    try:
        seen = recorded(open_log(Path(values["from_log"])))
        learnt = fit(seen.features, seen.step_us, seen.began_us)
    except UnusableLog as error:
        raise SettingsError(f"--from-log: {error}.") from error
    note = f"steps as in {values['from_log']}: on those left out of the fit half the errors are below {100 * learnt.error_p50:.0f}%"
    step_us = learnt.single()
    notes = (note, *lost_notes(values["from_log"], f"{len(seen.step_us)} steps"))
    return Clock(step_s=lambda scheduled: step_us(scheduled) / 1e6, cache_tokens=roofline.cache_tokens, notes=notes)


def run_of(asked: Asked, clock: Clock, given: Given, goodput: Mapping[str, float]) -> dict[str, float]:
    """The figures of one load, by the names of `sweep`."""
    values = given.values
    timelines = simulated(asked, config_of(asked, clock, values["max_num_seqs"], values["max_num_batched_tokens"]), clock.step_s)
    elapsed_s = max(each.ended_s for each in timelines)
    found = server_figures(timelines, elapsed_s, asked.rate)
    good = sum(is_good(each, goodput) for each in timelines) / len(timelines)
    price = values["gpu_price"] * values["tensor_parallel_size"] / 3600 / found["output_tokens_per_s"] * 1e6
    return {"load": asked.rate} | ({"good_share": good} if goodput else {}) | found | {"price": round(price, 3)}


def config_of(asked: Asked, clock: Clock, max_num_seqs: int, max_num_batched_tokens: int) -> SchedulerConfig:
    """Raises SettingsError for requests that the cache cannot hold."""
    length = asked.input + asked.output
    if length > clock.cache_tokens:
        raise SettingsError(f"the cache holds {clock.cache_tokens} tokens, and a request has {length}: give more devices.")
    return SchedulerConfig(
        block_size=BLOCK_SIZE, page_count=min(clock.cache_tokens // BLOCK_SIZE, PAGES_MAX), max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=length + 1, vocab_size=VOCABULARY, pipeline_depth=1,
    )  # fmt: skip


def simulated(asked: Asked, config: SchedulerConfig, step_s: StepTime) -> list[Timeline]:
    """The requests as their clients would see them; the clock begins at 0."""
    due = deque(arrivals_of(asked))
    times_s, pieces, now_s, state = [at_s for at_s, _ in due], [list[Piece]() for _ in due], 0.0, started(config)
    while due or state.requests:
        while due and due[0][0] <= now_s:
            state = reduce(state, due.popleft()[1])
        plan = schedule(state)
        if plan is None:
            now_s = due[0][0]
            continue
        state = reduce(state, plan)
        scheduled = state.in_flight[-1]
        now_s += step_s(scheduled)
        for id_ in scheduled.ids[scheduled.samples].tolist():
            pieces[id_].append(Piece(now_s, 1))
        state = reduce(state, committed(state))
    return [
        Timeline(
            intended_s=at_s, sent_s=at_s, pieces=tuple(own), input_tokens=asked.input, output_tokens=len(own), ended_s=own[-1].at_s
        )
        for at_s, own in zip(times_s, pieces)
    ]


def arrivals_of(asked: Asked) -> Sequence[tuple[float, RequestArrived]]:
    """The requests with the seconds at which they are due."""
    rng = np.random.default_rng(asked.seed)
    shared = rng.integers(8, VOCABULARY, asked.shared)
    found = []
    for place, at_s in enumerate(poisson(asked.count, asked.rate, asked.seed)):
        prompt = np.concatenate([shared, rng.integers(8, VOCABULARY, asked.input - asked.shared)])
        sampling = Sampling(seed=place, max_tokens=asked.output, ignore_eos=True)
        arrival = RequestArrived(
            id=RequestId(place), name=str(place), prompt=pack_tokens(prompt), sampling=sampling, priority=0,
            arrival_ns=int(at_s * 1e9),
        )  # fmt: skip
        found.append((at_s, arrival))
    return found
