"""ranks: checks whether all ranks of a run had the same state in every step for which they reported.

Owns the comparison of ranks. Ranks report a digest every `digest_interval` steps, and the engine's log holds these
reports. A rank with another state also reports details (digest.DETAIL_NAMES), which name the field. In a folder with
one log per rank or replica, the logs are compared as a whole.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from vnext.log.codec import SEGMENT_SUFFIX, RankDetail, RankDigest
from vnext.replay.answers.diff import Diff, diff
from vnext.replay.reading.folding import Folded, FrameFolded, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.verify import drifted_fields, reported_by, why_not_digested
from vnext.state.digest import digest, hexadecimal
from vnext.state.state import State

STATES_KEPT = 4
NEVER = -1
SHARED = ("config.", "model")
"""Beginnings of the header fields that all ranks of an engine share."""
TOKENS = "tokens"
"""The field for a rank that reported details although its digest is right: digests cover structure, so its tokens
differ."""
RANKS_MAX = 1 << 12
"""At most this many ranks that never reported are listed, because their number comes from a file."""


class RankLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, or one log: how many `reports` agree, the last step that agrees and the first that does not (-1: none),
    and the differing `fields` as far as they were reported. `requests` are those whose tokens alone differ."""

    name: str
    reports: int
    last_equal_step: int
    first_different_step: int
    fields: list[str]
    recorded: str
    recomputed: str
    requests: list[int] = []


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """`compared` says what the ranks were compared with: the engine's state as folded now, the other ranks, or the
    first log.

    Reports are `interval` steps apart (0 where whole logs are compared): drift began after the last equal one.
    """

    same: bool
    compared: str
    interval: int
    ranks: list[RankLine]


class _Rank:
    """What one rank has reported so far."""

    def __init__(self) -> None:
        self.reports = 0
        self.last_equal = self.first_different = NEVER
        self.fields: list[str] = []
        self.requests: list[int] = []
        self.pair = ("", "")

    def meet(self, report: RankDigest, due: int, fields: list[str], requests: list[int]) -> None:
        if self.first_different != NEVER:
            return
        if report.digest == due and not fields:
            self.reports, self.last_equal = self.reports + 1, report.step
        else:
            self.first_different, self.fields, self.requests = report.step, fields, requests
            self.pair = hexadecimal(report.digest), hexadecimal(due)

    def line(self, name: str) -> RankLine:
        return RankLine(
            name=name, reports=self.reports, last_equal_step=self.last_equal, first_different_step=self.first_different,
            fields=self.fields, recorded=self.pair[0], recomputed=self.pair[1], requests=self.requests,
        )  # fmt: skip


def ranks(path: Path) -> Ranks:
    """Compare the ranks of the run whose log or logs are at a path. Raises UnusableLog if there is none."""
    nested = sorted({found.parent for found in path.glob(f"*/*{SEGMENT_SUFFIX}")}) if path.is_dir() else []
    if any(path.glob(f"*{SEGMENT_SUFFIX}")) or len(nested) < 2:
        return _of_one_log(open_log(path))
    return _of_logs(nested)


def _of_one_log(log: Log) -> Ranks:
    """Compare reports with the folded state, or with each other if the digests cannot be compared here."""
    among_themselves = bool(why_not_digested(log))
    found = {rank: _Rank() for rank in range(min(log.header.started.world_size, RANKS_MAX))}
    states: dict[int, State] = {}
    firsts: dict[int, int] = {}
    interval = max(1, log.header.started.config.digest_interval)
    for item in fold(log):
        if isinstance(item, Folded) and (plan := item.plan) is not None and plan.step % interval == 0:
            states[plan.step] = item.after
            if len(states) > STATES_KEPT:
                del states[min(states)]
        elif isinstance(item, FrameFolded):
            for report in item.frame.rank_digests:
                due, fields = _due(report, item.frame.details, states, None if not among_themselves else firsts)
                if due is not None:
                    requests = [id_ for each in reported_by(report, item.frame.details) for id_ in each.requests]
                    found.setdefault(report.rank, _Rank()).meet(report, due, fields, requests)
    lines = [rank.line(f"rank {number}") for number, rank in sorted(found.items())]
    compared = "the other ranks" if among_themselves else "the engine's state, folded again"
    return Ranks(same=_all_same(lines), compared=compared, interval=interval, ranks=lines)


def _due(
    report: RankDigest, reported: tuple[RankDetail, ...], states: dict[int, State], firsts: dict[int, int] | None
) -> tuple[int | None, list[str]]:
    """The digest that a report should have (None if unknown), and the fields in which the rank differs."""
    if firsts is not None:
        due = firsts.setdefault(report.step, report.digest)
        firsts.pop(report.step - 64 * STATES_KEPT, None)
        return due, []
    state = states.get(report.step)
    if state is None:
        return None, []
    due = digest(state)
    if due != report.digest:
        return due, drifted_fields(reported, report, state)
    return due, [name for each in reported_by(report, reported) for name in each.fed or (TOKENS,)]


def _of_logs(paths: list[Path]) -> Ranks:
    """Compare whole logs, each with the first."""
    first = open_log(paths[0])
    lines = [_Rank().line(paths[0].name)]
    for path in paths[1:]:
        try:
            found = diff(first, open_log(path))
        except UnusableLog as error:
            raise UnusableLog(f"{path.name} cannot be compared with {paths[0].name}: {error}") from error
        if other := _other_engine(found):
            names = f"{path.name} and {paths[0].name}"
            raise UnusableLog(f"{names} are not of one engine: {other}; `compare` and `fleet` take such logs")
        lines.append(_line_of(path.name, found))
    return Ranks(same=_all_same(lines), compared=f"the log {paths[0].name}", interval=0, ranks=lines)


def _other_engine(found: Diff) -> str:
    """What ranks of one engine share and these logs do not: its settings, and what came from outside; "" for nothing."""
    if settings := [field for field in found.headers if field.name.startswith(SHARED)]:
        return f"{settings[0].name.removeprefix('config.')} is {settings[0].one} in one and {settings[0].other} in the other"
    if "RequestArrived" in found.what:
        what = ", ".join(field.name for field in found.fields)
        return f"event {found.event} is {found.what} ({what} differ)" if what != "event" else f"event {found.event} is {found.what}"
    return ""


def _line_of(name: str, found: Diff) -> RankLine:
    fields = [*found.headers, *found.fields]
    return RankLine(
        name=name, reports=found.frames_equal, last_equal_step=found.step - 1 if fields else NEVER,
        first_different_step=found.step if fields else NEVER, fields=[field.name for field in fields],
        recorded=fields[0].other if fields else "", recomputed=fields[0].one if fields else "",
    )  # fmt: skip


def _all_same(lines: list[RankLine]) -> bool:
    return not any(line.fields or line.recorded or line.first_different_step != NEVER for line in lines)
