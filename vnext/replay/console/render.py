"""Renders answers as text. Owns how answers look on a terminal; other files own the answers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vnext.base.version import __version__

if TYPE_CHECKING:  # rendering one answer must not import the others
    from vnext.log.codec import LogEnd
    from vnext.replay.reading.info import Info
    from vnext.replay.reading.show import Json, Shown
    from vnext.replay.reading.verify import Verdict

WIDTH_MAX = 1_000
PERCENTILE_NAMES = ("median", "90 %", "99 %", "most")
TIME_NS_MAX = 250_000_000_000 * 10**9  # the year 9892
LABELS = {"epoch": "preempted"}  # a field of an answer as JSON, and the words for it
ROW_FIELDS = ("id", "prompt", "known", "computed", "limit", "epoch")


def print_json(console: Console, answer: msgspec.Struct | dict[str, str], **more: object) -> None:
    """One JSON object on one line."""
    console.out(json.dumps(msgspec.to_builtins(answer) | more))


def printable(value: object) -> str:
    """Text that is safe for a terminal: names come from clients and may hold control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def facts(console: Console, title: str, pairs: list[tuple[str, object]]) -> None:
    """Print a title and facts about it, one per line."""
    console.print(printable(title), style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(width=0)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row("", name, printable(value))
    console.print(table)


def records(console: Console, title: str, fields: tuple[str, ...], rows: list[Json], whole: Json | None = None) -> None:
    """Print a table of records of one shape, with `whole` of them all as the last line; one line if there are none."""
    console.print()
    if not rows:
        console.print(f"{title}: none", style="bold")
        return
    table = Table(title=f"{title}: {len(rows)}", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for field in fields:
        justify: Literal["left", "right"] = "left" if isinstance(rows[0][field], (str, list)) else "right"
        label = LABELS.get(field, field)
        width = len(label) if justify == "right" else None  # never break a header above numbers
        table.add_column(label, justify=justify, overflow="fold", header_style="cyan", min_width=width)
    for row in rows if whole is None else [*rows, whole]:
        table.add_row(*(printable(row[field]) for field in fields))
    if console.measure(table, options=console.options.update(width=WIDTH_MAX)).maximum > console.width:
        table.padding = (0, 0)
    console.print(table)


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 step, 2 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---- info --------------------------------------------------------------------------------------------------------


def print_info(console: Console, answer: Info) -> None:
    header, started = answer.header, answer.header.started
    config = started.config
    facts(console, "engine", [
        ("model", started.model),
        ("started", moment(started.started_ns)),
        ("ranks", started.world_size),
        ("policy", config.policy),
        ("cache", f"{config.page_count:,} blocks of {config.block_size} tokens"),
        ("batch", f"{counted(config.max_num_seqs, 'request')} and {counted(config.max_num_batched_tokens, 'token')} a step"),
        ("pipeline", f"{counted(config.pipeline_depth, 'step')} deep"),
    ])  # fmt: skip
    facts(console, "log", [
        ("written by", f"vnext {header.code_version}, format {header.format_version}, {_schema(answer)}"),
        ("digests", f"version {header.digest_version}"),
        ("privacy", header.privacy),
        ("begins", _beginning(answer)),
        *_recoveries(answer),
        *([("weights", f"changed, at last to {answer.weights}")] if answer.weights else []),
        ("size", f"{answer.size_bytes:,} bytes, {answer.bytes_per_sampled_token:.2f} per sampled token"),
        *([("packed", f"{answer.room_bytes:,} bytes on the disk")] if answer.room_bytes < answer.size_bytes else []),
        ("frames", f"{answer.frames:,} in {counted(answer.segments, 'segment')}, {answer.frames_lost} lost"),
        ("events", ", ".join(f"{count:,} {name}" for name, count in answer.events.items()) or "none"),
        ("end", records_of(answer.end)),
    ])  # fmt: skip
    facts(console, "work", [
        ("requests", f"{answer.requests:,} in {answer.arrivals_seconds:.1f} s, {counted(answer.aborted, 'abort')}"),
        ("steps", f"{answer.steps:,}, {counted(answer.preemptions, 'preemption')}"),
        ("tokens", f"{answer.prompt_tokens:,} of prompts, {answer.sampled_tokens:,} sampled"),
        ("prompt lengths", _percentiles(answer.prompt_percentiles)),
        ("samples a step", _percentiles(answer.batch_percentiles)),
        ("rank digests", f"{answer.rank_digests:,}"),
    ])  # fmt: skip


def moment(time_ns: int) -> str:
    """A wall-clock time in UTC."""
    if not 0 <= time_ns < TIME_NS_MAX:
        return f"{time_ns} ns, no time of ours"
    return f"{datetime.fromtimestamp(time_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _beginning(answer: Info) -> str:
    header = answer.header
    if header.index == 0:
        return "with the engine's start"
    way = "it is replayed from the state kept there" if answer.snapshot_bytes else "it cannot be replayed from there"
    return f"later, at event {header.first_event:,}: {counted(header.index, 'older segment')} not here; {way}"


def _recoveries(answer: Info) -> list[tuple[str, str]]:
    """Whose log this one continues, and how often its ranks were replaced."""
    lines, before, last = [], answer.continues, answer.last_recoveries[-1:]
    if before is not None:
        back = f"{counted(before.requests, 'request')} came back with {counted(before.tokens, 'token')} of their answers"
        why = f"after frame {before.frames:,}, because {printable(before.cause)}"
        lines.append(("continues", f"{printable(before.log) or 'an engine without a log'} {why}; {back}"))
    if last:
        times = counted(answer.recoveries, "time")
        lines.append(("recovered", f"its ranks were replaced {times}, last at event {last[0].event:,}: {printable(last[0].cause)}"))
    return lines


def _schema(answer: Info) -> str:
    return "this version's events" if answer.schema_is_ours else "another version's events"


def _percentiles(values: list[int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in zip(PERCENTILE_NAMES, values)) or "none"


# ---- verify ------------------------------------------------------------------------------------------------------


def records_of(end: LogEnd | str) -> str:
    """What reading found at the end; whether the engine has closed the log is said apart."""
    return "every record is whole" if str(end) == "complete" else str(end)


def _from_where(answer: Verdict) -> str:
    """Say what the verdict covers, for a log whose older segments are deleted."""
    return f", from event {answer.first_event:,} on: the older ones are not here" if answer.first_event > 1 else ""


def print_verdict(console: Console, answer: Verdict) -> None:
    late = f", {answer.rank_digests_unchecked:,} too late to compare" if answer.rank_digests_unchecked else ""
    facts(console, "compared", [
        ("events", f"{answer.events:,}{_from_where(answer)}"),
        ("plans", _reported_plans(answer)),
        ("digests", answer.digests_unchecked or f"{answer.digests:,} of frames, {answer.rank_digests:,} of ranks{late}"),
        ("snapshots", f"{answer.snapshots:,}"),
        ("laws", "all, after every event" if answer.laws == "all" else "the cheap ones, after every frame"),
        *_reported_grammars(answer),
        *_reported_before(answer),
        *_reported_prefill(answer),
        ("end", records_of(answer.end) if answer.end else "stopped at the first difference"),
    ])  # fmt: skip
    if answer.decisions:
        print_decisions(console, answer)
    found = answer.difference
    if found is not None and found not in answer.decisions:
        facts(console, "first difference", [
            ("where", f"step {found.step}, event {found.event}"),
            ("field", found.field),
            ("recorded", found.recorded or "-"),
            ("recomputed", found.recomputed or "-"),
            ("why", found.message),
        ])  # fmt: skip
    console.print(conclusion(answer), style="bold green" if answer.same else "bold red")


def print_decisions(console: Console, answer: Verdict) -> None:
    """Print the decisions that the scheduler would not make today."""
    rows = [{"step": each.step, "field": each.field, "then": each.recorded, "now": each.recomputed} for each in answer.decisions]
    title = f"this scheduler ({__version__}) would decide differently from vnext {answer.written_by}"
    records(console, f"{title}, {counted(answer.decisions_differ, 'step')}; the first", tuple(rows[0]), rows)


def _reported_grammars(answer: Verdict) -> list[tuple[str, str]]:
    if answer.constrained_tokens < 0:
        return []
    return [("grammars", f"{counted(answer.constrained_tokens, 'token')} of {counted(answer.constrained_requests, 'request')}")]


def _reported_before(answer: Verdict) -> list[tuple[str, str]]:
    if (found := answer.continued) is None:
        return []
    late = f"; {counted(found.unlogged, 'request')} had not reached it" if found.unlogged else ""
    back = f"{counted(found.requests, 'request')} came back with {counted(found.tokens, 'token')}"
    return [("continues", f"{printable(found.log)}: {printable(found.difference) or f'{back}, all of which it gave them{late}'}")]


def _reported_prefill(answer: Verdict) -> list[tuple[str, str]]:
    if (found := answer.handed_over) is None:
        return []
    came = f"{counted(found.blocks, 'block')} of {counted(found.requests, 'request')} came from there, all of which it handed over"
    return [("prefill", f"{printable(found.log)}: {printable(found.difference) or came}")]


def _reported_plans(answer: Verdict) -> str:
    if answer.plans_unchecked:
        return f"{answer.steps:,}, not decided again: {answer.plans_unchecked}"
    return f"{answer.steps:,} decided again"


def conclusion(answer: Verdict) -> str:
    if answer.difference is not None and answer.difference in answer.decisions:
        return f"the log folds, but {counted(answer.decisions_differ, 'decision')} of {answer.steps:,} would differ"
    if answer.difference is not None:
        return "the log does not replay"
    if answer.handed_over is not None and answer.handed_over.difference:
        return "the log replays, and has blocks that the other engine did not hand over"
    if answer.continued is not None and answer.continued.difference:
        return "the log replays, and does not go on where the older one ended"
    if answer.end is not None and answer.end.kind == "torn":
        return "the log replays exactly up to its torn end"
    if answer.same:
        unchecked = ", as far as it is without deciding again" if answer.plans_unchecked else ""
        undigested = "; digests not compared" if answer.digests_unchecked else ""
        return f"the log replays exactly{unchecked}{undigested}"
    return "what can be read replays exactly, but the log is damaged"


# ---- show --------------------------------------------------------------------------------------------------------


def print_shown(console: Console, answer: Shown) -> None:
    state = answer.state
    facts(console, f"step {answer.step}" if answer.plan else f"end of the log, after step {answer.step}", [
        ("event", answer.event),
        ("digest", answer.digest),
        *([("plan", _plan(answer))] if answer.plan else []),
        ("blocks", ", ".join(f"{count:,} {name}" for name, count in state["blocks"].items() if name != "next")),
        ("requests", _totals(state["counters"], ("finished", "aborted", "preempted"))),
        ("tokens", _totals(state["counters"], ("prompt_tokens", "generated_tokens"))),
        ("prefix cache", _totals(state["counters"], ("prefix_queried_tokens", "prefix_hit_tokens"))),
        *([("disk tier", _disk(state["disk"]))] if state.get("disk") else []),
        *([("pins", _pins(state["pins"], state.get("clock", 0)))] if state.get("pins") else []),
        *([("caution", f"requests below {state['cautious']} join one at a time")] if state.get("cautious") else []),
    ])  # fmt: skip
    steps, rows = _with_steps_in_flight(state)
    records(console, "running", (*ROW_FIELDS, *steps, "blocks"), rows)
    records(console, "waiting", ("id", "priority", "known", "epoch"), state["waiting"])
    if slots := state.get("slots"):
        held = [{**slot, "slot": place} for place, slot in enumerate(slots) if slot]
        records(console, "adapters", ("slot", "name", "digest", "requests"), held)


def _pins(pins: Json, clock: int) -> str:
    ends = f", the next one ends in {pins['next_end'] - clock:,} s" if pins["count"] else ""
    over = ", ".join(f"{pins[name]:,} {name}" for name in ("expired", "displaced", "yielded", "dropped") if pins[name])
    return f"{pins['count']:,} blocks{ends}; of {pins['pinned']:,}: {over or 'none is over'}"


def _disk(disk: Json) -> str:
    moving = "".join(f"; {each['blocks']} are read for request {each['request']}" for each in disk["transfers"])
    return f"{disk['blocks']:,} blocks of {disk['capacity']:,}, {disk['promoted']:,} read back{moving}"


def _totals(counters: dict[str, int], names: tuple[str, ...]) -> str:
    words = {name: name.removeprefix("prefix_").removesuffix("_tokens") for name in names}
    return ", ".join(f"{counters[name]:,} {words[name]}" for name in names)


def _with_steps_in_flight(state: Json) -> tuple[list[str], list[Json]]:
    """The running rows, with a column for each step in flight: the positions that it computes, and + where it samples."""
    columns = {f"step {scheduled['step']}": _chunks(scheduled) for scheduled in state["flights"]}
    rows = []
    for row in state["running"]:
        chunks = {name: of_step.get(row["id"], "") for name, of_step in columns.items()}
        rows.append({**row, **chunks, "blocks": ranges(row["table"])})
    return list(columns), rows


def ranges(numbers: list[int]) -> str:
    """Numbers in order, with runs merged: 3 to 5 and 9 are 3-5 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _chunks(scheduled: Json) -> dict[int, str]:
    return {entry["id"]: _chunk(entry) for entry in scheduled["requests"]}


def _chunk(entry: Json) -> str:
    last = entry["start"] + entry["tokens"] - 1
    places = f"{entry['start']}" if entry["tokens"] == 1 else f"{entry['start']}-{last}"
    return f"{places} +" if entry["samples"] else places


def _plan(answer: Shown) -> str:
    plan = answer.plan
    parts = [f"{name} {getattr(plan, name)}" for name in ("preempted", "changed", "admitted") if getattr(plan, name)]
    return ", ".join(parts) or "every running request advances as expected"
