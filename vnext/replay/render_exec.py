"""Text for people: the answers of exec and bisect."""

from __future__ import annotations

from rich.console import Console

from vnext.replay.execution import Executed, TokenDifference
from vnext.replay.render import counted, facts, records

TOKEN_FIELDS = ("step", "request", "position", "place", "recorded", "again", "margin")


def print_executed(console: Console, answer: Executed) -> None:
    facts(console, "run again", [
        ("model", answer.model),
        ("numbers", numbers(answer.numerics)),
        ("batches", "each request alone" if answer.mode == "alone" else "as recorded"),
        ("batch invariant", answer.invariance),
        *[(f"other {ground.name}", f"{ground.here} here, {ground.there} in the log") for ground in answer.elsewhere],
    ])  # fmt: skip
    facts(console, "compared", [
        ("steps", f"{answer.steps:,}{_not_compared(answer)}"),
        ("requests", f"{answer.requests:,}"),
        ("tokens", f"{answer.tokens:,}"),
        ("rebuilt", f"{counted(answer.rebuilt_tokens, 'position')} of the cache, older than the first step"),
        ("end", answer.end),
    ])  # fmt: skip
    if answer.differences:
        print_tokens(console, answer.first, answer.differences)
    console.print(_conclusion(answer), style="bold green" if answer.same else "bold red", soft_wrap=True)


def numbers(numerics: dict[str, object]) -> str:
    """How numbers are held, multiplied and shared."""
    ranks, threads = numerics["ranks"], numerics["threads"]
    form = [] if numerics["quantization"] == "none" else [numerics["quantization"]]
    words = [numerics["dtype"], *form, numerics["kernels"], counted(threads, "thread")]
    return ", ".join(map(str, [*words, *([counted(ranks, "rank")] if ranks > 1 else [])]))


def print_tokens(console: Console, first: TokenDifference, differences: list[TokenDifference]) -> None:
    """The first difference, then a table of them."""
    facts(console, "first difference", [
        ("where", f"step {first.step}, request {first.request}, position {first.position}"),
        ("recorded", f"token {first.recorded}, log-probability {first.recorded_logprob:.4f} in this run"),
        ("again", f"token {first.again}, log-probability {first.again_logprob:.4f} in this run"),
        ("margin", f"{first.margin:.6f}"),
    ])  # fmt: skip
    rows = [{field: getattr(each, field) for field in TOKEN_FIELDS} | {"margin": f"{each.margin:.6f}"} for each in differences]
    records(console, "first differences", TOKEN_FIELDS, rows)


def _not_compared(answer: Executed) -> str:
    parts = [
        *([f"{answer.unseen:,} more planned before them"] if answer.unseen else []),
        *([f"{answer.uncommitted:,} more never committed"] if answer.uncommitted else []),
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _conclusion(answer: Executed) -> str:
    if answer.differ:
        return f"{answer.differ:,} of {counted(answer.tokens, 'token')} came out otherwise"
    if not answer.same:
        return f"{counted(answer.tokens, 'token')} came out again, but the log cannot be read to its end"
    return "every token came out again"
