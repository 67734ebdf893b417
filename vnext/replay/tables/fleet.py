"""fleet: the logs of several engines side by side, all of them together, and which engine stands out.

Owns the table and what stands out; the figures are those of stat and slow, from the indexes beside the logs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path

import msgspec
from rich.console import Console

from vnext.replay.answers.diff import header_fields, short
from vnext.replay.answers.ranks import SHARED
from vnext.replay.answers.stat import stat
from vnext.replay.console import render
from vnext.replay.console.commands import index_of, logs_at, print_answer
from vnext.replay.console.ended import ended
from vnext.replay.reading.between import between
from vnext.replay.reading.client_latency import latency_decoder
from vnext.replay.reading.index import Index
from vnext.replay.reading.joining import joined
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.step_counts import percentiles
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.window import ALWAYS, Window, add_window, named_window

VALUES_MIN = 20
"""Fewer first tokens or gaps say little about an engine."""
LATE = 1.5
"""An engine whose latencies are this many times those of the others stands out."""
UNEVEN = 1.3
"""And one with this many times its even share of the tokens."""
HITS = 0.1
"""And one whose hit rate is so much lower than the others'."""
KINDS = {"first_us": "first tokens at 99 %", "gap_us": "gaps between tokens at 99 %"}
SETTINGS_SHOWN = 3
COLUMNS = ("engine", "requests", "tokens", "tokens/s", "first ms", "gap ms", "hits", "waited", "preempted")


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, or all of them. Its log begins at `began` (seconds since 1970) and has `seconds`, None without times. `requests`
    got their first token, `tokens` were computed, `waiting` is the most that waited at once. `first_ms` and `gap_ms` are the median
    and the 99th percentile of first tokens and of gaps between tokens, None where there are none or no times."""

    name: str
    log: str
    began: float | None
    seconds: float | None
    requests: int
    tokens: int
    tokens_per_s: float | None
    first_ms: tuple[float, float] | None
    gap_ms: tuple[float, float] | None
    queried: int
    hit_rate: float
    waiting: int
    preemptions: int


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The engines in the order of their names, all of them together, what `stands_out` in sentences, the worst first, the names of
    those that recorded nothing in the window, the `commands` to go on with, and how `settings` differ from the first one's."""

    engines: list[Engine]
    whole: Engine
    stands_out: list[str]
    silent: list[str]
    commands: list[str]
    settings: list[str]


class _Read(msgspec.Struct, frozen=True):
    """What was read of one log."""

    path: Path
    engine: Engine
    times: dict[str, Counter[int]]


