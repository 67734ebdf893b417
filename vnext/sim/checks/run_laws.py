"""Laws of whole runs, counted a second time from the events alone: what clients have had, inputs, pins and tiers.

The engine's form of clients is vnext/state/store/clients.py. This one counts token by token, from the rows before and after every
event, and none of them falls far behind while it waits. A token of a request of weight 3 counts as a third: as UNIT // 3 here,
where one of weight 1 is UNIT, whether the engine counts in such units yet or in tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

from vnext.sim.checks.fitting import longest_hit, snapshot_count
from vnext.sim.checks.plain_state import PlainState
from vnext.state.block_hash import leading_hashes
from vnext.state.errors import LawBroken
from vnext.state.events import (
    AnyEvent,
    ClockTicked,
    EnginePaused,
    EngineRecovered,
    InputEncoded,
    InputsFound,
    InputsSought,
    MemoryRanShort,
    PinsYielded,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    WeightsChanged,
    pack_tokens,
    plan_of,
    unpack_tokens,
)
from vnext.state.facilities.tier import transferring
from vnext.state.outputs import Output
from vnext.state.pool import is_pinned, pinned_count
from vnext.state.recurrent import pinned_max
from vnext.state.state import Request, root_of
from vnext.state.store.clients import NEXT_TOKENS, UNIT, ClientKey, services
from vnext.state.store.columns_numpy import group_hash
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.pins import DEPTHS
from vnext.state.traits import everyone_leaves

PATIENCE = 8


class ClientBook:
    """The clients of one run. Mutable: give it every event once, in order."""

    def __init__(self) -> None:
        self._keys: dict[int, ClientKey] = {}
        self._prices: dict[int, int] = {}
        self._dearest: dict[ClientKey, int] = {}
        self._service: dict[ClientKey, int] = {}
        self._idle: dict[ClientKey, int] = {}
        self._next_starts: dict[int, int] = {}
        self._got: dict[ClientKey, int] = {}
        self._since: dict[ClientKey, dict[ClientKey, int]] = {}
        self._most: dict[int, int] = {}
        self._alone: ClientKey | None = None

    def write(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """F1, F2 of one event. Raises LawBroken."""
        self.note(event)
        gained = self.count(before, after)
        if after.state.clients is not None:
            self.falls_behind(before, event, after)
            self._count(before, event, after, gained)
            self._compare(before, event, after)

    def note(self, event: AnyEvent) -> None:
        """Whose request it is that arrives."""
        if isinstance(event, RequestArrived):
            self._keys[event.id] = key = event.priority, event.client
            self._prices[event.id] = price = UNIT // event.weight
            self._dearest[key] = max(self._dearest.get(key, 0), price)

    def count(self, before: PlainState, after: PlainState) -> Counter[ClientKey]:
        """What the tokens that an event computes for each client cost."""
        gained = self._gained(before, after)
        self._got |= {key: self._got.get(key, 0) + tokens for key, tokens in gained.items()}
        return gained

    def restart(self) -> None:
        """Somebody was admitted whose turn it was not: from here on everybody is as far behind as it is."""
        self._since.clear()

    def _gained(self, before: PlainState, after: PlainState) -> Counter[ClientKey]:
        """What the tokens cost that an event computes for each client, less what rows lose that go back: of rows that were there,
        and of those that join behind their hits."""
        had = dict(zip(before.rows.id, before.rows.computed))
        starts = dict(zip(after.in_flight[-1].ids, after.in_flight[-1].starts)) if after.in_flight else {}
        gained: Counter[ClientKey] = Counter()
        for id_, computed in zip(after.rows.id, after.rows.computed):
            start = had.get(id_)
            gained[self._keys[id_]] += self._prices[id_] * (computed - (starts[id_] if start is None else start))
        return gained

    def falls_behind(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """F1: while a client waits, no other of its priority gets more tokens computed than it and four times what the rows of a
        client may compute, and NEXT_TOKENS for each client, all divided by weights."""
        state = after.state
        for priority, most in self._at_most(after).items():
            self._most[priority] = max(self._most.get(priority, 0), most)
        if state.paused or transferring(before.state) or transferring(state) or _hurries(before, event):
            self.restart()
        waiting = dict.fromkeys(self._keys[entry.id] for entry in state.waiting)
        self._since = {key: since for key, since in self._since.items() if key in waiting}
        for key in waiting:
            since = self._since.setdefault(key, dict(self._got))
            known = [other for other in self._got if other[0] == key[0]]
            bound = 4 * self._most.get(key[0], 0) + NEXT_TOKENS * sum(self._dearest[other] for other in known)
            for other in known:
                lead = self._got[other] - since.get(other, 0) - self._got.get(key, 0) + since.get(key, 0)
                if lead > bound:
                    raise LawBroken("F1", f"{other} got {lead / UNIT} tokens more than {key}, which waits: {bound / UNIT} at most")

    def _at_most(self, seen: PlainState) -> dict[int, int]:
        """By priority, the most that the rows of one client have cost and may come to cost."""
        limits: Counter[ClientKey] = Counter()
        for id_, limit in zip(seen.rows.id, seen.rows.limit):
            limits[self._keys[id_]] += self._prices[id_] * limit
        return {priority: max(each for key, each in limits.items() if key[0] == priority) for priority, _ in limits}

    def _count(self, before: PlainState, event: AnyEvent, after: PlainState, gained: Counter[ClientKey]) -> None:
        waits = _who_waits(before, event)
        begin = [self._keys[id_] for id_ in waits]
        prices = {self._keys[id_]: self._prices[id_] for id_ in reversed(waits)}
        if isinstance(event, RequestArrived) and not before.state.config.counts_alone and self._alone != begin[0]:
            if not before.rows.id and not before.state.waiting:
                self._service, self._idle, self._next_starts, self._alone = {}, {}, {}, begin[0]
            elif self._alone is not None:
                self._service, self._alone = {self._alone: self._cost(before)}, None
        if self._alone is not None:
            return
        if isinstance(event, RequestArrived) and begin[0] not in self._service:
            self._service[begin[0]] = self._idle.pop(begin[0], 0)
        waited = dict.fromkeys(self._keys[entry.id] for entry in before.state.waiting)
        old = dict(self._service)
        for key in dict.fromkeys(begin):
            if key not in waited:
                self._lift(key, old, waited, prices[key])
        for key, tokens in gained.items():
            self._service[key] += tokens
        live = dict.fromkeys(self._keys[id_] for id_ in (*after.rows.id, *(entry.id for entry in after.state.waiting)))
        self._idle |= {key: service for key, service in self._service.items() if key not in live}
        priorities = dict.fromkeys(priority for priority, _ in live)
        self._service = {key: service for key, service in self._service.items() if key in live}
        self._idle = {key: service for key, service in self._idle.items() if key[0] in priorities}
        self._next_starts = {priority: start for priority, start in self._next_starts.items() if priority in priorities}

    def _cost(self, seen: PlainState) -> int:
        return sum(self._prices[id_] * computed for id_, computed in zip(seen.rows.id, seen.rows.computed))

    def _lift(self, key: ClientKey, old: dict[ClientKey, int], waited: Container[ClientKey], price: int) -> None:
        others = {other: service for other, service in old.items() if other[0] == key[0] and other != key}
        if not others:
            return
        queued = [service for other, service in others.items() if other in waited]
        start = max(min(queued) if queued else max(others.values()), self._next_starts.get(key[0], 0))
        if old[key] <= start:
            self._service[key], self._next_starts[key[0]] = start, start + NEXT_TOKENS * price

    def _compare(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """F2: a client's service is what was computed for it, divided by weights, behind the service at which it began to wait."""
        clients = after.state.clients
        assert clients is not None
        units = UNIT // clients.unit
        served = {key: units * service for key, service in services(after.state, clients).items()}
        idle = {key: units * service for key, service in clients.idle.items()}
        if isinstance(event, StepCommitted) and any(before.in_flight[0].drafts):  # those of a row that ends may stay
            for key in dict.fromkeys(self._keys[id_] for id_ in before.rows.id if id_ not in after.rows.id):
                for own, engines in ((self._service, served), (self._idle, idle)):
                    own |= {key: engines[key]} if key in own and key in engines else {}
        starts = {priority: units * group.next_start for priority, group in clients.classes.items() if group.next_start}
        found, right = (served, idle, starts), (self._service, self._idle, self._next_starts)
        if found != right:
            raise LawBroken("F2", f"the clients, those idle and the next starts are {found} where {right} is what was computed")


