"""Charging: what the time of a log's requests was lost to, in request-milliseconds by cause.

Owns the rules. Direct losses come first: stretches without a step, steps slower than the machine's usual pace, work that had been
done before, drafts in vain, requests that failed or were given up. What requests waited in a queue is charged to the direct loss
that made the queue, where there is one, else to the request that holds the cache, to the client that filled the engine, to a long
prompt, or to the limit that the scheduler names.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.replay.causes.ledger import Entry, Ledger, Life
from vnext.replay.futures.step_times import STEPS_MIN, Model, fit

SLOW_FROM = 1.5
"""A step that takes this many times as long as usual is slow."""
SLOW_US = 2_000.0
"""And by at least so much."""
STALL_FROM = 20.0
"""A step this many times as long as usual is a stall."""
STALL_US = 100_000.0
"""And takes at least so long."""
LOUD_SHARE = 0.12
"""A loss that takes this share of the time in which a queue stood made the queue."""
LONG_FROM = 4.0
"""A prompt this many times as long as the usual one is long."""
LONG_TOKENS = 512
CLIENT_SHARE = 0.5
"""A client with this share of the computed time, of several, fills the engine."""
FAILED_SHARE = 0.1
SAME_AGE, DEADLINE_MIN = 0.05, 5
"""Requests that were given up at one age, within this share of it, had a deadline; fewer may be chance."""
PREEMPTED_SHARE = 0.25
"""With so many preemptions for each request, waiting for pages is due to them."""
ROOM_GAIN = 1.5
"""Where twice the work takes less than this many times as long, a larger limit serves more."""
HELD_SHARE = 0.5
"""A request whose tokens take this share of the cache leaves the others too little."""
WAITS = ("sequences", "budget", "blocks", "order", "microbatch", "inputs")


class Charge(NamedTuple):
    """What one cause has cost, in milliseconds times requests, and the steps and times (us) between which it did."""

    cause: str
    ms: float
    first_step: int
    last_step: int
    from_us: float
    to_us: float


class Charges(msgspec.Struct, frozen=True):
    """Causes, the costliest first. `lived_ms` is the time of all requests. `client` is the one that filled the engine, 0 for none;
    `long` a request with a long prompt, `holder` the one that held most of the cache while others waited, -1 for none."""

    found: list[Charge]
    lived_ms: float
    client: int
    client_share: float
    long: int
    holder: int


class Queue(NamedTuple):
    """Consecutive entries, [begin, end), in which someone waited."""

    begin: int
    end: int


class _Charging:
    """Charges while entries are gone through. Mutable."""

    def __init__(self, ledger: Ledger, usual: np.ndarray, model: Model | None) -> None:
        self.ledger, self.entries, self.usual, self.model = ledger, ledger.entries, usual, model
        self.held = Counter[int]()
        self.lost: dict[str, float] = defaultdict(float)
        self.spans: dict[str, list[int]] = {}
        self.client, self.client_share = _largest_client(ledger.lives)
        prompts = [life.prompt for life in ledger.lives.values()]
        middle = statistics.median(prompts) if prompts else 0.0
        self.long = {id_ for id_, life in ledger.lives.items() if life.prompt >= max(LONG_FROM * middle, LONG_TOKENS)}

    def charge(self, cause: str, us: float, place: int) -> None:
        if us > 0:
            self.lost[cause] += us / 1e3
            span = self.spans.setdefault(cause, [place, place])
            span[0], span[1] = min(span[0], place), max(span[1], place)

    def direct(self, place: int) -> dict[str, float]:
        """The time (us) of one entry that was lost directly, by cause."""
        entry, usual = self.entries[place], float(self.usual[place])
        if entry.stopped:
            return {entry.stopped: entry.us}
        found: dict[str, float] = {}
        if is_slow(entry.us, usual):
            stalls = entry.us > max(STALL_FROM * usual, STALL_US)
            found["stall" if stalls else "slow"] = entry.us - usual
        rest = min(entry.us, usual)
        again = sum(entry.again.values())
        if again:
            worth = rest - self._without(entry, again, rest)
            found |= {cause: found.get(cause, 0.0) + worth * count / again for cause, count in entry.again.items()}
        return found

    def _without(self, entry: Entry, tokens: int, rest: float) -> float:
        """The usual time of a step with fewer tokens."""
        least = max(entry.features[0] - tokens, 1.0)
        if self.model is None:
            return rest * least / max(entry.features[0], 1.0)
        both = self.model.predict(np.array([entry.features, (least, *entry.features[1:])]))
        return rest * float(both[1] / both[0])

    def prompts(self, place: int) -> float:
        """The time (us) of one step that one long prompt took of the others'."""
        entry = self.entries[place]
        if entry.most_id not in self.long or entry.most < 0.5 * entry.features[0] or entry.stopped:
            return 0.0
        rest = min(entry.us, float(self.usual[place]))
        return rest - self._without(entry, entry.most - 1, rest)


