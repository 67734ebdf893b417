"""report: an incident as one HTML file to keep: explain's lines, plots, the worst step, the slowest requests, the clients.

Owns the page; explain.py owns the words on the cause and plots.py how a plot looks. The file loads nothing and runs no script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from vnext.replay.answers.clients import Client, clients
from vnext.replay.causes.charging import is_slow, usual_us
from vnext.replay.causes.explain import Explained, explained_by, failure, lines_of
from vnext.replay.causes.ledger import Ledger, ledger
from vnext.replay.causes.part import Asked, part_of
from vnext.replay.console.commands import how_ended, index_of, print_answer, writing
from vnext.replay.console.ended import COMPLETE, Ended
from vnext.replay.console.render import counted, printable
from vnext.replay.reading.show import state_at
from vnext.replay.reading.source import Log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.window import add_at
from vnext.replay.tables import plots
from vnext.replay.tables.columns import Columns, requests_of, steps_of

SLOWEST, LARGEST, CLIENTS = 12, 8, 6


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The file that was written, its headline, and how many requests and steps it is about. `ended` as in `trace`."""

    out: str
    headline: str
    requests: int
    steps: int
    ended: str


def report(path: Path, out: Path, asked: Asked, end: Ended = COMPLETE) -> Report:
    """Write the page of a log, which ends so, or of what is asked. Raises UnusableLog."""
    with part_of(path, asked) as (log, counts, window):
        written = ledger(log, counts)
        answer = explained_by(written, path, log, window, failure(written, end, asked, counts, window))
        page = _Page(path, log, written, answer)
        text = page.text(end.line if end != COMPLETE else written.ended)
    with writing(out, "place"):
        out.write_text(text)
    return Report(
        out=str(out), headline=answer.headline, requests=len(page.requests["id"]), steps=page.step_count, ended=written.ended
    )  # fmt: skip


