"""clients: who used the engine, who waited, and for whom: each client's requests, tokens and share of the steps' time.

Groups of requests may be others: tenants, priorities, models, or each request alone (cost). A step's time is split over its
requests by the tokens that it computed for them, in whole microseconds that add up to it. While steps are
computed, requests wait in the queue; a client holds the others up for the time of each step, times its share of the step, times
the requests of others that wait. Clients are the numbers of RequestArrived, which a server makes of keys or addresses.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from rich.console import Console

from vnext.log.reading import read
from vnext.replay.console import render
from vnext.replay.console.commands import print_answer, top_of
from vnext.replay.reading.folding import IMPOSSIBLE, Folded, first_state
from vnext.replay.reading.objective import Objective, meets, objective_of
from vnext.replay.reading.source import Log, contents, open_log
from vnext.replay.reading.step_counts import percentiles
from vnext.replay.reading.strides import Folding, Run
from vnext.replay.reading.times import STEP_US, Clock, timestamps_of
from vnext.replay.reading.window import ALWAYS, Window, add_window, asked_window
from vnext.state.events import RequestArrived, RequestResumed
from vnext.state.fold_commit import MatchedSamples
from vnext.state.state import Request, State, StepInFlight
from vnext.state.traits import loses_steps

TOP_MAX = 10_000
PLURALS = {"client": "clients", "tenant": "tenants", "priority": "priorities", "model": "models", "request": "requests"}
COLUMNS = ("client", "requests", "tokens", "share", "waited s", "held up s", "first ms", "99 %", "largest")


GROUPS: dict[str, Callable[[Request | RequestArrived], str]] = {
    "client": lambda each: f"{each.client:016x}" if each.client else "",
    "tenant": lambda each: each.cache_salt if isinstance(each, RequestArrived) else "",
    "priority": lambda each: str(each.priority),
    "model": lambda each: each.sampling.adapter,
    "request": lambda each: str(each.id),
}
"""What groups requests: a client's number in hexadecimal, a cache salt, a priority, an adapter's digest, a request's number."""


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One client in the window, or another group. `client` is its name in GROUPS, "" where none is known. `step_ms` is its part of
    the steps' time and `share` that of all; its requests waited `waited_ms` in the queue, and held those of others up for
    `held_ms`, both in ms times requests. `first_ms` are the median and the 99th percentile of the times to a first token, None
    without one. `largest` is the request that most tokens were computed for. Of the requests that arrived in the window and got a
    token, `met` is the share that met the objective, None without one. `weight`: of its last request, in turns of clients."""

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
    met: float | None = None
    weight: int = 1


class ClientsOfLog(msgspec.Struct, frozen=True, kw_only=True):
    """The clients, the one that held others up most first, then by share. `clock` and `ended` as in `trace`."""

    clients: list[Client]
    step_ms: float
    clock: str
    ended: str
    by: str = "client"


class Timing(msgspec.Struct):
    """A request's times in us, and its tokens."""

    group: str
    arrived_us: float
    first_us: float
    last_us: float
    tokens: int