def is_slow(us: float, usual: float) -> bool:
    """Whether a step took much longer than usual."""
    return us > max(SLOW_FROM * usual, usual + SLOW_US)


def charges(ledger: Ledger, window: tuple[float, float] = (-np.inf, np.inf)) -> Charges:
    """What the requests of a ledger lost, in a window of time (us)."""
    usual, model = usual_us(ledger.entries)
    charging = _Charging(ledger, usual, model)
    inside = [window[0] <= entry.end_us < window[1] for entry in ledger.entries]
    direct = [charging.direct(place) for place in range(len(ledger.entries))]
    lived = 0.0
    for place, entry in enumerate(ledger.entries):
        if not inside[place]:
            continue
        there = entry.rows + sum(entry.waits.values())
        lived += entry.us * there
        for cause, us in direct[place].items():
            charging.charge(cause, us * there, place)
        charging.charge("long", charging.prompts(place) * max(entry.rows - 1, 0), place)
    for queue in queues(ledger.entries):
        _charge_queue(charging, queue, direct, inside)
    _charge_ends(charging, window, lived)
    if ledger.preemptions > PREEMPTED_SHARE * len(ledger.lives) and "blocks" in charging.lost:
        charging.lost["preemption"] += charging.lost.pop("blocks")
        charging.spans["preemption"] = charging.spans["blocks"]
    found = [_charge(charging, cause, ms) for cause, ms in charging.lost.items()]
    found.sort(key=lambda each: (-each.ms, each.cause))
    long = max(charging.long, key=lambda id_: ledger.lives[id_].prompt, default=-1)
    holder = max(charging.held, key=lambda id_: charging.held[id_], default=-1)
    return Charges(found, lived / 1e3, charging.client, charging.client_share, long, holder)


def _charge(charging: _Charging, cause: str, ms: float) -> Charge:
    first, last = (charging.entries[place] for place in charging.spans[cause])
    return Charge(cause, ms, first.step, last.step, first.end_us - first.us, last.end_us)


