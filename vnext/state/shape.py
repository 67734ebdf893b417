"""Shape: events without their text, from which every decision still replays exactly.

Owns what is kept of each event when a log may not hold texts. Token ids become pseudonyms (pseudonym.py); only a token
that ends its request stays where it does so, and no block that holds it there is ever named, so prompts may repeat it
under a pseudonym. Names become numbers, biases keep their count only, seeds go. Lengths, priorities, salts' equality,
sampling bounds and stop ids stay. A step costs array arithmetic over its rows.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
import numpy as np

from vnext.state import pseudonym
from vnext.state.committing import settle
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.log import pseudonym_base
from vnext.state.params import Sampling
from vnext.state.state import State

SLOTS_MIN = 64


class Shaper:
    """Turns each event of one engine into its shape. Mutable: give it every event once, in order."""

    def __init__(self, started: EngineStarted, key: bytes) -> None:
        """`key` is 16 secret bytes that are never written and forgotten with the engine."""
        self._key = key
        self._block_size = started.config.block_size
        self._base = pseudonym_base(started.config)
        self._tails = _Tails(self._block_size)

    def shape(self, before: State, event: AnyEvent) -> AnyEvent:
        """The event's shape. `before` is the state in which it is about to be folded."""
        match event:
            case StepCommitted():
                return self._committed(before, event)
            case RequestArrived():
                self._tails.sweep(before)
                return self._arrived(event)
            case EngineStarted() | RequestAborted() | StepPlanned() | PrefixCacheReset():
                return event
            case _:
                assert_never(event)

    def _arrived(self, event: RequestArrived) -> RequestArrived:
        tokens = unpack_tokens(event.prompt)
        root = pseudonym.root_secret(self._key, event.cache_salt)
        secrets = pseudonym.words(pseudonym.block_secrets(self._key, root, event.prompt, self._block_size))
        shaped, running_sum = pseudonym.pseudonyms(secrets, tokens, self._block_size, self._base)
        full = len(tokens) // self._block_size * self._block_size
        self._tails.add(event.id, secrets[-1], running_sum, tokens[full:])
        return msgspec.structs.replace(
            event,
            name=str(event.id),
            prompt=pack_tokens(shaped),
            sampling=shape_sampling(event.sampling, self._base),
            cache_salt=pseudonym.salt_label(self._key, event.cache_salt),
        )

    def _committed(self, before: State, event: StepCommitted) -> StepCommitted:
        """Results that the reducer drops become the first pseudonym: nobody will read them."""
        settled = settle(before, event)
        shaped = np.full(len(event.tokens) // 4, self._base, dtype=np.int32)
        slots = self._tails.slots_of(before.rows.id[settled.rows])
        replaced = self._tails.take(slots, settled.tokens, self._key, self._base)
        shaped[settled.samples] = np.where(settled.stopped, settled.tokens, replaced)
        return StepCommitted(step=event.step, tokens=pack_tokens(shaped))


def shape_sampling(sampling: Sampling, base: int) -> Sampling:
    """The parameters without the seed and with neutral biases in their number.

    A stop id that no token can have becomes -1, because a pseudonym could have it.
    """
    bias = tuple((place, 0.0) for place in range(len(sampling.logit_bias)))
    stops = tuple(token if token < base else -1 for token in sampling.stop_token_ids)
    return msgspec.structs.replace(sampling, seed=0, logit_bias=bias, stop_token_ids=stops)


class _Tails:
    """The unfinished block of each live request, as columns: secret, running sum, length and tokens."""

    def __init__(self, block_size: int) -> None:
        self._slots: dict[int, int] = {}
        self._free: list[int] = list(range(SLOTS_MIN))
        self._last_ids = self._last_slots = np.empty(0, dtype=np.int64)
        self.secrets = np.zeros((SLOTS_MIN, 2), dtype=np.uint64)
        self.sums = np.zeros(SLOTS_MIN, dtype=np.uint64)
        self.counts = np.zeros(SLOTS_MIN, dtype=np.int64)
        self.tokens = np.zeros((SLOTS_MIN, block_size), dtype="<i4")

    def add(self, request_id: int, secret: np.ndarray, running_sum: np.uint64, tokens: np.ndarray) -> None:
        if not self._free:
            self._grow()
        slot = self._slots[request_id] = self._free.pop()
        self.secrets[slot], self.sums[slot], self.counts[slot] = secret, running_sum, len(tokens)
        self.tokens[slot, : len(tokens)] = tokens

    def _grow(self) -> None:
        size = len(self.sums)
        for name in ("secrets", "sums", "counts", "tokens"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self._free.extend(range(size, 2 * size))

    def sweep(self, state: State) -> None:
        """Forget requests that have ended, now and then: the cost is spread over as many arrivals."""
        if len(self._slots) < 2 * len(state.requests) + SLOTS_MIN // 2:
            return
        for request_id in [id_ for id_ in self._slots if id_ not in state.requests]:
            self._free.append(self._slots.pop(request_id))

    def slots_of(self, ids: np.ndarray) -> np.ndarray:
        """Slots of these requests (int64[n]); in a steady batch they are those of the step before."""
        if not np.array_equal(ids, self._last_ids):
            self._last_ids = ids.copy()
            self._last_slots = np.array([self._slots[id_] for id_ in ids.tolist()], dtype=np.int64)
        return self._last_slots

    def take(self, slots: np.ndarray, tokens: np.ndarray, key: bytes, base: int) -> np.ndarray:
        """Append one token to each of these tails; returns the tokens' pseudonyms (int32[n])."""
        secrets, sums, counts = self.secrets[slots], self.sums[slots], self.counts[slots]
        places = counts.astype(np.uint64)
        replaced = pseudonym.permuted(secrets, places, sums, tokens, base)
        self.sums[slots] = sums + pseudonym.absorbed(secrets, places, tokens)
        self.tokens[slots, counts] = tokens
        self.counts[slots] = counts + 1
        full = slots[counts + 1 == self.tokens.shape[1]]
        if len(full):
            self._next_blocks(full, key)
        return replaced

    def _next_blocks(self, slots: np.ndarray, key: bytes) -> None:
        """These tails are full blocks: start the blocks after them."""
        parents, blocks = self.secrets[slots].tobytes(), self.tokens[slots].tobytes()
        size, width = pseudonym.SECRET_SIZE_BYTES, 4 * self.tokens.shape[1]
        self.secrets[slots] = pseudonym.words([
            pseudonym.child_secret(key, parents[size * n : size * (n + 1)], blocks[width * n : width * (n + 1)])
            for n in range(len(slots))
        ])  # fmt: skip
        self.sums[slots], self.counts[slots] = 0, 0
