"""Shrinking: the smallest list of events that still fails, for people to read.

Owns the search: delta debugging (Zeller and Hildebrandt 2002) over the end of a log, its requests, its single events, and
what requests and the configuration ask for. A candidate is not a part of the log, which would mean nothing: rows and
steps are numbered. It is what the remaining arrivals, aborts, resets, plans and commits lead to when plans are decided
anew and every sample is asked for again, so every candidate is legal up to its failure. A plan that nobody decided
stays as it is, where it may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.sched.schedule import schedule
from vnext.sched.shortage import ran_short
from vnext.sim.drafts import drafts_behind, grammar_drafts
from vnext.state.errors import IllegalEvent
from vnext.state.events import (
    AnyEvent,
    BlocksReceived,
    EngineStarted,
    MemoryRanShort,
    RequestArrived,
    RequestId,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    first_of,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.feasibility import refusal
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State
from vnext.state.traits import requests_of


class Whim(msgspec.Struct, frozen=True):
    """A plan of the log that the scheduler would not have made."""

    plan: StepPlanned


Move = AnyEvent | Whim
Item = TypeVar("Item")
Failure = Callable[[Sequence[AnyEvent]], int | None]
"""How many leading events it takes until they fail, None if they do not. It may never fail in another way."""
Voice = Callable[[RequestArrived, Sequence[int]], int]
"""The token that a request samples after a history: a model, or what a log recorded."""

END_EVENTS_MIN = 32
RUN_OUT_STEPS = 48
SIMPLER_CONFIG = {
    "microbatches": (1, 2), "pipeline_depth": (1, 2), "prefix_caching": (False,), "policy": ("fcfs",),
    "long_prefill_token_threshold": (0,), "max_num_seqs": (1, 2, 3), "eos_token_ids": ((),), "windows": ((), (2,)),
    "block_size": (1, 2, 4), "page_count": (2, 3, 4, 6, 8),
}  # fmt: skip
"""Settings that are easier to think about, the simplest first."""
PLAIN = RequestArrived(id=RequestId(0), name="", prompt=b"", sampling=Sampling(seed=0, max_tokens=1), priority=0, arrival_ns=0)
"""A request without anything that one need not have."""
SEEDS = range(8)
"""Seeds of sampling that are tried for a shorter answer."""
RUN_OUT = (StepPlanned(step=0), StepCommitted(step=0, tokens=b"")) * RUN_OUT_STEPS


def shrink(
    events: Sequence[AnyEvent], failure: Failure, voice: Voice, folded_max: int = 40_000
) -> tuple[AnyEvent, ...]:
    """The smallest failing list of events that was found; `events` itself if no candidate fails.

    `folded_max` bounds the events of all candidates together (the search of the log's end not counted), and so the time.
    """
    search = _Search(first_of(events), failure, voice)
    moves = search.end_of(tuple(moves_of(events)))
    if moves is None:
        return tuple(events)
    search.left = folded_max
    size = -1
    while size != len(search.best) and search.left > 0:
        size = len(search.best)
        moves = search.without_requests(moves)
        moves = search.with_simpler_config(moves)
        moves = search.without_moves(moves)
        moves = search.with_simpler_requests(moves)
        moves = search.with_other_seeds(moves)
    return without_ends(search.best, failure)


def without_ends(events: tuple[AnyEvent, ...], failure: Failure) -> tuple[AnyEvent, ...]:
    """A beginning of the events that fails, and of which no part fails that lacks its last event."""
    while (length := failure(events[:-1])) is not None:
        events = events[:length]
    return events


def moves_of(events: Sequence[AnyEvent]) -> Iterator[Move]:
    """What the events after the first do, plans that nobody decided marked. An event that fails is the last."""
    return moves_from(start(first_of(events)), events[1:])


def moves_from(state: State, events: Sequence[AnyEvent]) -> Iterator[Move]:
    """As `moves_of`, of events behind a state."""
    for event in events:
        try:
            move = Whim(event) if isinstance(event, StepPlanned) and event != schedule(state) else event
            state = reduce(state, event)
        except Exception:  # any failure of any kind: it is what is to be shrunk
            yield event
            return
        yield move


class _Search:
    """One search. Mutable: `best` is the smallest failing list so far, `left` the events that may still be folded."""

    def __init__(self, started: EngineStarted, failure: Failure, voice: Voice) -> None:
        self.started, self._failure, self._voice = started, failure, voice
        self.best: tuple[AnyEvent, ...] = ()
        self.left = 0

    def attempt(self, moves: Sequence[Move], started: EngineStarted | None = None) -> tuple[Move, ...] | None:
        """The moves up to the failure, None if there is none."""
        author = Author(started or self.started, self._voice)
        for place, move in enumerate(moves):
            if not author.follow(place, move):
                break
        self.left -= len(author.events)
        length = self._failure(author.events)
        if length is None:
            return None
        self.best = tuple(author.events[:length])
        return tuple(moves[: author.places[length - 1] + 1])

    def end_of(self, moves: tuple[Move, ...]) -> tuple[Move, ...] | None:
        """A short end of the log that fails, perhaps a little later than the log did."""
        size = END_EVENTS_MIN
        while True:
            found = self.attempt(moves[-size:] + RUN_OUT)
            if found is not None or size >= len(moves):
                return found
            size *= 4

    def without_requests(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """Whole requests are left out: arrivals with their aborts, the later ones first."""
        ids = [move.id for move in moves if isinstance(move, RequestArrived)]

        def attempt(kept: Sequence[int]) -> tuple[Move, ...] | None:
            return self.attempt([move for move in moves if not isinstance(move, RequestArrived) or move.id in kept])

        found = moves
        for kept in reduced(ids, lambda kept: self.left > 0 and attempt(kept) is not None):
            found = attempt(kept) or found
        return found

    def without_moves(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        for kept in reduced(moves, lambda kept: self.left > 0 and self.attempt(kept) is not None):
            moves = self.attempt(kept) or moves
        return moves

    def with_simpler_requests(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        place = 0
        while place < len(moves):
            move = moves[place]
            for simpler in simpler_arrivals(move) if isinstance(move, RequestArrived) else ():
                if self.left <= 0:
                    return moves
                found = self.attempt((*moves[:place], simpler, *moves[place + 1 :]))
                if found is not None:
                    moves, place = found, place - 1
                    break
            place += 1
        return moves

    def with_other_seeds(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """Other answers, where one of them comes to its failure sooner."""
        for place, move in enumerate(moves):
            if not isinstance(move, RequestArrived):
                continue
            for seed in SEEDS:
                if self.left <= 0 or place >= len(moves):
                    return moves
                other = replace(move, sampling=replace(move.sampling, seed=seed))
                best, found = self.best, self.attempt((*moves[:place], other, *moves[place + 1 :]))
                if found is not None and len(self.best) < len(best):
                    moves = found
                else:
                    self.best = best
        return moves

    def with_simpler_config(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """Small blocks and pools fill sooner; what they leave out of the moves shows whether it was a gain."""
        for name, values in SIMPLER_CONFIG.items():
            for value in values:
                started = replace(self.started, config=replace(self.started.config, **{name: value}))
                if self.left <= 0 or value == getattr(self.started.config, name):
                    break
                best, found = self.best, self.attempt((*moves, *RUN_OUT), started)
                if found is not None and len(found) <= len(moves):
                    self.started, moves = started, found
                    break
                self.best = best
        return moves


def reduced(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Iterator[tuple[Item, ...]]:
    """Delta debugging: ever smaller sublists that fail; chunks from the end are left out first."""
    items, size = tuple(items), max(len(items) // 2, 1)
    while size:
        end = len(items)
        while end > 0:
            rest = items[: max(end - size, 0)] + items[end:]
            if fails(rest):
                items = rest
                yield items
            end -= size
        size //= 2


def simpler_arrivals(arrival: RequestArrived) -> Iterator[RequestArrived]:
    """The same request asking for less, the greatest steps first; none equals it."""
    tokens, sampling = unpack_tokens(arrival.prompt).tolist(), arrival.sampling
    wishes = [replace(sampling, max_tokens=count) for count in (1, sampling.max_tokens // 2, sampling.max_tokens - 1) if count > 0]
    wishes.append(Sampling(seed=sampling.seed, max_tokens=sampling.max_tokens))
    yield from (replace(arrival, sampling=wish) for wish in wishes if wish.max_tokens < sampling.max_tokens or wish != sampling)
    yield from (replace(arrival, prompt=pack_tokens(tokens[:size])) for size in (len(tokens) // 2, len(tokens) - 1) if size > 0)
    if isinstance(arrival, RequestResumed):
        yield RequestArrived(**{name: getattr(arrival, name) for name in RequestArrived.__struct_fields__})
    defaults = {field: getattr(PLAIN, field) for field in arrival.traits.shrinks}
    plain = replace(arrival, **defaults)
    if plain != arrival:
        yield plain


class Author:
    """Writes the events that moves lead to. Mutable; `places` says which move each event came from."""

    def __init__(self, started: EngineStarted, voice: Voice) -> None:
        self.state = start(started)
        self.events: list[AnyEvent] = [started]
        self.places = [-1]
        self._voice, self._is_toy = voice, started.model == "toy"
        self._ids: dict[int, int] = {}
        self._arrivals: dict[int, RequestArrived] = {}
        self._histories: dict[int, list[int]] = {}

    def follow(self, place: int, move: Move) -> bool:
        """Write one move's event if it may happen now. False once the engine has failed on the way."""
        try:
            event = self._event(move)
        except Exception:  # a bug of the decision itself: the judge asks it again
            return False
        if event is None:
            return True
        self.events.append(event)
        self.places.append(place)
        try:
            self.state = reduce(self.state, event)
        except Exception:  # any failure of any kind is what is looked for; the judge sees it too
            return False
        return True

    def _event(self, move: Move) -> AnyEvent | None:
        match move:
            case RequestArrived():
                return self._arrived(move)
            case StepPlanned():
                return schedule(self.state)
            case Whim():
                return self._strange(move.plan)
            case StepCommitted():
                return self._committed()
            case MemoryRanShort():
                return ran_short(self.state, move.cause) if self.state.in_flight else None
            case EngineStarted():
                return None
        event = self._renamed(move)
        return event and self._if_legal(event)

    def _renamed(self, move: AnyEvent) -> AnyEvent | None:
        """The event of the same requests and of a transfer that may begin or end now. None if none of its requests has come."""
        tier, ids = self.state.tier, tuple(self._ids[id_] for id_ in requests_of(move) if id_ in self._ids)
        if move.traits.requests and not ids:
            return None
        names: dict[str, object] = {
            field: ids if isinstance(getattr(move, field), tuple) else ids[0] for field in move.traits.requests
        }
        if move.traits.transfer == "begins" and tier is not None:
            names["transfer"] = tier.begun
        if move.traits.transfer == "ends" and tier is not None and tier.transfers:
            names["transfer"] = tier.transfers[0].number
            if isinstance(move, BlocksReceived):
                received = tier.transfers[0].keys[tier.transfers[0].hits :][: move.count]
                names |= {"count": len(received), **dict.fromkeys(("names", "checksums"), b"".join(received))}
        return replace(move, **names) if names else move

    def _strange(self, plan: StepPlanned) -> StepPlanned | None:
        plan = replace(plan, step=self.state.planned)
        return plan if self._if_legal(plan) else None

    def _if_legal(self, move: AnyEvent) -> AnyEvent | None:
        try:
            reduce(self.state, move)
        except IllegalEvent:
            return None
        return move

    def _arrived(self, move: RequestArrived) -> RequestArrived | None:
        arrival = replace(move, id=self.state.next_id)
        while refusal(self.state.config, arrival) is not None:
            if isinstance(arrival, RequestResumed) and arrival.generated:
                arrival = replace(arrival, generated=b"")
            if arrival.sampling.max_tokens <= 1:
                return None
            wish = replace(arrival.sampling, max_tokens=arrival.sampling.max_tokens // 2)
            arrival = replace(arrival, sampling=wish)
        self._ids[move.id], self._arrivals[arrival.id] = arrival.id, arrival
        self._histories[arrival.id] = unpack_tokens(arrival.prompt).tolist()
        return self._with_own_tokens(arrival) if isinstance(arrival, RequestResumed) else arrival

    def _with_own_tokens(self, arrival: RequestResumed) -> RequestResumed:
        """With the tokens that the request samples here, as many as it brought unless one ends it."""
        first, count = len(arrival.prompt) // 4, len(arrival.generated) // 4
        tokens = [self._token(arrival.id, first + place) for place in range(count)]
        while refusal(self.state.config, replace(arrival, generated=pack_tokens(tokens))) is not None:
            tokens.pop()
        return replace(arrival, generated=pack_tokens(tokens))

    def _committed(self) -> StepCommitted | None:
        if not self.state.in_flight:
            return None
        scheduled = self.state.in_flight[0]
        drafts = np.zeros_like(scheduled.counts) if scheduled.drafts is None else scheduled.drafts
        ends = (scheduled.starts + scheduled.counts - drafts)[scheduled.samples].tolist()
        asked = list(zip(scheduled.ids[scheduled.samples].tolist(), ends, drafts[scheduled.samples].tolist()))
        guesses = [self._drafts(*each) for each in asked]
        kept = [(*each, False).index(False) + 1 for each in guesses]
        places = [(id_, end + place) for (id_, end, _), count in zip(asked, kept) for place in range(count)]
        commit = StepCommitted(step=scheduled.step, tokens=pack_tokens([self._token(*each) for each in places]))
        return replace(commit, counts=bytes(kept), drafted=bytes(map(len, guesses))) if any(guesses) else commit

    def _drafts(self, id_: int, end: int, most: int) -> list[bool]:
        """The drafts behind the first `end` tokens of a request, and whether each is kept."""
        config, arrival = self.state.config, self._arrivals[id_]
        if config.speculation is None or config.speculation.method != "grammar" or not self._is_toy:
            return drafts_behind(config, arrival.sampling.seed + id_, end, most)
        answer = self._histories[id_][len(arrival.prompt) // 4 : end]
        return grammar_drafts(config, arrival.sampling.constraint, answer, most)

    def _token(self, id_: int, place: int) -> int:
        """The request's token at a place of its history: the same one whenever it is sampled."""
        history = self._histories[id_]
        while len(history) <= place:
            history.append(self._voice(self._arrivals[id_], history))
        return history[place]