def usual_us(entries: Sequence[Entry]) -> tuple[np.ndarray, Model | None]:
    """The usual time of each entry's step (float64[n]), at the pace of the machine's better fifth, and the model behind it. An
    entry without a step has its own time."""
    us = np.array([entry.us for entry in entries])
    is_step = np.array([not entry.stopped for entry in entries], dtype=bool)
    is_timed = is_step & (us > 0)
    if is_timed.sum() < STEPS_MIN:
        middle = float(np.median(us[is_timed])) if is_timed.any() else 0.0
        return np.where(is_step, middle, us), None
    features = np.array([entry.features for entry in entries])
    ends = np.array([entry.end_us for entry in entries])
    model = fit(features[is_timed], us[is_timed], (ends - us)[is_timed])
    usual = np.where(is_step, model.predict(features), us)
    ratios = us[is_timed] / usual[is_timed]
    paces = [float(np.median(part)) for part in np.array_split(ratios, max(len(ratios) // 32, 1))]
    return np.where(is_step, usual * min(float(np.percentile(paces, 20)), 1.0), us), model


def queues(entries: Sequence[Entry]) -> list[Queue]:
    """The times in which a queue stood."""
    found: list[Queue] = []
    begin = -1
    for place, entry in enumerate(entries):
        if entry.queue and begin < 0:
            begin = place
        if begin >= 0 and not entry.queue:
            found.append(Queue(begin, place))
            begin = -1
    return [*found, Queue(begin, len(entries))] if begin >= 0 else found


def _charge_queue(charging: _Charging, queue: Queue, direct: list[dict[str, float]], inside: list[bool]) -> None:
    """Charge what requests waited while a queue stood, beside the direct losses in it."""
    entries, sums = charging.entries, Counter[str]()
    begin = max(queue.begin - 1, 0)  # what made the queue may end where it begins
    for place in range(begin, queue.end):
        sums.update(direct[place])
    wall = sum(entries[place].us for place in range(begin, queue.end)) or 1.0
    loud, most = max(sums.items(), key=lambda pair: pair[1], default=("", 0.0))
    owner = loud if most >= LOUD_SHARE * wall else ""
    long = sum(charging.prompts(place) for place in range(queue.begin, queue.end)) / wall
    reasons = {why for place in range(queue.begin, queue.end) for why in entries[place].waits}
    behind = {why: _behind(charging, queue, why, long) for why in reasons}
    for place in range(queue.begin, queue.end):
        entry = entries[place]
        rest = max(entry.us - sum(direct[place].values()), 0.0)
        for why, count in entry.waits.items() if inside[place] and not entry.stopped else ():
            cause = owner or behind[why]
            if cause in ("client", "blocks") and why == "blocks" and entry.widest >= HELD_SHARE * charging.ledger.cached_tokens:
                cause = "holder"
                charging.held[entry.widest_id] += round(rest * count)
            charging.charge(cause, rest * count, place)


def _behind(charging: _Charging, queue: Queue, why: str, long: float) -> str:
    """What stands behind the waits of a queue for a reason of the scheduler's."""
    if why not in WAITS:
        return why
    if long >= 0.3:
        return "long"
    if charging.client:
        return "client"
    if why == "order":
        return "priority"
    if charging.model is None or why in ("blocks", "inputs", "microbatch"):
        return why
    waited = [entry.features for entry in charging.entries[queue.begin : queue.end] if why in entry.waits and not entry.stopped]
    once, twice = (charging.model.predict(times * np.array(waited)).sum() for times in (1, 2))
    return why if twice < ROOM_GAIN * once else "load"


def _charge_ends(charging: _Charging, window: tuple[float, float], lived_us: float) -> None:
    """Charge requests that failed or that clients gave up."""
    lives = charging.ledger.lives
    ended = {id_: each for id_, each in lives.items() if each.ended_us is not None and window[0] <= each.ended_us < window[1]}
    failed = [life for life in ended.values() if life.end in ("abort (error)", "error")]
    if charging.entries and len(failed) >= max(FAILED_SHARE * len(ended), 1):
        charging.charge("errors", max(lived_us, 1.0, *(1e3 * ms for ms in charging.lost.values())), len(charging.entries) - 1)
    cause = "deadline" if deadline_us(lives) else "aborts"
    for life in ended.values():
        if life.end == "abort (client)":
            charging.charge(cause, life.cost_us, len(charging.entries) - 1)


def deadline_us(lives: dict[int, Life]) -> float:
    """The age at which requests were given up, 0 where there is no one age."""
    given_up = [life for life in lives.values() if life.end == "abort (client)"]
    ages = [life.ended_us - life.came_us for life in given_up if life.ended_us is not None and life.came_us is not None]
    middle = statistics.median(ages) if len(ages) >= DEADLINE_MIN else 0.0
    near = sum(abs(age - middle) <= SAME_AGE * middle for age in ages)
    return middle if near >= 0.8 * len(ages) else 0.0


def _largest_client(lives: dict[int, Life]) -> tuple[int, float]:
    """The client that filled the engine and its share of the cost; 0 where none did."""
    costs = dict[int, float]()
    for life in lives.values():
        costs[life.client] = costs.get(life.client, 0.0) + life.cost_us
    everyone = sum(costs.values())
    client, most = max(costs.items(), key=lambda pair: pair[1], default=(0, 0.0))
    if not client or not most or len(costs) < 2 or most < CLIENT_SHARE * everyone:
        return 0, 0.0
    return client, most / everyone
