"""cost: what each request cost: its part of each step's time, in whole microseconds that add up to all steps' time exactly.

With a price an hour, or a device's power, times become money and energy. clients.py owns the splitting.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec
from rich.console import Console

from vnext.replay.answers.clients import Client, clients
from vnext.replay.console import render
from vnext.replay.console.commands import print_answer, top_of
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.window import ALWAYS, Window, add_window, asked_window

TOP_MAX = 1_000_000
HOUR_MS = 3.6e6


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One request: its part of the steps' time, and what that costs and uses, None without a price or a power."""

    request: int
    prompt_tokens: int
    computed_tokens: int
    sampled_tokens: int
    step_ms: float
    share: float
    price: float | None
    joules: float | None


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """All requests, the costliest first; their `step_ms` add up to the log's. `per_1000` is the price of a thousand sampled tokens.
    `clock` and `ended` as in `trace`."""

    requests: list[Cost]
    step_ms: float
    price: float | None
    per_1000: float | None
    joules: float | None
    clock: str
    ended: str


def cost(log: Log, per_hour: float | None = None, watts: float | None = None, window: Window = ALWAYS) -> Costs:
    """What the requests of a log, or of a part of it, cost. `per_hour` is the price of the engine's devices, `watts` their power.
    Raises UnusableLog."""
    answer = clients(log, window, by="request")
    found = [_cost(each, per_hour, watts) for each in answer.clients]
    sampled = sum(each.sampled_tokens for each in found)
    price = None if per_hour is None else answer.step_ms / HOUR_MS * per_hour
    return Costs(
        requests=sorted(found, key=lambda each: (-each.step_ms, each.request)), step_ms=answer.step_ms, price=price,
        per_1000=None if price is None or not sampled else 1000 * price / sampled,
        joules=None if watts is None else answer.step_ms / 1e3 * watts, clock=answer.clock, ended=answer.ended,
    )  # fmt: skip


def _cost(each: Client, per_hour: float | None, watts: float | None) -> Cost:
    return Cost(
        request=int(each.client), prompt_tokens=each.prompt_tokens, computed_tokens=each.computed_tokens,
        sampled_tokens=each.sampled_tokens, step_ms=each.step_ms, share=each.share,
        price=None if per_hour is None else each.step_ms / HOUR_MS * per_hour,
        joules=None if watts is None else each.step_ms / 1e3 * watts,
    )  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    asking = command(
        "cost", run, "show what each request cost of the steps' time, in money and energy too",
        "Parts of a step follow its tokens, and add up exactly.",
    )  # fmt: skip
    asking.add_argument("--per-hour", type=float, metavar="PRICE", help="what the engine's devices cost an hour")
    asking.add_argument("--watts", type=float, help="what they draw while a step is computed")
    add_window(asking)
    asking.add_argument("--top", type=int, default=10, help="number of requests (default 10)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    for name in ("per_hour", "watts"):
        if (value := getattr(arguments, name)) is not None and not 0 <= value < float("inf"):
            raise UnusableLog(f"--{name.replace('_', '-')} {value}: it must be a number of at least 0")
    top = top_of(arguments, TOP_MAX)
    log = open_log(arguments.log)
    answer = cost(log, arguments.per_hour, arguments.watts, asked_window(log, arguments))
    print_answer(arguments, console, msgspec.structs.replace(answer, requests=answer.requests[:top]), print_costs)


def print_costs(console: Console, answer: Costs) -> None:
    """The sum, then the costliest requests."""
    parts = [f"{answer.step_ms / 1e3:,.3f} s of steps"]
    if answer.price is not None:
        parts.append(f"{answer.price:,.6f} in money" + (f", {answer.per_1000:,.6f} for 1,000 tokens" if answer.per_1000 else ""))
    if answer.joules is not None:
        parts.append(f"{answer.joules:,.1f} J")
    console.print("; ".join(parts), style="bold", soft_wrap=True)
    rows = [_row(each) for each in answer.requests]
    render.records(console, "requests", tuple(rows[0]) if rows else ("request",), rows)


def _row(each: Cost) -> dict[str, str]:
    row = {
        "request": f"{each.request}", "prompt": f"{each.prompt_tokens:,}", "computed": f"{each.computed_tokens:,}",
        "sampled": f"{each.sampled_tokens:,}", "ms": f"{each.step_ms:,.3f}", "share": f"{each.share:.2%}",
    }  # fmt: skip
    money = {} if each.price is None else {"money": f"{each.price:,.6f}"}
    return row | money | ({} if each.joules is None else {"J": f"{each.joules:,.2f}"})
