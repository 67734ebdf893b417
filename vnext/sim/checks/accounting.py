"""Books: what the simulator counts itself, from events and plans alone, to hold against the engine's own counters.

Owns law Y3 of one run: every client gets its own news, once, in order, and usage is what was really computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from vnext.sim.checks.plain_state import Divergence, PlainState
from vnext.state.events import (
    AnyEvent,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    generated_by,
    plan_of,
    unpack_tokens,
)
from vnext.state.outputs import Finish, Output
from vnext.state.state import Counters, Waiting
from vnext.state.traits import everyone_leaves


class Entry:
    """One request's page: what it asked for and what it was sent, by an engine before this one too. Mutable."""

    __slots__ = ("arrival", "hit", "tokens", "finish", "preemptions")

    def __init__(self, arrival: RequestArrived) -> None:
        self.arrival = arrival
        self.hit = -1
        self.tokens: list[int] = unpack_tokens(generated_by(arrival)).tolist()
        self.finish: Finish = ""
        self.preemptions = 0


class Accounting:
    """All pages of one run. Mutable: give it every event once, in order, with its news."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.counts = dict.fromkeys(Counters.__struct_fields__, 0)
        self.token_digest = 0

    def write(self, before: PlainState, event: AnyEvent, after: PlainState, news: tuple[Output, ...]) -> None:
        """Raises Divergence where news or counters are not what happened."""
        match event:
            case RequestArrived():
                self.entries[event.id] = Entry(event)
            case StepCommitted():
                self._reported(event, news)
                self._drafted(before, event, after)
                self.token_digest = xxhash.xxh3_64_intdigest(event.tokens, seed=self.token_digest)
                if after.state.token_digest != self.token_digest:
                    raise Divergence(f"Y1: the digest of all tokens is wrong after step {event.step}")
            case RequestAborted():
                self._aborted(event, news)
        if (plan := plan_of(event)) is not None:
            self._preempted(before, plan.preempted)
            self._admitted(before, [before.state.waiting[place] for place, _ in plan.admitted], after)
        elif everyone_leaves(event):
            self._preempted(before, range(len(before)))
        if before.state.counters is not after.state.counters:
            self._compare(after.state.counters)

    def _admitted(self, before: PlainState, admitted: Sequence[Waiting], after: PlainState) -> None:
        if not admitted:
            return
        starts, caching = dict(zip(after.in_flight[-1].ids, after.in_flight[-1].starts)), before.state.config.prefix_caching
        for waiting in admitted:
            entry, hit = self.entries[waiting.id], starts[waiting.id]
            if entry.hit < 0:
                entry.hit = hit
                self.counts["prompt_tokens"] += len(entry.arrival.prompt) // 4
            self.counts["prefix_hit_tokens"] += hit
            self.counts["prefix_queried_tokens"] += waiting.known if caching else 0

    def _preempted(self, before: PlainState, rows: Sequence[int]) -> None:
        self.counts["preempted"] += len(rows)
        for row in rows:
            self.entries[before.rows.id[row]].preemptions += 1

    def _drafted(self, before: PlainState, event: StepCommitted, after: PlainState) -> None:
        """Drafts count for requests that still run as they did when the step was planned."""
        rates = dict(zip(zip(before.rows.id, before.rows.preemption_count), before.rates))
        now = dict(zip(zip(after.rows.id, after.rows.preemption_count), after.rates))
        for owner, count, drafted in zip(before.in_flight[0].owed, event.counts, event.drafted):
            self.counts["accepted_tokens"] += (count - 1) * (owner in rates)
            self.counts["draft_tokens"] += drafted * (owner in rates)
            rate = rates.get(owner, 0)
            for place in range(min(drafted, count)):
                rate += ((1024 if place < count - 1 else 0) - rate) // 8
            if now.get(owner, rate) != rate:
                raise Divergence(f"D5: request {owner[0]} counts the rate {now[owner]} of kept drafts where it is {rate}")

    def _reported(self, event: StepCommitted, news: tuple[Output, ...]) -> None:
        sampled = unpack_tokens(event.tokens).tolist()
        for reported in news:
            entry = self._open_entry(reported)
            entry.tokens.append(reported.token)
            entry.finish, entry.preemptions = reported.finish, 0
            self.counts["generated_tokens"] += 1
            self.counts["finished"] += reported.finish != ""
            stop = reported.token if reported.finish == "stop" else -1
            if (reported.token, reported.stop_token, reported.cached_tokens) != (sampled[reported.sample], stop, entry.hit):
                raise Divergence(f"Y3: request {reported.id} is told {reported} where its first hit was {entry.hit}")

    def _aborted(self, event: RequestAborted, news: tuple[Output, ...]) -> None:
        for reported in news:
            if reported.id not in event.ids or reported.finish != "abort" or reported.token != -1:
                raise Divergence(f"Y3: an abort of {event.ids} is told as {reported}")
            self._open_entry(reported).finish = "abort"
            self.counts["aborted"] += 1

    def _open_entry(self, reported: Output) -> Entry:
        entry = self.entries[reported.id]
        if entry.finish:
            raise Divergence(f"Y3: request {reported.id} has ended and its client hears more")
        if reported.name != entry.arrival.name:
            raise Divergence(f"Y3: news of request {reported.id} go to {reported.name!r}, not to {entry.arrival.name!r}")
        return entry

    def _compare(self, counters: Counters) -> None:
        for name, count in self.counts.items():
            if getattr(counters, name) != count:
                raise Divergence(f"Y3: {name} counts {getattr(counters, name)} where {count} happened")
