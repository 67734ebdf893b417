"""clients: who used the engine, who waited, and for whom: each client's requests, tokens and share of the steps' time.

A step's time is split over its requests by the tokens that it computed for them, so that shares add up to one. While steps are
computed, requests wait in the queue; a client holds the others up for the time of each step, times its share of the step, times
the requests of others that wait. Clients are the numbers of RequestArrived, which a server makes of keys or addresses.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
from rich.console import Console

from vnext.log.reading import read
from vnext.replay.console import render
from vnext.replay.console.commands import SAME, print_answer, top_of
from vnext.replay.reading.folding import IMPOSSIBLE, Folded, first_state
from vnext.replay.reading.source import Log, contents, open_log
from vnext.replay.reading.step_counts import percentiles
from vnext.replay.reading.strides import Folding, Run
from vnext.replay.reading.times import STEP_US, Clock, timestamps_of
from vnext.replay.reading.window import Window, window_of
from vnext.state.events import RequestArrived, RequestResumed
from vnext.state.fold_commit import MatchedSamples
from vnext.state.state import State, StepInFlight
from vnext.state.traits import everyone_leaves

TOP_MAX = 10_000
COLUMNS = ("client", "requests", "tokens", "share", "waited s", "held up s", "first ms", "99 %", "largest")


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One client in the window. `client` is its number in hexadecimal, "" where none is known. `step_ms` is its part of the steps'
    time and `share` that of all; its requests waited `waited_ms` in the queue, and held those of others up for `held_ms`, both in
    ms times requests. `first_ms` are the median and the 99th percentile of the times to a first token, None without one.
    `largest` is the request that most tokens were computed for."""

    client: str
    requests: int
    prompt_tokens: int
    computed_tokens: int
    sampled_tokens: int
    step_ms: float
    share: float
    waited_ms: float
    held_ms: float
    first_ms: tuple[float | None, float | None]
    largest: int


class ClientsOfLog(msgspec.Struct, frozen=True, kw_only=True):
    """The clients, the one that held others up most first, then by share. `clock` and `ended` as in `trace`."""

    clients: list[Client]
    step_ms: float
    clock: str
    ended: str


