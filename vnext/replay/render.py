"""Tables for people. Owns how answers look on a terminal; the answers themselves are other files' structs."""

from __future__ import annotations

import json

import msgspec
from rich.console import Console
from rich.table import Table

from vnext.replay.info import PERCENTILES, Info
from vnext.replay.life import Life
from vnext.replay.show import Shown
from vnext.replay.verify import Verdict

ROW_FIELDS = ("id", "prompt", "known", "computed", "pending", "limit", "epoch", "table")


def print_json(console: Console, answer: msgspec.Struct) -> None:
    """One JSON object on one line."""
    console.out(json.dumps(msgspec.to_builtins(answer)))


def printable(value: object) -> str:
    """Text for a terminal: names come from clients and may hold control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def facts(console: Console, title: str, pairs: list[tuple[str, object]]) -> None:
    """A two-column table."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, printable(value))
    console.print(table)


def records(console: Console, title: str, fields: tuple[str, ...], rows: list[dict]) -> None:
    """A table of equal records; nothing if there are none."""
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(title=f"{title} ({len(rows)})", title_justify="left")
    for field in fields:
        table.add_column(field, justify="left" if isinstance(rows[0][field], (str, list)) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(printable(row[field]) for field in fields))
    console.print(table)


def print_info(console: Console, answer: Info) -> None:
    header, config = answer.header, answer.header.started.config
    names = "/".join(f"p{percentile}" for percentile in PERCENTILES)
    facts(console, "log", [
        ("model", header.started.model),
        ("ranks", header.started.world_size),
        ("code version", header.code_version),
        ("format", header.format_version),
        ("event types", "this version's" if answer.schema_is_ours else "another version's"),
        ("privacy", header.privacy),
        ("policy", config.policy),
        ("cache", f"{config.block_count} blocks of {config.block_size} tokens"),
        ("batch", f"{config.running_max} requests, {config.batch_tokens_max} tokens a step"),
        ("pipeline depth", config.pipeline_depth),
        ("segments, frames", f"{answer.segments}, {answer.frames}"),
        ("frames lost", answer.frames_lost),
        ("size", f"{answer.size_bytes} bytes, {answer.bytes_per_generated_token:.2f} per generated token"),
        ("events", ", ".join(f"{count} {name}" for name, count in answer.events.items())),
        ("requests, aborts, preemptions", f"{answer.requests}, {answer.aborted}, {answer.preemptions}"),
        ("steps", answer.steps),
        ("prompt, generated tokens", f"{answer.prompt_tokens}, {answer.generated_tokens}"),
        (f"prompt tokens {names}", answer.prompt_percentiles),
        (f"samples a step {names}", answer.batch_percentiles),
        ("rank digests", answer.rank_digests),
        ("end", answer.end.message or "complete"),
    ])  # fmt: skip


def print_verdict(console: Console, answer: Verdict) -> None:
    facts(console, "verified", [
        ("events", answer.events),
        ("plans decided anew", answer.steps),
        ("chained digests", answer.digests),
        ("rank digests", f"{answer.rank_digests} ({answer.rank_digests_unchecked} too late to check)"),
        ("laws", answer.laws),
        ("end", answer.end.message or "complete" if answer.end else "stopped at the first difference"),
    ])  # fmt: skip
    found = answer.difference
    if found is not None:
        facts(console, "first difference", [
            ("step, event", f"{found.step}, {found.event}"),
            ("field", found.field),
            ("recorded", found.recorded or "-"),
            ("recomputed", found.recomputed or "-"),
            ("why", found.message),
        ])  # fmt: skip
    console.print(conclusion(answer))


def conclusion(answer: Verdict) -> str:
    """The verdict in one line."""
    if answer.difference is not None:
        return "the log does not replay"
    if answer.same:
        return "the log replays exactly"
    return "what can be read replays exactly, but the log is damaged"


def print_shown(console: Console, answer: Shown) -> None:
    state = answer.state
    facts(console, f"step {answer.step}" if answer.plan else "end of the log", [
        ("event", answer.event),
        ("digest", answer.digest),
        ("plan", _plan(answer)),
        ("blocks", ", ".join(f"{count} {name}" for name, count in state["blocks"].items() if name != "next")),
        ("counters", ", ".join(f"{count} {name}" for name, count in state["counters"].items())),
    ])  # fmt: skip
    records(console, "running", ROW_FIELDS, state["running"])
    records(console, "waiting", ("id", "priority", "known", "epoch"), state["waiting"])
    for flight in state["flights"]:
        records(console, f"in flight: step {flight['step']}", ("id", "start", "tokens", "samples"), flight["requests"])


def _plan(answer: Shown) -> str:
    plan = answer.plan
    if plan is None:
        return "-"
    parts = [f"{name} {getattr(plan, name)}" for name in ("preempted", "changed", "admitted") if getattr(plan, name)]
    return ", ".join(parts) or "as expected"


def print_life(console: Console, answer: Life) -> None:
    facts(console, f"request {answer.id}", [
        ("name", answer.name),
        ("priority", answer.priority),
        ("prompt", f"{answer.prompt_tokens} tokens, {answer.cached_tokens} of them in the cache"),
        ("generated", f"{answer.generated_tokens} of at most {answer.tokens_max} tokens"),
        ("queued before admission", f"{answer.queued_steps} steps"),
        ("not scheduled in", f"{answer.waited_steps} steps"),
        ("preemptions", answer.preemptions),
        ("end", answer.finish),
    ])  # fmt: skip
    moments = [msgspec.to_builtins(moment) for moment in answer.moments]
    records(console, "life", ("event", "step", "kind", "tokens", "note"), moments)
