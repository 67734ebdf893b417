"""What a replica owes, as a request that is routed now will find it: prompts that wait, are half computed, or are on their way.

Owns the sums over them: the tokens still to be computed, the blocks that these prompts will have put into the cache before a
later prompt's turn, and the kept pages that they will have taken. All follow from the folded state and from the router's own
decisions; nothing is counted twice, because a routed request leaves when its arrival is folded.

A view is late, and a request takes a while to arrive. Together that is `lag`, in steps: how many the view saw planned between a
decision and the arrival that followed from it. Whatever the two parts are, a request that is routed now arrives `lag` steps from
the state that the view shows, and each step until then computes what the budget allows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from vnext.routing.prompts import Prompt, Routed, waiting_hits
from vnext.state.allocate import hit_tokens_of
from vnext.state.events import AnyEvent, RequestArrived, StepPlanned
from vnext.state.pool import head_after
from vnext.state.state import State, Waiting

LAGS = 8
"""Arrivals of whose lags the median counts: one that was held up says nothing about the next, nor one that met an idle engine."""


class Promised:
    """Of one replica. Mutable; what it says holds for the last state that it followed. `lag`: steps from the state that is known
    to the arrival of a request that is routed now; 0 before any was seen."""

    def __init__(self) -> None:
        self._routed: dict[str, Routed] = {}
        self._unmeasured: dict[str, Prompt] = {}  # routed while no state was known
        self._arrived: dict[int, Routed] = {}
        self._blocks: Counter[bytes] = Counter()
        self._followed: State | None = None
        self._tokens = 0
        self._lags: deque[int] = deque(maxlen=LAGS)
        self.lag = 0

    @property
    def routed(self) -> int:
        """Requests that were routed and have not arrived."""
        return len(self._routed)

    def tokens(self, state: State) -> int:
        """Known tokens that are not computed when a request that is routed now arrives, without those that decoding requests
        have just sampled. Each step until then computes its budget, but for the decoding requests' own tokens."""
        rows, lag, now = len(state.rows), self.lag, state.planned
        capacity = max(state.config.max_num_batched_tokens - rows, 0) if rows < state.config.max_num_seqs else 0
        owed, at = self._tokens, now
        for each in self._routed.values():
            arrives = max(each.step + lag, at)
            owed, at = max(owed - capacity * (arrives - at), 0) + each.tokens, arrives
        return max(owed - capacity * (now + lag - at), 0)

    def add(self, name: str, state: State | None, prompt: Prompt) -> None:
        """This request was routed, maybe while no state is known."""
        self.remove(name)
        if state is None:
            self._unmeasured[name] = prompt
            return
        self.follow(state)
        hashes = prompt.hashes(state)
        self._routed[name] = Routed(len(prompt) - self.hit_tokens(state, prompt), hashes, state.planned)
        self._blocks.update(hashes)

    def remove(self, name: str) -> None:
        """It does not count as routed any more. Idempotent."""
        self._unmeasured.pop(name, None)
        if (gone := self._routed.pop(name, None)) is not None:
            self._drop(gone)

    def seen(self, state: State, events: Sequence[AnyEvent]) -> None:
        """These events were folded; `state` is the one behind them."""
        if not self._routed:
            return
        for place, event in enumerate(events):
            if isinstance(event, RequestArrived):
                self.arrived(event.name, state.planned - sum(isinstance(each, StepPlanned) for each in events[place:]))

    def begin(self, state: State) -> None:
        """Another stream begins with this state, which has the arrivals of some that were routed."""
        for gone in self._arrived.values():
            self._drop(gone)
        self._arrived, self._followed = {}, None
        for request in state.requests.mapping().values():
            self.arrived(request.name)
        for name, prompt in tuple(self._unmeasured.items()):
            self.add(name, state, prompt)

    def arrived(self, name: str, planned: int | None = None) -> None:
        """It is in the state, since that had so many `planned` steps, where this is known; or in another engine's. An API server
        adds two parts to the id of a request that came to it: digits, and the choice."""
        for each in (name, name.rsplit("-", 2)[0]):
            if planned is not None and each in self._routed:
                self._lags.append(max(planned - self._routed[each].step, 0))
                self.lag = sorted(self._lags)[len(self._lags) // 2]
            self.remove(each)

    def follow(self, state: State) -> None:
        """The replica's newest state."""
        if state is self._followed:
            return
        before = None if self._followed is None else self._followed.waiting
        owed = np.maximum(state.rows.known - state.rows.computed - 1, 0)
        prefilling = set(state.rows.id[owed > 0].tolist())
        if state.waiting is not before or self._arrived:
            self._follow_queue(state, prefilling)
        waiting = sum(self._arrived[entry.id].tokens for entry in state.waiting)
        self._tokens, self._followed = waiting + int(owed.sum()), state

    def hit_tokens(self, state: State, prompt: Prompt) -> int:
        """Leading tokens of a prompt that need no computation at its turn: those in the cache, but for pages that will have been
        taken, and those of promised blocks. At least one token is left."""
        cached = hit_tokens_of(state.config, prompt.hit_pages(state)) if state.config.windows else self._lasting(state, prompt)
        if not (self._blocks and prompt.reads_cache):
            return cached
        size, hashes = state.config.block_size, prompt.hashes(state)
        most, count = (len(prompt) - 1) // size, cached // size
        while count < most and self._blocks.get(hashes[count], 0):
            count += 1
        return count * size

    def _lasting(self, state: State, prompt: Prompt) -> int:
        """Tokens of a prompt's leading cached blocks up to the first whose page will have been taken."""
        pages = prompt.hit_pages(state)
        if len(pages) and (due := self._pages_due(state)):
            places = state.pool.status.at(pages)
            taken = (places >= 0) & (places < head_after(state.pool, due))
            if taken.any():
                hashes = prompt.hashes(state)
                for count in taken.nonzero()[0].tolist():
                    if not self._blocks.get(hashes[count], 0):  # a prompt that comes before will hold it
                        pages = pages[:count]
                        break
        return hit_tokens_of(state.config, pages)

    def _pages_due(self, state: State) -> int:
        """Pages that will have been taken by then: for prompts that wait or are on their way, and for the tokens that running
        requests sample until a request arrives."""
        requests, size = len(state.waiting) + len(self._routed), state.config.block_size
        tokens = self._tokens + sum(each.tokens for each in self._routed.values()) + len(state.rows) * self.lag
        return min((tokens // size + requests) * state.config.group_count, state.pool.free)

    def _follow_queue(self, state: State, prefilling: set[int]) -> None:
        """Keep what is promised by those that wait, and by those that have begun and have not computed their prompts."""
        arrived, here = self._arrived, prefilling.copy()
        for entry in state.waiting:
            here.add(entry.id)
            if entry.id not in arrived:
                arrived[entry.id] = promise(state, entry)
                self._blocks.update(arrived[entry.id].hashes)
        for id_ in [id_ for id_ in arrived if id_ not in here]:
            self._drop(arrived.pop(id_))

    def _drop(self, gone: Routed) -> None:
        for each in gone.hashes:
            if self._blocks[each] == 1:
                del self._blocks[each]
            else:
                self._blocks[each] -= 1


def promise(state: State, entry: Waiting) -> Routed:
    """What a waiting request leaves to compute, and its blocks."""
    return Routed(entry.known - waiting_hits(state, entry), entry.block_hashes)
