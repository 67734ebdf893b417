"""Renders a request's life for a terminal: steps that only decode are merged, everything else has its own line.

Owns the merging; request_life.py owns what happened.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vnext.replay.answers.request_life import Moment, RequestLife, Waited
from vnext.replay.answers.seen_inputs import in_a_line
from vnext.replay.answers.waiting import in_time
from vnext.replay.console.render import counted, facts, printable, records

SAMPLES_SHOWN = 12


class Span(msgspec.Struct):
    """Consecutive moments of one kind, step by step, oldest first."""

    moments: list[Moment]

    @property
    def first(self) -> Moment:
        return self.moments[0]

    @property
    def last(self) -> Moment:
        return self.moments[-1]


def print_life(console: Console, answer: RequestLife) -> None:
    if answer.waited.line:
        console.print(answer.waited.line, style="bold", soft_wrap=True)
    queued, waited = counted(answer.queued_steps, "step"), counted(answer.waited_steps, "step")
    weight = f", weight {answer.weight}" if answer.weight != 1 else ""
    facts(console, f"request {answer.id}", [
        ("name", answer.name),
        *([("client", f"{answer.client or 'unknown'}{weight}")] if answer.client or weight else []),
        ("arrived", f"{answer.arrival_s:.3f} s after the engine's start, priority {answer.priority}"),
        ("prompt", f"{counted(answer.prompt_tokens, 'token')}, {answer.cached_tokens:,} of them from the cache"),
        ("answer", f"{counted(answer.generated_tokens, 'token')} of at most {answer.tokens_max:,}{_brought(answer)}"),
        ("waited", f"{queued} before its first, {waited} in all"),
        *([("because of", _reasons(answer))] if answer.waits else []),
        *([("in time", times)] if ", " in (times := in_time(answer.waited.by_reason)) else []),
        *([("adapter", printable(answer.adapter))] if answer.adapter else []),
        ("preempted", counted(answer.preemptions, "time")),
        *([("recovered", f"{counted(answer.recoveries, 'time')}: the ranks were replaced")] if answer.recoveries else []),
        ("end", answer.finish),
        *([("token ids", "pseudonyms: this log holds no text")] if answer.privacy == "shape" else []),
    ])  # fmt: skip
    if answer.waits:
        print_waits(console, answer)
    if answer.inputs:
        records(console, "inputs", ("of its prompt",), [{"of its prompt": in_a_line(each)} for each in answer.inputs])
    table = Table(box=SIMPLE_HEAD)
    table.add_column("step", justify="right", header_style="cyan", no_wrap=True)
    table.add_column("event", justify="right", header_style="cyan", no_wrap=True)
    table.add_column("what happened", overflow="fold", header_style="cyan")
    for span in spans(answer.moments):
        step = "-" if span.first.step < 0 else _range(span.first.step, span.last.step)
        table.add_row(step, _range(span.first.event, span.last.event), printable(reported(span)))
    console.print(table)


def _brought(answer: RequestLife) -> str:
    """What another engine had given it."""
    if not answer.continues:
        return ""
    brought = counted(answer.resumed_tokens, "token")
    return f", behind {brought} of another engine, whose log is {printable(answer.continues)}"


def _reasons(answer: RequestLife) -> str:
    """How many steps each reason has cost, most first."""
    steps = Counter[str]()
    for wait in answer.waits:
        steps[wait.why] += wait.last_step - wait.first_step + 1
    return ", ".join(f"{why} {count:,}" for why, count in steps.most_common())


def print_waits(console: Console, answer: RequestLife) -> None:
    """Print the reason for every step in which the request could have computed something but did not."""
    rows = [{"steps": _range(each.first_step, each.last_step), "why not": reason(each)} for each in answer.waits]
    records(console, "steps that left it out", ("steps", "why not"), rows)
    if answer.why_unknown:
        console.print(printable(answer.why_unknown))


def reason(wait: Waited) -> str:
    """Why a request computed nothing, in words."""
    match wait.why:
        case "budget":
            return f"token budget: it needs {counted(wait.need, 'token')}, the step has {wait.have:,} left"
        case "blocks":
            return f"blocks: it needs {wait.need:,} and {wait.have:,} are free"
        case "sequences":
            return f"sequences: {wait.have:,} requests run, the maximum"
        case "adapter":
            return "adapter: no slot holds it yet"
        case "order":
            return f"order: request {wait.behind} comes first and is waiting too"
        case "preempted":
            return f"it is preempted: running requests need {counted(wait.need, 'block')} and {wait.have:,} are free"
        case "room":
            need = counted(wait.need, "block")
            return f"no admission in a step that preempts: running requests need {need} and {wait.have:,} are free"
        case "disk":
            return "disk: its blocks, or vectors of its images and sounds, are being read"
        case "pause":
            return "pause: the engine was paused"
        case "caution":
            return "caution: behind fatal steps, requests are admitted one at a time"
        case "states":
            return f"states: it needs {counted(wait.need, 'state page')} and {wait.have:,} are free"
        case "inputs":
            return "inputs: as many images and sounds as a step may encode came before"
        case "microbatch":
            return "microbatch: its token is in flight, or it is the turn of others"
        case _:
            return "unknown: the scheduler was not asked, or decides differently now"


def spans(moments: list[Moment]) -> list[Span]:
    """Merge moments into spans. Steady decoding alternates between computing and sampling, so one open span of each
    kind is extended."""
    found: list[Span] = []
    still_open: dict[str, Span] = {}
    for moment in moments:
        span = still_open.get(moment.kind)
        if span is not None and moment.step - span.last.step in (0, 1) and alike(moment, span.last):
            span.moments.append(moment)
            continue
        if moment.kind != "sampled" and not (moment.kind == "computed" and moment.tokens == 1):
            still_open.clear()
        still_open[moment.kind] = Span([moment])
        found.append(still_open[moment.kind])
    return found


def alike(one: Moment, other: Moment) -> bool:
    """Whether both are of one token, computed with the same adapter."""
    return one.tokens == other.tokens == 1 and one.adapter == other.adapter


def reported(span: Span) -> str:
    """A span's moments in one line."""
    first, last = span.first, span.last
    match first.kind:
        case "arrived":
            return f"arrives, {first.note}"
        case "admitted":
            return f"is admitted, {counted(first.tokens, 'token')} in the cache"
        case "preempted":
            return f"is preempted with {counted(first.tokens, 'token')} computed: {first.note}"
        case "recovered":
            return f"its ranks are replaced, {counted(first.tokens, 'token')} computed are lost: {first.note}"
        case "reads":
            return first.note
        case "ended":
            return f"ends: {first.note}"
        case "sampled":
            return f"samples {_samples(span)}"
        case "computed" if len(span.moments) > 1:
            return f"computes 1 token per step, {_first_position(first)} to {_last_position(last)}"
        case _:
            return f"computes {counted(first.tokens, 'token')}: {first.note}"


def _samples(span: Span) -> str:
    tokens = [moment.note.removeprefix("token ") for moment in span.moments]
    shown = " ".join(tokens[:SAMPLES_SHOWN])
    more = f" ... ({len(tokens) - SAMPLES_SHOWN} more)" if len(tokens) > SAMPLES_SHOWN else ""
    adapter = f", with the adapter {span.first.adapter_name} {span.first.adapter}" if span.first.adapter else ""
    return f"{shown}{more}{adapter}"


def _first_position(moment: Moment) -> str:
    return moment.note.split(" to ")[0]


def _last_position(moment: Moment) -> str:
    return moment.note.split(" to ")[1].split(",")[0]


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"
