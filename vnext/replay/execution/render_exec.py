"""Renders the answers of exec and bisect for a terminal."""

from __future__ import annotations

from rich.console import Console

from vnext.replay.console.render import counted, facts, records, records_of
from vnext.replay.execution.bisection import Bisected, OperationDifference
from vnext.replay.execution.execution import Executed, TokenDifference

SEEN_FIELDS = ("operation", "calls", "largest")
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
        ("end", records_of(answer.end)),
    ])  # fmt: skip
    if answer.first is not None and answer.differences:
        print_tokens(console, answer.first, answer.differences)
    print_lacking(console, answer.lacking)
    console.print(_conclusion(answer), style="bold green" if answer.same else "bold red", soft_wrap=True)


def print_lacking(console: Console, lacking: list[str]) -> None:
    for sentence in lacking:
        console.print(f"not compared: {sentence}", style="yellow", soft_wrap=True)


def numbers(numerics: dict[str, object]) -> str:
    """How numbers are stored, multiplied and shared, in words."""
    ranks, threads = int(str(numerics["ranks"])), int(str(numerics["threads"]))
    form = [] if numerics["quantization"] == "none" else [numerics["quantization"]]
    form += [] if numerics["activations"] == "int8" else [f"activations in {numerics['activations']}"]
    cache = [] if numerics["kv_cache_dtype"] == "auto" else [f"a cache of {numerics['kv_cache_dtype']}"]
    words = [numerics["dtype"], *form, *cache, numerics["kernels"], counted(threads, "thread")]
    return ", ".join(map(str, [*words, *([counted(ranks, "rank")] if ranks > 1 else [])]))


def print_tokens(console: Console, first: TokenDifference, differences: list[TokenDifference]) -> None:
    facts(console, "first difference", [
        ("where", f"step {first.step}, request {first.request}, position {first.position}"),
        ("recorded", f"token {first.recorded}, log-probability {first.recorded_logprob:.4f} in this run"),
        ("again", f"token {first.again}, log-probability {first.again_logprob:.4f} in this run"),
        ("margin", f"{first.margin:.6f}"),
    ])  # fmt: skip
    if not differences:
        return
    rows = [{field: getattr(each, field) for field in TOKEN_FIELDS} | {"margin": f"{each.margin:.6f}"} for each in differences]
    records(console, "first differences", TOKEN_FIELDS, rows)


def _not_compared(answer: Executed) -> str:
    parts = [
        *([f"{answer.unseen:,} more planned before them"] if answer.unseen else []),
        *([f"{answer.uncommitted:,} more never committed"] if answer.uncommitted else []),
        *([f"{answer.skipped:,} more with weights that are not here"] if answer.skipped else []),
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _conclusion(answer: Executed) -> str:
    if answer.differ:
        return f"{answer.differ:,} of {counted(answer.tokens, 'token')} differ"
    if not answer.same:
        return f"{counted(answer.tokens, 'token')} are the same, but the log cannot be read to its end"
    return "every token is the same"


# ---- bisect ------------------------------------------------------------------------------------------------------


def print_bisected(console: Console, answer: Bisected) -> None:
    facts(console, "run again", [
        ("model", answer.model),
        ("numbers", numbers(answer.numerics)),
        ("against", "each request alone" if answer.against is None else numbers(answer.against)),
        ("tolerance", f"{answer.tolerance:g} of a row's largest magnitude" if answer.tolerance else "none: every bit counts"),
        *[(f"other {ground.name}", f"{ground.here} here, {ground.there} in the log") for ground in answer.elsewhere],
        ("steps", f"{answer.steps:,}"),
        ("end", records_of(answer.end)),
    ])  # fmt: skip
    seen = [(each.operation, f"{each.calls:,}", f"{each.max_rel:.2g}") for each in answer.operations]
    rows = [dict(zip(SEEN_FIELDS, each)) for each in seen]
    records(console, "operations made again, largest relative difference", SEEN_FIELDS, rows)
    if answer.token is not None:
        print_tokens(console, answer.token, [])
    if answer.found is not None:
        _print_found(console, answer.found)
    print_lacking(console, answer.lacking)
    console.print(_bisected(answer), style="bold green" if answer.same else "bold red", soft_wrap=True)


def place(found: OperationDifference) -> str:
    where = f"layer {found.layer}" if found.layer >= 0 else "outside of the layers"
    return f"{where}, {found.operation}"


def _print_found(console: Console, found: OperationDifference) -> None:
    shown = ", ".join(f"{row.row} (request {row.request}, position {row.position})" for row in found.rows)
    more = ", ..." if found.rows_differ > len(found.rows) else ""
    facts(console, "first operation that differs", [
        ("where", f"step {found.step}, {place(found)}"),
        ("weight", found.weight or "-"),
        ("result", f"{found.part} {list(found.shape)} {found.dtype}"),
        ("difference", f"{found.max_abs:g} at most, {found.max_rel:g} of a row's largest magnitude"),
        ("elements", f"{found.elements_differ:,}"),
        ("rows", f"{found.rows_differ:,} of {found.shape[0]:,}: {shown}{more}"),
    ])  # fmt: skip


def _bisected(answer: Bisected) -> str:
    if answer.found is not None:
        return f"step {answer.found.step}, {place(answer.found)} differs first"
    if answer.token is not None:
        return f"tokens differ from step {answer.token.step} on, but no operation does: another machine or version made them"
    return "no operation differs" if answer.same else "no operation differs, but the log cannot be read to its end"
