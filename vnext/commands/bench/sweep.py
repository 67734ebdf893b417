"""`vnext-bench sweep`: the same workload at one load after another, and the knee: the last load that still paid.

With --goodput the knee is the highest load at which GOOD_SHARE of the requests keep the bounds. Without bounds it is the last load
before one that brought less than WORTH of the tokens a second that its rise in load asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vnext.commands.bench.figures import server_figures
from vnext.commands.bench.report import Result, Wrong, progress, runs_table
from vnext.commands.bench.serve import failure_notes, lost_notes, measured, samples_of, tokenizer_of, url_of, workload_of
from vnext.commands.bench.server_runs import MeasurementFailed, ServerUnusable, wrong_in
from vnext.commands.bench.vllm_figures import is_good, wanted_of
from vnext.options.parser import Given
from vnext.runtime.protocol.settings import SettingsError

GOOD_SHARE, WORTH = 0.9, 0.5
LOADS_MAX = 12
COLUMNS = {
    "load": "load", "requests_per_s": "req/s", "output_tokens_per_s": "tokens/s", "ttft_p50_ms": "TTFT p50", "ttft_p99_ms": "p99",
    "tpot_p50_ms": "TPOT p50", "tpot_p99_ms": "p99 (ms)", "good_share": "good",
}  # fmt: skip


def sweep(given: Given) -> Result:
    """One run after another. Raises as `serve` does, in the first run; a later one that fails ends the sweep."""
    values = given.values
    name = "concurrency" if values["concurrencies"] else "request_rate"
    if values["concurrencies"] and values["rates"]:
        raise SettingsError("--rates and --concurrencies are two ways to load a server: leave one of the two out.")
    listed = loads_of(values["concurrencies" if values["concurrencies"] else "rates"])
    if values["concurrencies"] and any(each % 1 for each in listed):
        raise SettingsError(f"--concurrencies is {values['concurrencies']!r}: write whole numbers, as 1,8,32.")
    goodput = wanted_of("", "50", values["goodput"]).goodput
    samples = samples_of(values, tokenizer_of(values))
    runs: list[dict[str, float]] = []
    notes = lost_notes(values["from_log"], f"{len(samples)} requests")
    ended, wrong = Wrong(), dict[float, Wrong]()
    for load in progress("loads", listed or doubled(runs, bool(goodput))):
        at = {"request_rate": 0.0, "concurrency": 0} | {name: load if name == "request_rate" else int(load)}
        try:
            _, timelines, begin_s, elapsed_s, seen = asyncio.run(measured(values | at, samples))
            wrong[load] = wrong_in(timelines, len(samples), url_of(values))
            if wrong[load].is_cut:
                raise KeyboardInterrupt
        except (ServerUnusable, MeasurementFailed, KeyboardInterrupt) as error:
            if not runs:
                raise
            ended = Wrong(f"the sweep ended at {load:g}: {str(error) or 'interrupted'}", isinstance(error, KeyboardInterrupt))
            break
        found = server_figures(timelines, elapsed_s, at["request_rate"], begin_s) | seen
        good = sum(not each.error and is_good(each, goodput) for each in timelines) / len(timelines)
        runs.append({"load": load} | ({"good_share": good} if goodput else {}) | found)
        notes += [f"at {load:g}: {note}" for note in failure_notes(timelines)]
    best = runs[knee(runs, bool(goodput))]
    if not ended.sentence and (sentence := wrong[best["load"]].sentence):
        ended = Wrong(f"at {best['load']:g}, the knee: {sentence}")
    return Result(
        figures={f"knee_{name}": best["load"]} | {key: value for key, value in best.items() if key != "load"},
        workload=workload_of(values), notes=tuple(notes), wrong=ended,
        shown="\n".join([runs_table(COLUMNS, runs, best), *(f"note: {note}" for note in notes)]), runs=tuple(runs),
    )  # fmt: skip


def loads_of(text: str) -> list[float]:
    """Raises SettingsError."""
    try:
        found = [float(word) for word in text.split(",")] if text else []
    except ValueError:
        found = [0.0]
    if any(not 0 < each < float("inf") for each in found) or found != sorted(set(found)):
        raise SettingsError(f"the loads are {text!r}: write rising numbers, as 1,2,4.")
    return found


def doubled(runs: Sequence[Mapping[str, float]], has_bounds: bool) -> Iterator[float]:
    """1, 2, 4, ... until the run of the last one lies beyond the knee."""
    for power in range(LOADS_MAX):
        yield float(2**power)
        if knee(runs, has_bounds) < len(runs) - 1:
            return


def knee(runs: Sequence[Mapping[str, Any]], has_bounds: bool) -> int:
    """The place of the knee among runs of rising load; the first one where none is good."""
    if has_bounds:
        return max((place for place, run in enumerate(runs) if run["good_share"] >= GOOD_SHARE), default=0)
    for place, (before, after) in enumerate(zip(runs, runs[1:])):
        asked = before["output_tokens_per_s"] * (after["load"] / before["load"] - 1)
        if after["output_tokens_per_s"] - before["output_tokens_per_s"] < WORTH * asked:
            return place
    return len(runs) - 1
