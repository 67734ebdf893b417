"""Renders the answers of stat, diff and ranks for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from vnext.replay.answers.diff import Diff, Field
from vnext.replay.answers.ranks import RankLine, Ranks
from vnext.replay.answers.stat import Stat
from vnext.replay.console.render import PERCENTILE_NAMES, counted, facts, records
from vnext.replay.reading.show import Json


def print_stat(console: Console, answer: Stat) -> None:
    rows = [
        _row("step time, ms", [value / 1000 for value in answer.step_us]),
        _row("tokens computed", answer.tokens),
        _row("requests in the step", answer.batch),
        _row("running", answer.running),
        _row("waiting", answer.queue),
        _row("free blocks", answer.free_blocks),
    ]
    facts(console, counted(answer.steps, "step"), [
        ("time", f"{answer.seconds:,.1f} s at work, {answer.tokens_per_s:,.0f} tokens a second" if answer.seconds else "not told"),
        ("tokens", f"{answer.computed_tokens:,} computed, {answer.sampled_tokens:,} sampled"),
        ("prefix cache", f"{answer.hit_rate:.1%} of {answer.queried_tokens:,} tokens found"),
        ("preemptions", f"{answer.preemptions:,}, {answer.preemptions_per_1000_steps:.2f} in 1,000 steps"),
        ("requests", f"{answer.finished:,} finished, {answer.aborted:,} aborted"),
        ("size", f"{answer.size_bytes:,} bytes, {answer.bytes_per_sampled_token:.2f} per sampled token"),
        *([("counted up to", answer.stopped)] if answer.stopped else []),
    ])  # fmt: skip
    records(console, "per step", ("value", *PERCENTILE_NAMES), rows)


def _row(name: str, values: Sequence[float]) -> Json:
    reported = [f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values] or ["-"] * len(
        PERCENTILE_NAMES
    )
    return {"value": name, **dict(zip(PERCENTILE_NAMES, reported))}


def print_diff(console: Console, answer: Diff) -> None:
    if answer.headers:
        records(console, "settings that differ", ("name", "one", "other"), _fields(answer.headers))
    console.print(f"equal: {counted(answer.segments_equal, 'segment')}, then {counted(answer.frames_equal, 'frame')}")
    if answer.fields:
        where = f"step {answer.step}, event {answer.event}: {answer.what}"
        records(console, f"first divergence, {where}; fields that differ", ("name", "one", "other"), _fields(answer.fields))
    console.print(_conclusion(answer), style="bold green" if answer.same else "bold red")


def _fields(fields: Sequence[Field]) -> list[Json]:
    return [{"name": field.name, "one": field.one, "other": field.other} for field in fields]


def _conclusion(answer: Diff) -> str:
    if answer.fields:
        return f"the logs diverge in step {answer.step}" if answer.step >= 0 else "the logs diverge before their first step"
    return "the logs have the same events" + (", under other settings" if answer.headers else "")


def print_ranks(console: Console, answer: Ranks) -> None:
    rows = [
        {
            "rank": line.name, "equal": f"{line.reports:,}", "last equal step": _step(line.last_equal_step),
            "first different step": _step(line.first_different_step), "fields": ", ".join(line.fields) or "-",
        }
        for line in answer.ranks
    ]  # fmt: skip
    records(console, f"compared with {answer.compared}", tuple(rows[0]), rows)
    for line in answer.ranks:
        if line.first_different_step >= 0 or line.recorded:
            console.print(_drift(line, answer.interval))
    style = "bold green" if answer.same else "bold red"
    console.print("all ranks agree" if answer.same else "the ranks have drifted apart", style=style)


def _step(step: int) -> str:
    return "-" if step < 0 else f"{step:,}"


def _drift(line: RankLine, interval: int) -> str:
    began = f"; with reports every {interval} steps, this began after step {line.last_equal_step}" if interval > 1 else ""
    if line.recorded == line.recomputed:
        whose = f" for request {', '.join(map(str, line.requests))}" if line.requests else ""
        return f"{line.name} sampled a different token than the engine{whose} before step {line.first_different_step}{began}"
    return f"{line.name} has {line.recorded} in step {line.first_different_step} where {line.recomputed} is right{began}"
