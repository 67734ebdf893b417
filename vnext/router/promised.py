"""What a replica owes: prompts that wait, are half computed, or were routed and have not arrived as far as the stream tells.

Owns two sums over them: the tokens still to be computed, and the blocks that these prompts will have put into the cache
before a later prompt's turn. Both follow from the folded state and from the router's own decisions; nothing is counted
twice, because a routed request leaves when its arrival is folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vnext.router.prompts import Prompt, Routed, waiting_hits
from vnext.state.events import AnyEvent, RequestArrived
from vnext.state.state import State, Waiting


class Promised:
    """Of one replica. Mutable; `tokens` and `routed` hold for the last state that it followed."""

    def __init__(self) -> None:
        self._routed: dict[str, Routed] = {}
        self._unmeasured: dict[str, Prompt] = {}  # routed while no state was known
        self._arrived: dict[int, Routed] = {}
        self._blocks: Counter[bytes] = Counter()
        self._followed: State | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Known tokens that are not computed, without those that decoding requests have just sampled."""
        return self._tokens + sum(each.tokens for each in self._routed.values())

    @property
    def routed(self) -> int:
        """Requests that were routed and have not arrived."""
        return len(self._routed)

    def add(self, name: str, state: State | None, prompt: Prompt) -> None:
        """This request was routed, maybe while no state is known."""
        self.remove(name)
        if state is None:
            self._unmeasured[name] = prompt
            return
        self.follow(state)
        hashes = prompt.hashes(state)
        hits = self.hit_tokens(state, prompt, prompt.hit_tokens(state))
        self._routed[name] = Routed(len(prompt) - hits, hashes)
        self._blocks.update(hashes)

    def remove(self, name: str) -> None:
        """It does not count as routed any more. Idempotent."""
        self._unmeasured.pop(name, None)
        if (gone := self._routed.pop(name, None)) is not None:
            self._drop(gone)

    def seen(self, events: Sequence[AnyEvent]) -> None:
        """These events were folded."""
        if self._routed:
            for event in events:
                if isinstance(event, RequestArrived):
                    self._arrive(event.name)

    def begin(self, state: State) -> None:
        """Another stream begins with this state, which has the arrivals of some that were routed."""
        for gone in self._arrived.values():
            self._drop(gone)
        self._arrived, self._followed = {}, None
        for request in state.requests.mapping().values():
            self._arrive(request.name)
        for name, prompt in tuple(self._unmeasured.items()):
            self.add(name, state, prompt)

    def _arrive(self, name: str) -> None:
        """It is in the state. An API server adds two parts to the id of a request that came to it: digits, and the choice."""
        self.remove(name)
        self.remove(name.rsplit("-", 2)[0])

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

    def hit_tokens(self, state: State, prompt: Prompt, cached: int) -> int:
        """The `cached` leading tokens, and those of the blocks behind them that are promised. At least one token is left."""
        if not (self._blocks and prompt.reads_cache):
            return cached
        size, hashes = state.config.block_size, prompt.hashes(state)
        most, count = (len(prompt) - 1) // size, cached // size
        while count < most and self._blocks.get(hashes[count], 0):
            count += 1
        return count * size

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
