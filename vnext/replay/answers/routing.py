"""route: a router's decisions, each made again from what the router knew, and how another policy would have decided.

Owns the table. vnext/routing/decisions.py reads the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vnext.base.spelling import reason
from vnext.replay.console.commands import DIFFERENT, SAME, print_answer
from vnext.replay.console.ended import COMPLETE, Ended
from vnext.replay.console.render import printable
from vnext.replay.reading.source import UnusableLog
from vnext.routing.decision_file import files_of
from vnext.routing.decisions import NOBODY, Decision, Header, NoDecisions, decide_again, read
from vnext.routing.policies import Candidate, RoutingPolicyError, require_policy

ROWS = 20
"""Decisions that the table shows, the last ones, unless more are asked for."""


class ReplicaShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica got: requests, their prompt tokens and those that its cache had, and the tokens that it owed on average
    when it was chosen."""

    name: str
    requests: int
    tokens: int
    hit_tokens: int
    waiting_tokens_mean: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: `chosen` as recorded and `again` (NOBODY where no replica was ready); each replica's (hit tokens, waiting
    tokens, running, waiting), None where it was not ready."""

    sequence: int
    time_us: int
    tokens: int
    chosen: int
    again: int
    replicas: list[tuple[int, int, int, int] | None]


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions of one router. `differing` of them fall otherwise today, `first` is the first of those; of `policy` "" that
    is a fault, of another one the answer to a question. `best_hit_tokens` are those of the longest hit each time.
    `places` names the replicas by their places, those of the last file."""

    recorded_policy: str
    policy: str
    decisions: int
    unrouted: int
    seconds: float
    tokens: int
    hit_tokens: int
    best_hit_tokens: int
    differing: int
    first: int | None
    replicas: list[ReplicaShare]
    places: list[str]
    last: list[Row]


class Known(NamedTuple):
    """A decision, and the header of its file."""

    header: Header
    decision: Decision

    @property
    def name(self) -> str:
        """Of the replica that was chosen."""
        return self.header.replicas[self.decision.chosen]

    @property
    def time_us(self) -> float:
        return self.header.started_ns / 1e3 + self.decision.time_us


def routing(path: Path, policy: str = "", rows: int = ROWS) -> tuple[Routing, Ended]:
    """Make the decisions in a file, or in a folder's files, again: by the recorded policy, or by another. Raises UnusableLog."""
    headers, known, ended = _read_all(path)
    policies = sorted({each.policy for each in headers})
    try:
        for name in [policy] if policy else policies:
            require_policy(name)
    except RoutingPolicyError as error:
        raise UnusableLog(str(error)) from error
    again = [decide_again(policy or each.header.policy, each.decision) for each in known]
    differing = [each.decision.arriving.sequence for each, now in zip(known, again) if each.decision.chosen != now]
    routed = [each for each in known if each.decision.chosen != NOBODY]
    times_us, names = [each.time_us for each in known], dict.fromkeys(name for each in headers for name in each.replicas)
    answer = Routing(
        recorded_policy=", ".join(policies), policy=policy, decisions=len(known), unrouted=len(known) - len(routed),
        seconds=(max(times_us) - min(times_us)) / 1e6 if known else 0.0,
        tokens=sum(each.decision.arriving.tokens for each in routed),
        hit_tokens=sum(_chosen(each).hit_tokens for each in routed),
        best_hit_tokens=sum(max(one.hit_tokens for one in each.decision.candidates if one.is_ready) for each in routed),
        differing=len(differing), first=next(iter(differing), None),
        replicas=[_share(name, [each for each in routed if each.name == name]) for name in names if name],
        places=[*headers[-1].replicas],
        last=[_row(each.decision, now) for each, now in list(zip(known, again))[len(known) - min(rows, len(known)) :]],
    )  # fmt: skip
    return answer, ended


def _read_all(path: Path) -> tuple[list[Header], list[Known], Ended]:
    paths = files_of(path)
    if not paths:
        raise UnusableLog(f"{path} holds no decisions of a router (*.vnextroutes)")
    headers, known, ends = [], [], []
    for each in paths:
        try:
            found = read(each.read_bytes())
        except (NoDecisions, OSError) as error:
            raise UnusableLog(f"{each}: {reason(error)}") from error
        places = len(found.header.replicas)
        if any(not -1 <= one.chosen < min(len(one.candidates), places) for one in found.decisions):
            raise UnusableLog(f"{each}: a decision chose a replica that it did not know")
        headers.append(found.header)
        known += [Known(found.header, one) for one in found.decisions]
        ends += [f"{each.name}: {found.ended}"] if found.ended else []
    return headers, known, Ended(kind="damaged", line=f"damaged: {'; '.join(ends)}") if ends else COMPLETE