def _who_waits(before: PlainState, event: AnyEvent) -> Sequence[int]:
    """The requests that an event puts into the queue."""
    if isinstance(event, RequestArrived):
        return (event.id,)
    if (plan := plan_of(event)) is not None:
        return [before.rows.id[row] for row in plan.preempted]
    return before.rows.id if everyone_leaves(event) else ()


def _hurries(before: PlainState, event: AnyEvent) -> bool:
    """Whether a plan admits a request that was preempted so often that it comes before others."""
    admitted = plan.admitted if (plan := plan_of(event)) is not None else ()
    return any(before.state.waiting[place].preemption_count >= PATIENCE for place, _ in admitted)


# ---- inputs ------------------------------------------------------------------------------------------------------


class EncodingBook:
    """The input whose units ranks have computed, how many, and how many of them since the last plan; for whom they look in files,
    and which inputs (request, place) they have read there. Mutable."""

    def __init__(self) -> None:
        self._input, self._units, self._all = (-1, -1), 0, 0
        self._since, self._last_since, self._has_begun = 0, 0, False
        self._searches, self._found = set[int](), set[tuple[int, int]]()

    def write(self, before: PlainState, event: AnyEvent, after: PlainState) -> None:
        """Check what one event does to inputs. Raises LawBroken."""
        match event:
            case InputEncoded():
                self._count(before, event)
            case EngineRecovered():
                self._units = 0
                self._searches.clear()
                self._found.clear()
            case InputsSought():
                self._searches.add(event.id)
            case InputsFound():
                self._searches.discard(event.id)
                self._found.update((event.id, place) for place in event.places)
        if (plan := plan_of(event)) is not None and (early := self._searches.intersection(after.in_flight[-1].ids)):
            raise LawBroken("E6", f"requests {sorted(early)} are in step {plan.step} while their inputs are looked for")
        if after.state.config.input_units and (plan := plan_of(event)) is not None:
            self._plan(before, bool(plan.preempted or plan.changed), after)

    def decided(self, before: PlainState, lacks_pages: bool) -> None:
        """E4: an input that a row has reached gets a unit with each decided step, or one begins."""
        if lacks_pages or self._last_since or self._has_begun:
            return
        rows = zip(before.rows.id, before.rows.computed, before.rows.prompt, before.histories)
        for id_, computed, prompt, history in rows if before.state.config.input_units else ():
            has_all = (self._input == (id_, computed) and self._units == self._all) or (id_, computed) in self._found
            if not has_all and computed < prompt and unpack_tokens(history)[computed] < INPUT_BEGINS:
                raise LawBroken("E4", f"request {id_} waits at the input at {computed}, and the next step has no unit for it")

    def _count(self, before: PlainState, event: InputEncoded) -> None:
        """E2: units come in order and once, one a step beside requests that decode."""
        if (event.id, event.place) != self._input:
            self._input, self._units, self._all = (event.id, event.place), 0, _units_of(before, event)
        self._units, self._since = self._units + event.units, self._since + event.units
        beside = any(computed >= prompt for computed, prompt in zip(before.rows.computed, before.rows.prompt))
        if self._units > self._all or (beside and self._since > 1):
            raise LawBroken("E2", f"{event}, {self._units} units in all and {self._since} with this step")

    def _plan(self, before: PlainState, lacks_pages: bool, after: PlainState) -> None:
        """E3: an input begins behind its last unit, except where it was found or pages lack. E6: no step has a request whose inputs
        are looked for."""
        step, self._has_begun = after.in_flight[-1], False
        self._last_since, self._since = self._since, 0
        for id_, start, count in zip(step.ids, step.starts, step.counts):
            row = after.rows.id.index(id_)
            known = unpack_tokens(after.histories[row])
            for place in range(start, min(start + count, after.rows.prompt[row])):
                begins = place
                while id_ not in before.rows.id and place == start and INPUT_BEGINS <= known[begins] < 0:
                    begins -= 1
                if known[begins] >= INPUT_BEGINS or (id_, begins) in self._found:
                    continue
                if self._input == (id_, begins) and self._units == self._all:
                    self._units, self._has_begun = 0, True
                elif not lacks_pages:
                    raise LawBroken("E3", f"request {id_} begins the input at {begins} with {self._units} units of {self._input}")