class _OfClient:
    """What is counted of one client. Mutable."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.sampled_tokens = 0
        self.step_us = 0
        self.waited_us = self.held_us = 0.0
        self.firsts_us: Counter[int] = Counter()
        self.computed: Counter[int] = Counter()  # by request


class _Counting:
    """The counts while a log is folded. Mutable, for one use."""

    def __init__(self, first: State, clock: Clock, window: Window, by: str = "client") -> None:
        self._clock, self._window, self._group = clock, window, GROUPS[by]
        self._client_of = {id_: self._group(request) for id_, request in first.requests.items()}
        self.weights = {self._client_of[id_]: request.weight for id_, request in sorted(first.requests.items())}
        self.timings: dict[int, Timing] = {}
        self._arrived_us: dict[int, float | None] = {}
        self._planned_us: dict[int, float | None] = {}
        self._last_us: float | None = None if clock.timestamped else first.committed * STEP_US
        self._waiting = self._queue(first)
        self.found: dict[str, _OfClient] = {}

    def of(self, client: str) -> _OfClient:
        return self.found.setdefault(client, _OfClient())

    def hear(self, item: Folded, matched: MatchedSamples | None) -> None:
        us = self._clock.known_us(item.frame_end, item.before.committed)
        match item.event:
            case RequestArrived() | RequestResumed() as event:
                group = self._client_of[event.id] = self._group(event)
                self.weights[group] = event.weight
                self._arrived_us[event.id] = us
                if self._window.has(us):
                    own = self.of(group)
                    own.requests += 1
                    own.prompt_tokens += len(event.prompt) // 4
        if matched is not None:
            self._committed(item.before.in_flight[0], item.before.rows.id[matched.rows], us)
        elif (plan := item.plan) is not None:
            self._planned_us[plan.step] = us
        elif loses_steps(item.event):
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
        lasted = np.nan_to_num(lasted)[self._window.holds(known)]
        steps = len(lasted)
        self._step(run.ids, np.ones(len(run.ids), np.int64), lasted.astype(np.int64))
        for id_ in run.ids.tolist():
            self.of(self._client_of.get(id_, "")).sampled_tokens += steps
            self._got(id_, times[-1], len(known))
        self._last_us = None if np.isnan(known[-1]) else float(known[-1])
        self._planned_us.clear()

    def _committed(self, scheduled: StepInFlight, sampled: np.ndarray, us: float | None) -> None:
        began_us, last_us = self._planned_us.pop(scheduled.step, None), self._last_us
        self._last_us = us
        for id_ in sampled.tolist():
            arrived_us = self._arrived_us.pop(id_, None)
            if arrived_us is not None and us is not None and self._window.has(arrived_us):
                self.timings[id_] = Timing(self._client_of[id_], arrived_us, us, us, 0)
            self._got(id_, us, 1)
            if not self._window.has(us):
                continue
            own = self.of(self._client_of.get(id_, ""))
            own.sampled_tokens += 1
            if arrived_us is not None and us is not None:
                own.firsts_us[round(us - arrived_us)] += 1
        if self._window.has(us):
            starts = [each for each in (began_us, last_us) if each is not None]
            lasted_us = us - max(starts) if us is not None and starts else 0.0
            self._step(scheduled.ids, scheduled.counts, np.array([lasted_us]).astype(np.int64))

    def _got(self, id_: int, us: float | None, tokens: int) -> None:
        """A request has got tokens, the last of them now."""
        if (timing := self.timings.get(id_)) is not None:
            timing.tokens += tokens
            timing.last_us = timing.last_us if us is None else us

    def _step(self, ids: np.ndarray, counts: np.ndarray, lasted_us: np.ndarray) -> None:
        """Split the times (int64[n]) of a step, or of n alike, over the clients of its requests."""
        tokens: Counter[str] = Counter()
        for id_, count in zip(ids.tolist(), counts.tolist()):
            client = self._client_of.get(id_, "")
            tokens[client] += count
            self.of(client).computed[id_] += count * len(lasted_us)
        everyone, queued, all_us = sum(tokens.values()) or 1, sum(self._waiting.values()), int(lasted_us.sum())
        before, begun_us = 0, 0
        for client, count in tokens.items():
            before += count
            own, ended_us = self.of(client), int((lasted_us * before // everyone).sum())
            own.step_us += ended_us - begun_us
            own.held_us += all_us * count / everyone * (queued - self._waiting[client])
            begun_us = ended_us
        for client, count in self._waiting.items():
            self.of(client).waited_us += all_us * count

    def _queue(self, state: State) -> Counter[str]:
        """How many requests of each client wait."""
        return Counter(self._client_of.get(each.id, "") for each in state.waiting)


def clients(log: Log, window: Window = ALWAYS, by: str = "client", objective: Objective = Objective()) -> ClientsOfLog:
    """The clients of a log, or another of GROUPS, in a window. Raises UnusableLog."""
    timestamps, first, ended = timestamps_of(log), first_state(log), "complete"
    clock = Clock(timestamps, absolute=True)
    counting = _Counting(first, clock, window, by)
    try:
        for _, item in Folding(first, counting.hear).through((0, item) for item in read(contents(log.paths), steady=True)):
            if isinstance(item, Run):
                counting.meet_run(item)
    except IMPOSSIBLE as error:
        ended = str(error)
    all_us = sum(own.step_us for own in counting.found.values())
    met = {} if objective.is_any else _met(counting.timings.values(), objective)
    found = [_client(name, own, all_us, met.get(name), counting.weights.get(name, 1)) for name, own in counting.found.items()]
    found.sort(key=lambda each: (-each.held_ms, -each.share, each.client))
    return ClientsOfLog(clients=found, step_ms=all_us / 1e3, clock="stamps" if clock.timestamped else "steps", ended=ended, by=by)


def _met(timings: Iterable[Timing], objective: Objective) -> dict[str, float]:
    """The part of each group's requests that met the objective."""
    of_group: dict[str, list[bool]] = defaultdict(list)
    for each in timings:
        of_group[each.group].append(meets(each, objective))
    return {group: sum(found) / len(found) for group, found in of_group.items()}