class _OfClient:
    """What is counted of one client. Mutable."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.sampled_tokens = 0
        self.step_us = self.waited_us = self.held_us = 0.0
        self.firsts_us: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()  # by request


class _Counting:
    """The counts while a log is folded. Mutable, for one use."""

    def __init__(self, first: State, clock: Clock, window: Window) -> None:
        self._clock, self._window = clock, window
        self._client_of = {id_: request.client for id_, request in first.requests.items()}
        self._arrived_us: dict[int, float | None] = {}
        self._planned_us: dict[int, float | None] = {}
        self._last_us: float | None = None if clock.timestamped else first.committed * STEP_US
        self._waiting = self._queue(first)
        self.found: dict[int, _OfClient] = {}

    def of(self, client: int) -> _OfClient:
        return self.found.setdefault(client, _OfClient())

    def hear(self, item: Folded, matched: MatchedSamples | None) -> None:
        """Take one folded event."""
        us = self._clock.known_us(item.frame_end, item.before.committed)
        match item.event:
            case RequestArrived() | RequestResumed() as event:
                self._client_of[event.id], self._arrived_us[event.id] = event.client, us
                if self._window.has(us):
                    own = self.of(event.client)
                    own.requests += 1
                    own.prompt_tokens += len(event.prompt) // 4
        if matched is not None:
            self._committed(item.before.in_flight[0], item.before.rows.id[matched.rows], us)
        elif (plan := item.plan) is not None:
            self._planned_us[plan.step] = us
        elif everyone_leaves(item.event):
            self._planned_us.clear()
        if len(item.after.waiting) != len(item.before.waiting):
            self._waiting = self._queue(item.after)

    def meet_run(self, run: Run) -> None:
        """Take a run of steady frames, whose queue stays as it is."""
        committed = run.step + np.arange(run.frames)
        times = self._clock.known_many(run.next_events, committed)
        for place, us in enumerate(times[: len(run.in_flight)]):
            self._committed(run.in_flight[place], run.ids, us)
        known = np.array([np.nan if us is None else us for us in times[len(run.in_flight) :]])
        if not len(known):
            return
        lasted = np.diff(known, prepend=np.nan if self._last_us is None else self._last_us)
        lasted[~self._window.holds(known) | np.isnan(lasted)] = 0.0
        steps = int(self._window.holds(known).sum())
        self._step(run.ids, np.full(len(run.ids), steps), float(lasted.sum()))
        for id_ in run.ids.tolist():
            self.of(self._client_of.get(id_, 0)).sampled_tokens += steps
        self._last_us = None if np.isnan(known[-1]) else float(known[-1])
        self._planned_us.clear()

    def _committed(self, scheduled: StepInFlight, sampled: np.ndarray, us: float | None) -> None:
        began_us, last_us = self._planned_us.pop(scheduled.step, None), self._last_us
        self._last_us = us
        for id_ in sampled.tolist():
            arrived_us = self._arrived_us.pop(id_, None)
            if not self._window.has(us):
                continue
            own = self.of(self._client_of.get(id_, 0))
            own.sampled_tokens += 1
            if arrived_us is not None and us is not None:
                own.firsts_us[round(us - arrived_us)] += 1
        if self._window.has(us):
            starts = [each for each in (began_us, last_us) if each is not None]
            lasted_us = us - max(starts) if us is not None and starts else 0.0
            self._step(scheduled.ids, scheduled.counts, lasted_us)

    def _step(self, ids: np.ndarray, counts: np.ndarray, lasted_us: float) -> None:
        """Split the time of one step, or of many alike, over the clients of its requests."""
        tokens: Counter[int] = Counter()
        for id_, count in zip(ids.tolist(), counts.tolist()):
            client = self._client_of.get(id_, 0)
            tokens[client] += count
            self.of(client).computed[id_] += count
        everyone, queued = sum(tokens.values()) or 1, sum(self._waiting.values())
        for client, count in tokens.items():
            share_us = lasted_us * count / everyone
            own = self.of(client)
            own.step_us += share_us
            own.held_us += share_us * (queued - self._waiting[client])
        for client, count in self._waiting.items():
            self.of(client).waited_us += lasted_us * count

    def _queue(self, state: State) -> Counter[int]:
        """How many requests of each client wait."""
        return Counter(self._client_of.get(each.id, 0) for each in state.waiting)


def clients(log: Log, begin: str = "", end: str = "") -> ClientsOfLog:
    """The clients of a log, or of its part from `begin` to `end` (window.py). Raises UnusableLog."""
    timestamps, first, ended = timestamps_of(log), first_state(log), "complete"
    clock = Clock(timestamps, absolute=True)
    counting = _Counting(first, clock, window_of(timestamps, begin, end))
    try:
        for _, item in Folding(first, counting.hear).through((0, item) for item in read(contents(log.paths), steady=True)):
            if isinstance(item, Run):
                counting.meet_run(item)
    except IMPOSSIBLE as error:
        ended = str(error)
    all_us = sum(own.step_us for own in counting.found.values())
    found = [_client(number, own, all_us) for number, own in counting.found.items()]
    found.sort(key=lambda each: (-each.held_ms, -each.share, each.client))
    return ClientsOfLog(clients=found, step_ms=all_us / 1e3, clock="stamps" if clock.timestamped else "steps", ended=ended)


def _client(number: int, own: _OfClient, all_us: float) -> Client:
    first = [each / 1e3 for each in percentiles(own.firsts_us, (50, 99))] if own.firsts_us else [None, None]
    return Client(
        client=f"{number:016x}" if number else "",
        requests=own.requests,
        prompt_tokens=own.prompt_tokens,
        computed_tokens=sum(own.computed.values()),
        sampled_tokens=own.sampled_tokens,
        step_ms=own.step_us / 1e3,
        share=own.step_us / all_us if all_us else 0.0,
        waited_ms=own.waited_us / 1e3,
        held_ms=own.held_us / 1e3,
        first_ms=(first[0], first[1]),
        largest=max(own.computed, key=lambda id_: (own.computed[id_], -id_), default=-1),
    )


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `clients` to the commands."""
    asking = command(
        "clients", run, "show who used the engine, who waited, and who held others up",
        "Splits each step's time over its requests. Continue with `req` and the client's largest request.",
    )  # fmt: skip
    says = "only from this time on, as 14:03, 2026-11-28T14:03 or +12.5"
    asking.add_argument("--from", dest="begin", metavar="TIME", default="", help=says)
    asking.add_argument("--to", dest="end", metavar="TIME", default="", help="only up to this time")
    asking.add_argument("--top", type=int, default=10, help="number of clients (default 10)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns 0."""
    top = top_of(arguments, TOP_MAX)
    answer = clients(open_log(arguments.log), arguments.begin, arguments.end)
    print_answer(arguments, console, msgspec.structs.replace(answer, clients=answer.clients[:top]), print_clients)
    return SAME


def print_clients(console: Console, answer: ClientsOfLog) -> None:
    """One line on the client that held others up most, if it had more than an even share, then the table."""
    if answer.clients and (most := answer.clients[0]).held_ms > 0 and most.share * len(answer.clients) > 1:
        caused = most.held_ms / (sum(each.waited_ms for each in answer.clients) or 1.0)
        words = f"{100 * most.share:.0f}% of the steps' time, {100 * caused:.0f}% of all waiting"
        largest = f"its largest request is {most.largest}"
        console.print(f"client {_name(most)} held others up most: {words}; {largest}", style="bold", soft_wrap=True)
    render.records(console, "clients", COLUMNS, [_row(each) for each in answer.clients])
    if answer.clock == "steps":
        console.print("the log has no times: a step is taken as a millisecond")


def _row(each: Client) -> dict[str, str]:
    first, late = ("-" if ms is None else f"{ms:,.0f}" for ms in each.first_ms)
    values = (
        _name(each), f"{each.requests:,}", f"{each.computed_tokens:,}", f"{100 * each.share:.1f}%",
        f"{each.waited_ms / 1e3:,.1f}", f"{each.held_ms / 1e3:,.1f}", first, late, f"{each.largest}" if each.largest >= 0 else "-",
    )  # fmt: skip
    return dict(zip(COLUMNS, values))


def _name(each: Client) -> str:
    """The beginning of its number."""
    return each.client[:8] or "unknown"