def fleet(paths: Sequence[Path], window_of: Callable[[Index], Window] = lambda _: ALWAYS) -> Fleet:
    """Compare the engines whose logs are at these paths. Raises UnusableLog."""
    if not paths:
        raise UnusableLog("there is no log: give the folders of logs, or the folder that holds them")
    names, read, silent = _names(paths), list[_Read](), list[str]()
    for name, path in zip(names, paths):
        index = index_of(path)
        window = window_of(index)
        if not _overlaps(index, window):
            silent.append(name)
        else:
            read.append(_read(name, path, index, window))
    if not read:
        raise UnusableLog("no engine recorded anything between these times: `vnext-replay info` shows when a log begins")
    found = sorted(_stands_out(read), reverse=True)
    worst = found[0][2] if found else max(read, key=lambda each: each.engine.first_ms or (0.0, 0.0)).path
    return Fleet(
        engines=[each.engine for each in read], whole=_whole(read), stands_out=[sentence for _, sentence, _ in found],
        silent=silent, commands=[f"vnext-replay explain {worst}"], settings=list(_settings(read)),
    )  # fmt: skip


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path; more of it where two would be the same."""
    wholes = [path.resolve() for path in paths]
    lasts = Counter(path.name for path in wholes)
    return [path.name if lasts[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in wholes]


def _settings(read: Sequence[_Read]) -> Iterator[str]:
    """The models and settings in which engines differ from the first, whose latencies then have other reasons too."""
    first, *others = read
    for each in others:
        fields = [found for found in header_fields(open_log(first.path), open_log(each.path)) if found.name.startswith(SHARED)]
        if fields:
            words = ", ".join(f"{short(found.name)} is {found.other} instead of {found.one}" for found in fields[:SETTINGS_SHOWN])
            more = f", and {len(fields) - SETTINGS_SHOWN} more differ" if len(fields) > SETTINGS_SHOWN else ""
            yield f"{each.engine.name} has other settings than {first.engine.name}: {words}{more}"


def _overlaps(index: Index, window: Window) -> bool:
    timestamps = timestamps_of(index.log)
    return timestamps is None or bool(window.holds(timestamps.times_ns / 1e3).any())


def _read(name: str, path: Path, index: Index, window: Window) -> _Read:
    if window == ALWAYS:
        latencies = [latency_decoder.decode(each.directory.latency) for each in index.segments]
    else:
        latencies = [between(index, window).latency]
    found, counted = joined(latencies), stat(index, window)
    began: float | None = None
    seconds: float | None = None
    times = {kind: Counter(worst.counts()) for kind, worst in (("first_us", found.firsts), ("gap_us", found.gaps))}
    requests = sum(times["first_us"].values())
    if (timestamps := timestamps_of(index.log)) is None:
        times = {kind: Counter() for kind in KINDS}
    else:
        inside = timestamps.times_ns[window.holds(timestamps.times_ns / 1e3)] / 1e9
        began, seconds = float(inside[0]) + timestamps.wall_minus_monotonic_ns / 1e9, float(inside[-1] - inside[0])
    engine = Engine(
        name=name, log=str(path), began=began, seconds=seconds, requests=requests, tokens=counted.computed_tokens,
        tokens_per_s=counted.sampled_tokens / seconds if seconds else None, first_ms=_pair(times["first_us"]),
        gap_ms=_pair(times["gap_us"]), queried=counted.queried_tokens, hit_rate=counted.hit_rate,
        waiting=max(counted.queue, default=0), preemptions=counted.preemptions,
    )  # fmt: skip
    return _Read(path, engine, times)


def _pair(times: Counter[int]) -> tuple[float, float] | None:
    if not times:
        return None
    middle, late = percentiles(times, (50, 99))
    return middle / 1e3, late / 1e3


def _whole(read: Sequence[_Read]) -> Engine:
    engines = [each.engine for each in read]
    times = {kind: _sum(read, kind) for kind in KINDS}
    begins = [each.began for each in engines if each.began is not None]
    ends = [each.began + each.seconds for each in engines if each.began is not None and each.seconds is not None]
    rates = [each.tokens_per_s for each in engines if each.tokens_per_s is not None]
    queried = sum(each.queried for each in engines)
    return Engine(
        name="all", log="", began=min(begins, default=None), seconds=max(ends) - min(begins) if ends else None,
        requests=sum(each.requests for each in engines), tokens=sum(each.tokens for each in engines),
        tokens_per_s=sum(rates) if rates else None, first_ms=_pair(times["first_us"]), gap_ms=_pair(times["gap_us"]),
        queried=queried,
        hit_rate=sum(each.hit_rate * each.queried for each in engines) / queried if queried else 0.0,
        waiting=max(each.waiting for each in engines), preemptions=sum(each.preemptions for each in engines),
    )  # fmt: skip


def _sum(read: Sequence[_Read], kind: str) -> Counter[int]:
    return sum((each.times[kind] for each in read), Counter[int]())


def _stands_out(read: Sequence[_Read]) -> Iterator[tuple[float, str, Path]]:
    """What makes an engine unlike the others: how much, in words, and its log."""
    tokens = sum(each.engine.tokens for each in read)
    for each in read:
        if not (end := ended(open_log(each.path))).is_sound:
            yield inf, f"{each.engine.name}: {end.line}", each.path
        others = [other for other in read if other is not each]
        if not others:
            return
        for kind, words in KINDS.items():
            own, theirs = each.times[kind], _sum(others, kind)
            if min(sum(own.values()), sum(theirs.values())) >= VALUES_MIN:
                late, usual = (percentiles(times, (99,))[0] / 1e3 for times in (own, theirs))
                if late > LATE * usual:
                    yield late / usual, f"{each.engine.name}: {words} take {late:,.0f} ms, {usual:,.0f} elsewhere", each.path
        share = each.engine.tokens / (tokens or 1)
        if share * len(read) > UNEVEN:
            words = f"{each.engine.name} computed {share:.0%} of the tokens, one of {len(read)} engines"
            yield share * len(read), words, each.path
        lost = _whole(others).hit_rate - each.engine.hit_rate
        if lost > HITS and each.engine.queried:
            words = f"{each.engine.name}: its prefix cache had {each.engine.hit_rate:.0%} of the prompts' tokens"
            yield 1 + lost, f"{words}, {each.engine.hit_rate + lost:.0%} elsewhere", each.path


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    comparing = command(
        "fleet", run, "show several engines side by side, and which of them stands out",
        "LOG may be a folder of logs.",
    )  # fmt: skip
    comparing.add_argument("others", metavar="LOG", type=Path, nargs="*", help="more logs")
    add_window(comparing)


def run(arguments: argparse.Namespace, console: Console) -> None:
    paths = [found for path in (arguments.log, *arguments.others) for found in logs_at(path) or [path]]
    answer = fleet(list({path.resolve(): path for path in paths}.values()), lambda index: named_window(index.log, arguments))
    print_answer(arguments, console, answer, print_fleet)


def print_fleet(console: Console, answer: Fleet) -> None:
    """What stands out, then a line for each engine and one for all."""
    nothing = "no engine stands out" if len(answer.engines) > 1 else "this is one engine, and stands beside no other"
    for line in answer.stands_out or [nothing]:
        console.print(render.printable(line), style="bold", soft_wrap=True)
    for line in answer.settings:
        console.print(render.printable(line), style="yellow", soft_wrap=True)
    *engines, whole = (dict(zip(COLUMNS, _row(each))) for each in (*answer.engines, answer.whole))
    render.records(console, "engines", COLUMNS, engines, whole if len(engines) > 1 else None)
    console.print("first ms, gap ms: the median and the 99th percentile", style="dim")
    if answer.silent:
        console.print(f"recorded nothing then: {render.printable(', '.join(answer.silent))}", soft_wrap=True)
    for line in answer.commands:
        console.print(f"ask {render.printable(line)}", soft_wrap=True)


def _row(each: Engine) -> tuple[str, ...]:
    times = ("-" if pair is None else f"{pair[0]:,.0f}, {pair[1]:,.0f}" for pair in (each.first_ms, each.gap_ms))
    per_s = "-" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}"
    counts = (f"{each.waiting:,}", f"{each.preemptions:,}")
    return (each.name, f"{each.requests:,}", f"{each.tokens:,}", per_s, *times, f"{each.hit_rate:.0%}", *counts)