def _client(name: str, own: _OfClient, all_us: int, met: float | None, weight: int) -> Client:
    first = [each / 1e3 for each in percentiles(own.firsts_us, (50, 99))] if own.firsts_us else [None, None]
    return Client(
        client=name,
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
        met=met,
        weight=weight,
    )


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    asking = command(
        "clients", run, "show who used the engine, who waited, and who held others up",
        "Splits each step's time over its requests. Continue with `req` and the client's largest request.",
    )  # fmt: skip
    add_window(asking)
    asking.add_argument("--top", type=int, default=10, help="number of clients (default 10)")
    asking.add_argument("--by", choices=GROUPS, default="client", help="group requests by this instead")
    asking.add_argument("--slo", default="", metavar="ttft=200ms,itl=50ms", help="the latency objective of a request")


def run(arguments: argparse.Namespace, console: Console) -> None:
    top = top_of(arguments, TOP_MAX)
    objective = objective_of(arguments.slo)
    log = open_log(arguments.log)
    answer = clients(log, asked_window(log, arguments), arguments.by, objective)
    print_answer(arguments, console, msgspec.structs.replace(answer, clients=answer.clients[:top]), print_clients)


def print_clients(console: Console, answer: ClientsOfLog) -> None:
    """One line on the client that held others up most, if it had more than an even share, then the table."""
    most = answer.clients[0] if answer.by == "client" and answer.clients else None
    if most is not None and most.held_ms > 0 and most.share * len(answer.clients) > 1:
        caused = most.held_ms / (sum(each.waited_ms for each in answer.clients) or 1.0)
        words = f"{100 * most.share:.0f}% of the steps' time, {100 * caused:.0f}% of all waiting"
        largest = f"its largest request is {most.largest}"
        console.print(f"client {_name(most)}{_weighed(most)} held others up most: {words}; {largest}", style="bold", soft_wrap=True)
    has_met = any(each.met is not None for each in answer.clients)
    columns = (answer.by, *COLUMNS[1:-1], "met" if has_met else COLUMNS[-1])
    last = [_share(each.met) if has_met else _id(each.largest) for each in answer.clients]
    rows = [dict(zip(columns, (*_row(each, answer.by), cell))) for each, cell in zip(answer.clients, last)]
    render.records(console, PLURALS[answer.by], columns, rows)
    if answer.clock == "steps":
        console.print("the log has no times: a step is taken as a millisecond")


def _row(each: Client, by: str) -> tuple[str, ...]:
    first, late = ("-" if ms is None else f"{ms:,.0f}" for ms in each.first_ms)
    name = f"{_name(each)}{_weighed(each)}" if by == "client" else each.client or "-"
    return (
        name, f"{each.requests:,}", f"{each.computed_tokens:,}", _share(each.share),
        f"{each.waited_ms / 1e3:,.1f}", f"{each.held_ms / 1e3:,.1f}", first, late,
    )  # fmt: skip


def _id(number: int) -> str:
    return f"{number}" if number >= 0 else "-"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _name(each: Client) -> str:
    """The beginning of its number."""
    return each.client[:8] or "unknown"


def _weighed(each: Client) -> str:
    return f" (weight {each.weight})" if each.weight != 1 else ""