class _Page:
    """The parts of the page."""

    def __init__(self, path: Path, log: Log, written: Ledger, answer: Explained) -> None:
        timestamps = timestamps_of(log)
        wall_s = timestamps.wall_minus_monotonic_ns / 1e9 if timestamps is not None else 0.0
        self.path, self.log, self.answer, self.is_timed = path, log, answer, written.clock == "stamps"
        self.requests, steps = requests_of(written, wall_s), steps_of(written, wall_s)
        is_step = steps["stopped"] == ""
        self.usual_ms = usual_us(written.entries)[0][is_step] / 1e3 if is_step.any() else np.zeros(0)
        self.steps: Columns = {name: column[is_step] for name, column in steps.items()}
        self.step_count = int(is_step.sum())
        self.worst = self._worst() if self.step_count else -1
        self.axis = self._axis(steps["ended"])

    def _worst(self) -> int:
        """The step that was slow by most; where none was, the longest."""
        took_ms = self.steps["ms"]
        pairs = zip(took_ms.tolist(), self.usual_ms.tolist())
        late_ms = [ms - usual if is_slow(1e3 * ms, 1e3 * usual) else 0.0 for ms, usual in pairs]
        return int(np.argmax(late_ms if any(late_ms) else took_ms))

    def _axis(self, ended: np.ndarray) -> plots.Axis:
        known = np.concatenate([ended, self.requests["came"]])
        known = known[np.isfinite(known)]
        begin, end = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        worst = float(self.steps["ended"][self.worst]) if self.step_count else np.nan
        top = self.answer.causes[0] if self.answer.causes else None
        cause = (np.nan, np.nan)
        if top is not None and top.from_s is not None and top.to_s is not None:
            cause = top.from_s, top.to_s
        return plots.Axis(begin, end, self.moment, worst, cause)

    def moment(self, seconds: float) -> str:
        """A time in words; the step of that number where the log has no times."""
        if not np.isfinite(seconds):
            return "-"
        return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}" if self.is_timed else f"step {1e3 * seconds:,.0f}"

    def text(self, end: str) -> str:
        started, name = self.log.header.started, escape(printable(self.path.name))
        when = f"{datetime.fromtimestamp(self.axis.begin, UTC):%Y-%m-%d}, " if self.is_timed and self.step_count else ""
        about = [
            f"{when}{self.moment(self.axis.begin)} to {self.moment(self.axis.end)}{' UTC' if self.is_timed else ''}",
            counted(len(self.requests["id"]), "request"), counted(self.step_count, "step"), printable(started.model) or "no model",
        ]  # fmt: skip
        damage = f'<p class="damaged">{escape(printable(end))}</p>' if end != "complete" else ""
        untimed = "" if self.is_timed else '<p class="note">The log has no times: a step is taken as a millisecond.</p>'
        headline = escape(self.answer.headline)
        body = "".join([
            f"<header><p>{escape(' · '.join(about))}</p><h1>{headline}</h1>{damage}{untimed}</header>",
            f'<main><dl class="lines">{_lines(self.answer)}</dl>',
            *self._plots(), *self._worst_step(), *self._slowest(), *self._clients(), "</main>",
            f"<footer><p>Log {name}, of vnext {escape(printable(self.log.header.code_version))}</p></footer>",
        ])  # fmt: skip
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}: {headline}</title>'
        style = f"<style>{plots.PAGE}{plots.STYLE}</style>"
        return f'<!doctype html><html lang="en"><head>{head}{style}</head><body>{body}</body></html>\n'

    def _plots(self) -> Iterable[str]:
        if not self.step_count:
            yield '<p class="note">No step was computed.</p>'
            return
        steps, requests, axis = self.steps, self.requests, self.axis
        marked = " Shaded: when the cause cost time." if np.isfinite(axis.cause).all() else ""
        yield f'<h2>Over time</h2><p class="note">Dashed: the worst step.{marked}</p><div class="plots">'
        tips = [
            f"step {step}, {self.moment(ended)}: {ms:,.1f} ms, {counted(tokens, 'token')} of {counted(count, 'request')}"
            for step, ended, ms, tokens, count in _rows(steps, "step", "ended", "ms", "tokens", "requests")
        ]
        yield plots.curves("Time of a step", "ms", axis, steps["ended"], [plots.Curve("step", "steps", steps["ms"])], tips)
        tips = [
            f"request {id_}, {self.moment(came)}: first token after {ms:,.0f} ms, {counted(prompt, 'token')} of prompt"
            for id_, came, ms, prompt in _rows(requests, "id", "came", "ttft_ms", "prompt_tokens")
        ]
        firsts = plots.Curve("first token", "steps", requests["ttft_ms"])
        yield plots.dots("Time to first token", "ms, by arrival", axis, requests["came"], firsts, tips)
        both = [plots.Curve("running", "running", steps["requests"]), plots.Curve("waiting", "waiting", steps["queue"])]
        yield plots.curves("Requests", "at once", axis, steps["ended"], both)
        free = plots.Curve("free", "free", steps["free"], np.minimum)
        yield plots.curves("Free pages of the cache", "least", axis, steps["ended"], [free])
        yield "</div>"

    def _worst_step(self) -> Iterable[str]:
        if not self.step_count:
            return
        names = ("step", "ended", "ms", "tokens", "requests", "queue", "free")
        step, ended, ms, tokens, count, queue, free = (self.steps[name][self.worst].item() for name in names)
        usual, size = float(self.usual_ms[self.worst]), f"{counted(tokens, 'token')} of {counted(count, 'request')}"
        yield f"<h2>The worst step: {step}</h2><p>It ended at {self.moment(ended)} and took {ms:,.1f} ms; "
        yield f"{usual:,.1f} ms are usual for {size}. Waiting: {counted(queue, 'request')}; free: {counted(free, 'page')}.</p>"
        scheduled = state_at(index_of(self.path), step)[0].in_flight[-1]
        place_of = {id_: place for place, id_ in enumerate(self.requests["id"].tolist())}
        largest = np.argsort(-scheduled.counts, kind="stable")[:LARGEST].tolist()
        rows = [
            (id_, _name(self.requests, place_of.get(id_)), f"{scheduled.counts[place]:,}", f"{scheduled.starts[place]:,}")
            for place, id_ in ((place, int(scheduled.ids[place])) for place in largest)
        ]
        yield _table("What was in it", ("request", "name", "tokens", "from token"), rows)

    def _slowest(self) -> Iterable[str]:
        requests = self.requests
        order = np.argsort(-np.nan_to_num(requests["ttft_ms"], nan=-1.0), kind="stable")[:SLOWEST]
        places = [place for place in order.tolist() if np.isfinite(requests["ttft_ms"][place])]
        if not places:
            return
        rows = []
        for place in places:
            row = {name: column[place] for name, column in requests.items()}
            times = (f"{row[name]:,.0f}" if np.isfinite(row[name]) else "-" for name in ("ttft_ms", "itl_ms", "e2e_ms", "step_ms"))
            sizes = (f"{row[name]:,}" for name in ("prompt_tokens", "tokens"))
            of = (row["id"], _name(requests, place), row["client"][:8] or "-", self.moment(row["came"]))
            rows.append((*of, *sizes, *times, row["end"] or "lives"))
        heads = ("request", "name", "client", "came", "prompt", "answer", "first ms", "gap ms", "whole ms", "of steps ms", "end")
        yield f"<h2>The slowest requests</h2>{_table('By their first token', heads, rows)}"

    def _clients(self) -> Iterable[str]:
        found = clients(self.log).clients
        if len(found) > 1:
            heads = ("client", "requests", "tokens", "share", "waited s", "held up s", "first ms", "99 %")
            yield f"<h2>The clients</h2>{_table('By how long they held others up', heads, map(_client, found[:CLIENTS]))}"


