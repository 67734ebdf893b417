"""`vnext-bench overlap`: which share of the control plane's time is hidden behind the ranks' compute, by batch.

From the times in the engine's own log. A turn lasts from one decode step's commit to the next one's; what rank 0 was not busy in it
is the control plane's: deciding, folding, recording, both channels, waking. An engine without asynchronous scheduling shows all of
that, one with it what is left when the next step is decided meanwhile. Medians over the steps of a batch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.api.llm import LLM
from vnext.commands.bench.engine_runs import timed, warm_up
from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.commands.bench.server_runs import MeasurementFailed
from vnext.commands.bench.workload import Workload, numbers_of, params, prompts
from vnext.options.parser import Given
from vnext.options.reader import engine_of
from vnext.replay.futures.recording import recorded
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.settings import EngineSettings, SettingsError

BATCH_MAX, STEPS_MIN = 1024, 8
COLUMNS = {
    "batch": "batch", "busy_us": "compute us", "control_us": "control us", "exposed_us": "not hidden us",
    "hidden_share": "hidden %", "turn_us": "turn us", "gain": "gain",
}  # fmt: skip


class Turns(NamedTuple):
    """Microseconds of the decode steps of one batch: a whole turn, rank 0's work in it, and the rest."""

    turn: float
    busy: float
    control: float


def measure(given: Given) -> Result:
    """Every batch one step at a time, then with the next step decided meanwhile. Raises SettingsError, StartFailed."""
    batches, steps = numbers_of(given.values["batches"], "--batches", 1, BATCH_MAX), given.values["output_len"]
    if steps < 2 * STEPS_MIN:
        raise SettingsError(f"--output-len is {steps}: give {2 * STEPS_MIN} tokens or more, each a step to measure.")
    workload = Workload(
        prompt_count=1, input_length=given.values["input_len"], output_length=steps, random=True, seed=given.values["workload_seed"]
    )
    engine = engine_of(given)
    if engine.max_num_seqs < max(batches):
        raise SettingsError(f"--batches has {max(batches)}, and --max-num-seqs is {engine.max_num_seqs}: give larger or fewer.")
    alone, ahead = list[Turns](), list[Turns]()
    with until_cut(ahead) as cut:
        for is_ahead, found in ((False, alone), (True, ahead)):
            turns(engine, is_ahead, batches, workload, found)
    runs = [row(*each) for each in zip(batches, alone, ahead)]
    figures = {f"{name}_{run['batch']}": run[name] for run in runs for name in ("hidden_share", "control_us", "exposed_us")}
    asked = msgspec.to_builtins(workload) | {"batches": batches}
    return Result(
        figures=figures, workload=asked, runs=tuple(runs), shown=runs_table(COLUMNS, runs),
        wrong=cut.wrong(len(runs), len(batches), "batches"),
    )  # fmt: skip


def turns(engine: EngineSettings, is_ahead: bool, batches: list[int], workload: Workload, found: list[Turns]) -> None:
    """Add what each batch on one new engine `found`; of those that had ended, if Ctrl-C comes."""
    with tempfile.TemporaryDirectory(prefix="vnext-bench-") as folder:
        own = {"log": "shape", "log_dir": folder, "async_scheduling": is_ahead}
        ended: list[int] = []
        try:
            with LLM(**msgspec.structs.asdict(engine) | own) as llm:
                warm_up(llm)
                for batch in progress("batches", batches):
                    asked = msgspec.structs.replace(workload, prompt_count=batch, seed=101 * workload.seed + batch)
                    timed(llm, prompts(asked, llm.tokenizer), params(asked))
                    ended.append(batch)
        finally:
            if ended:
                seen = recorded(open_log(next(Path(folder).glob("*/"))))
                found += [turns_of(seen.features, seen.step_us, seen.ends_us, batch) for batch in ended]


def turns_of(features: np.ndarray, busy_us: np.ndarray, ends_us: np.ndarray, batch: int) -> Turns:
    """Of the steps (`features` float64 [n, 4] of step_times.py, `busy_us` and `ends_us` float64 [n]) that decode so many requests
    and follow such a step. Raises MeasurementFailed where there are too few."""
    is_decode = (features[:, :2] == batch).all(axis=1)
    places = np.flatnonzero(is_decode[1:] & is_decode[:-1]) + 1
    if len(places) < STEPS_MIN:
        found = f"{len(places)} steps decoded {batch} requests at once"
        raise MeasurementFailed(f"{found}: give a longer --output-len or smaller --batches.")
    turn, busy = ends_us[places] - ends_us[places - 1], busy_us[places]
    return Turns(*(round(float(np.median(each)), 1) for each in (turn, busy, np.maximum(turn - busy, 0.0))))


def row(batch: int, alone: Turns, ahead: Turns) -> dict[str, float]:
    """A line of the table; `gain` is how many times longer a turn takes one step at a time."""
    hidden = 1 - ahead.control / alone.control if alone.control else 0.0
    return {
        "batch": batch, "busy_us": ahead.busy, "control_us": alone.control, "exposed_us": ahead.control,
        "hidden_share": round(100 * max(hidden, 0.0), 1), "turn_us": ahead.turn, "gain": round(alone.turn / ahead.turn, 3),
    }  # fmt: skip