def _chosen(known: Known) -> Candidate:
    return known.decision.candidates[known.decision.chosen]


def _share(name: str, own: list[Known]) -> ReplicaShare:
    return ReplicaShare(
        name=name, requests=len(own), tokens=sum(each.decision.arriving.tokens for each in own),
        hit_tokens=sum(_chosen(each).hit_tokens for each in own),
        waiting_tokens_mean=sum(_chosen(each).waiting_tokens for each in own) / max(len(own), 1),
    )  # fmt: skip


def _row(decision: Decision, again: int) -> Row:
    known = [
        (each.hit_tokens, each.waiting_tokens, each.running, each.waiting) if each.is_ready else None
        for each in decision.candidates
    ]
    arriving = decision.arriving
    return Row(
        sequence=arriving.sequence, time_us=decision.time_us, tokens=arriving.tokens, chosen=decision.chosen, again=again,
        replicas=known,
    )  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    asking = command(
        "route", run, "make a router's decisions again from what it knew, and print them",
        "FILES is a file of decisions or a folder of them. Exit code 1: the recorded policy decides otherwise today.", log=False,
    )  # fmt: skip
    asking.add_argument("files", metavar="FILES", type=Path, help="a router's decisions: a file, or the folder that holds them")
    asking.add_argument("--policy", default="", metavar="NAME", help="decide by this policy instead, and count the differences")
    asking.add_argument("--rows", type=int, default=ROWS, metavar="N", help=f"decisions to print, the last ones (default {ROWS})")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 1 if the recorded policy decides otherwise today."""
    if arguments.rows < 0:
        raise UnusableLog(f"--rows {arguments.rows}: it must be 0 or more")
    answer, arguments.ended = routing(arguments.files, arguments.policy, arguments.rows)
    print_answer(arguments, console, answer, print_routing)
    return DIFFERENT if answer.differing and not answer.policy else SAME


def print_routing(console: Console, answer: Routing) -> None:
    """Print the totals, a line for each replica, and the last decisions."""
    share = f"{100 * answer.hit_tokens / max(answer.tokens, 1):.1f} % of prompt tokens were hits"
    best = f"{100 * answer.best_hit_tokens / max(answer.tokens, 1):.1f} % with the longest hit each time"
    policy = printable(answer.recorded_policy)
    console.print(f"{answer.decisions:,} decisions of {policy} in {answer.seconds:,.1f} s; {share}, {best}")
    if answer.unrouted:
        console.print(f"{answer.unrouted:,} requests found no replica ready", style="yellow")
    for line in _verdict(answer):
        console.print(line, style="bold red" if answer.differing and not answer.policy else "green")
    shares = _folding("replica", "requests", "tokens", "hits", "waiting tokens")
    for each in answer.replicas:
        hits = f"{100 * each.hit_tokens / max(each.tokens, 1):.1f} %"
        shares.add_row(printable(each.name), f"{each.requests:,}", f"{each.tokens:,}", hits, f"{each.waiting_tokens_mean:,.0f}")
    console.print(shares)
    if answer.last:
        console.print(_table(answer))


def _folding(*names: str) -> Table:
    """A table whose cells are folded where the terminal is narrow, and never cut off."""
    table = Table(box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _verdict(answer: Routing) -> Iterator[str]:
    if not answer.policy:
        same = "made again, all are the same" if not answer.differing else f"{answer.differing:,} fall otherwise today"
        yield same if answer.first is None else f"{same}, the first of them decision {answer.first}"
    else:
        yield f"{answer.policy} would have decided {answer.differing:,} otherwise"


def _table(answer: Routing) -> Table:
    """The last decisions: of each replica hits/owed tokens/running+waiting, the chosen one with a *."""
    table = _folding("decision", "tokens", *map(printable, answer.places))
    for row in answer.last:
        cells = []
        for place, known in enumerate(row.replicas):
            mark = "*" if place == row.chosen else "+" if place == row.again else ""
            cells.append("not ready" if known is None else f"{mark}{known[0]}/{known[1]}/{known[2]}+{known[3]}")
        table.add_row(str(row.sequence), f"{row.tokens:,}", *cells)
    other = "; + by the other policy" if answer.policy else ""
    table.caption = f"hits/tokens owed/running+waiting requests; * chosen{other}"
    return table