def _client(each: Client) -> Sequence[object]:
    first = ("-" if ms is None else f"{ms:,.0f}" for ms in each.first_ms)
    waits = (f"{ms / 1e3:,.1f}" for ms in (each.waited_ms, each.held_ms))
    return (each.client[:8] or "unknown", f"{each.requests:,}", f"{each.computed_tokens:,}", f"{each.share:.1%}", *waits, *first)


def _name(requests: Columns, place: int | None) -> str:
    return "-" if place is None else str(requests["name"][place]) or "-"


def _rows(columns: Columns, *names: str) -> Iterable[tuple[Any, ...]]:
    return zip(*(columns[name].tolist() for name in names))


def _lines(answer: Explained) -> str:
    """What explain says below its headline, as terms and their lines."""
    found = ""
    for word, line in lines_of(answer):
        text = escape(printable(line))
        found += f"<dt>{word}</dt><dd>{f'<code>{text}</code>' if line in answer.commands else text}</dd>"
    return found


def _table(label: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that scrolls by itself where it is wider than the page."""
    kinds = [' class="name"' if head in ("name", "client", "end") else "" for head in heads]
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for kind, name in zip(kinds, heads))
    body = ""
    for row in rows:
        cells = [(kind, escape(printable(each))) for kind, each in zip(kinds, row)]
        body += f"<tr>{''.join(f'<td{kind}>{text}</td>' for kind, text in cells)}</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table" role="region" tabindex="0" aria-label="{label}">{table}</div>'


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    reporting = command(
        "report", run, "write an incident as one HTML page: its cause, plots, the worst step, slow requests",
        "It has no scripts.",
    )  # fmt: skip
    reporting.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    add_at(reporting)


def run(arguments: argparse.Namespace, console: Console) -> None:
    answer = report(arguments.log, arguments.out, Asked(at=arguments.at), how_ended(arguments))
    print_answer(arguments, console, answer, print_report)


def print_report(console: Console, answer: Report) -> None:
    console.print(printable(answer.headline), style="bold", soft_wrap=True)
    about = f"{counted(answer.requests, 'request')}, {counted(answer.steps, 'step')}"
    console.print(f"written: {printable(answer.out)}, {about}", soft_wrap=True)