def _units_of(seen: PlainState, event: InputEncoded) -> int:
    """The units of an input, token by token: each of its tokens is a part of one."""
    length, known = 1, unpack_tokens(seen.state.requests[event.id].prompt).tolist()
    while event.place + length < len(known) and INPUT_BEGINS <= known[event.place + length] < 0:
        length += 1
    parts = length * seen.state.config.input_units
    return next(units for units in range(1, 2 + parts) if units * 1024 >= parts)


# ---- pins and tiers ----------------------------------------------------------------------------------------------
# What stays in the cache and until when. K5 is a law of every state (vnext/state/laws.py). That pins stop nobody is a part of S6
# (sim/laws.py).


class End(NamedTuple):
    """When a pin ends; of those that end together, the one with the smallest `height` leaves first."""

    second: int
    height: int


def _edges(after: PlainState, names: tuple[bytes, ...]) -> list[bool]:
    """Behind which of these blocks a request could go on."""
    states = after.state.pool.states
    return [states is None or states.prefix_index.block_of(name) is not None for name in names]


class PinBook:
    """The pinned pages of one run. Mutable: give it every event once, in order."""

    def __init__(self) -> None:
        self._ends: dict[int, End] = {}
        self._wanted: list[bytes] = []

    def write(self, before: PlainState, event: AnyEvent, after: PlainState, news: tuple[Output, ...]) -> None:
        """K6: a pin lasts until its time is over, others need its place, it yields to a request, or nothing is a hit any more."""
        match event:
            case ClockTicked():
                self._ends = {page: end for page, end in self._ends.items() if end.second > event.seconds}
            case PinsYielded():
                self._leave(event.count)
            case PrefixCacheReset() | WeightsChanged() | EngineRecovered() | EnginePaused(mode="sleep"):
                self._ends.clear()
            case MemoryRanShort() if len(after.state.pool.prefix_index) == 0:
                self._ends.clear()
            case StepCommitted() | RequestAborted():
                for row, id_ in enumerate(before.rows.id):
                    if id_ not in after.rows.id:
                        came = pack_tokens([each.token for each in news if each.id == id_ and each.token >= 0])
                        self._pin(before.state.requests[id_], before.histories[row] + came, after)
                        self._require_snapshots(before, after)
        self._compare(after)

    def _pin(self, request: Request, history: bytes, after: PlainState) -> None:
        """The blocks that a request which leaves wants to stay, and that are a hit. Its last token was never computed for it."""
        state, config = after.state, after.state.config
        for tokens, seconds in request.sampling.retention if config.pinned_pages_max else ():
            count = min(tokens, len(history) // 4 - 1) // config.block_size
            names = leading_hashes(root_of(state, request), history, config.block_size, count)
            groups = range(config.group_count)
            found = state.pool.prefix_index.blocks_of(group_hash(name, group) for name in names for group in groups)
            hits = longest_hit(after, found, _edges(after, names))
            for place, page in enumerate(hits):
                if page is not None:
                    end = End(state.clock + seconds, -(place // config.group_count))
                    self._ends[page] = max(end, self._ends.get(page, end))
            self._leave(len(self._ends) - config.pinned_pages_max)
            if any(page in self._ends for page in hits[-config.group_count :]):
                self._wanted.append(names[len(hits) // config.group_count - 1])

    def _require_snapshots(self, before: PlainState, after: PlainState) -> None:
        """With the blocks stays the snapshot behind the last one, unless pins of snapshots give way in this event."""
        then, now, wanted = before.state.pool.states, after.state.pool.states, self._wanted
        self._wanted = []
        if then is None or now is None or pinned_count(now) >= pinned_max(after.state.config):
            return
        pages = [page for page in now.prefix_index.blocks_of(wanted) if page is not None]
        if (then.pins.displaced if then.pins else 0) == (now.pins.displaced if now.pins else 0):
            loose = [page for page in pages if not is_pinned(now, page)]
            if loose:
                raise LawBroken("K6", f"the snapshots {loose} of pinned prefixes are not pinned")

    def _leave(self, count: int) -> None:
        for page in sorted(self._ends, key=lambda page: (self._ends[page], page))[: max(count, 0)]:
            del self._ends[page]

    def _compare(self, after: PlainState) -> None:
        pins = after.state.pool.pins
        words = [] if pins is None else pins.ends.values().tolist()
        found = {page: End(word // DEPTHS, word % DEPTHS - DEPTHS + 1) for page, word in enumerate(words) if word}
        if found != self._ends:
            differ = sorted(page for page in found.keys() | self._ends.keys() if found.get(page) != self._ends.get(page))
            page = differ[0]
            raise LawBroken("K6", f"page {page} is pinned until {found.get(page)} where it is {self._ends.get(page)}")


# ---- tiers ---------------------------------------------------------------------------------------------------------
# A law of the disk tier: a reset forgets what is on it.
# K1 is the shadow cache's (rank.py), K3 is a law of every state (vnext/state/laws.py).


def resets_forget(event: AnyEvent, after: PlainState) -> None:
    """K4: behind a reset nothing is a hit, neither in memory nor on disk, nor what is being read."""
    if not isinstance(event, PrefixCacheReset):
        return
    tier = after.state.tier
    left = 0 if tier is None else len(tier.disk) + sum(len(each.keys) for each in tier.transfers)
    left += len(tier.snapshots.disk) if tier is not None and tier.snapshots is not None else 0
    kept = len(after.state.pool.prefix_index) + snapshot_count(after.state)
    if left or kept:
        raise LawBroken("K4", f"{left} blocks on disk and {kept} in memory outlive a reset")
