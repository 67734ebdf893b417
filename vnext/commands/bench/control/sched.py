"""`vnext-bench sched`: what deciding a step and telling the ranks take, and what a GPU costs while it waits for them.

The step itself takes --step-ms. With the default pipeline the next step is decided while one computes, so the ranks wait only for
what takes longer than a step; with one step at a time they wait for all of it.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns
from typing import Any

from vnext.commands.bench.control.comm import ROUNDS_MAX, batches_of
from vnext.commands.bench.control.steady import committed, planned, steady_decode
from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.options.parser import Given
from vnext.runtime.protocol.settings import SettingsError
from vnext.runtime.transport.ring.broadcast import encode_events
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter
from vnext.state.laws import check_cheap
from vnext.state.reduce import reduce

COLUMNS = {
    "batch": "batch", "schedule_us": "schedule us", "broadcast_us": "broadcast us", "idle_share": "idle, turn",
    "idle_share_ahead": "idle, ahead", "price": "$/1,000 turn", "price_ahead": "$/1,000 ahead",
}  # fmt: skip


def measure(given: Given) -> Result:
    """Each batch once. Raises SettingsError."""
    step_us, price = 1e3 * given.values["step_ms"], given.values["gpu_price"]
    if step_us <= 0 or price < 0:
        raise SettingsError("--step-ms and --gpu-price are what a step and a GPU take: write numbers above 0.")
    rounds = min(given.values["rounds"], ROUNDS_MAX)
    runs: list[dict[str, Any]] = []
    batches = batches_of(given.values["batches"])
    with until_cut(runs) as cut:
        for count in progress("batches", batches):
            runs.append(costs(count, *core_us(count, rounds), step_us, price))
    figures = {f"{name}_{run['batch']}": run[name] for run in runs for name in ("schedule_us", "broadcast_us", "idle_share_ahead")}
    asked = {"step_ms": given.values["step_ms"], "gpu_price": price, "rounds": rounds}
    return Result(
        figures=figures, workload=asked, runs=tuple(runs), shown=runs_table(COLUMNS, runs),
        wrong=cut.wrong(len(runs), len(batches), "batches"),
    )  # fmt: skip


def core_us(count: int, rounds: int) -> tuple[float, float]:
    """Medians of deciding a steady step with `count` requests and folding its result, and of making and sending its message."""
    state, spent = steady_decode(count), []
    with RingWriter.create(reader_count=1) as writer:
        reader = RingReader.attach(writer.name, 0, spin_us=0)
        for _ in range(rounds):
            begin_ns = perf_counter_ns()
            plan = planned(state)
            state = reduce(state, plan)
            commit = committed(state)
            state = reduce(state, commit)
            check_cheap(state)
            decided_ns = perf_counter_ns()
            writer.write(encode_events((plan, commit)))
            spent.append((decided_ns - begin_ns, perf_counter_ns() - decided_ns))
            reader.read(0)
        reader.close()
    schedule_ns, broadcast_ns = zip(*spent)
    return median(schedule_ns) / 1e3, median(broadcast_ns) / 1e3


def costs(count: int, schedule_us: float, broadcast_us: float, step_us: float, price: float) -> dict[str, Any]:
    """What ranks wait, and dollars for 1,000 tokens, with one step at a time and with the next one decided meanwhile."""
    core = schedule_us + broadcast_us
    ahead_us, turn_us = max(step_us, core), step_us + core
    each = price / 3600e6 * 1000 / count
    return {
        "batch": count, "schedule_us": round(schedule_us, 2), "broadcast_us": round(broadcast_us, 2),
        "idle_share": round(1 - step_us / turn_us, 4), "idle_share_ahead": round(1 - step_us / ahead_us, 4),
        "price": f"{each * turn_us:.4g}", "price_ahead": f"{each * ahead_us:.4g}",
    }  # fmt: skip
