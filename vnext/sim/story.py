"""Stories: what a request's tokens are, and what a place of a cache holds that has seen all of them up to it."""

from __future__ import annotations

from struct import unpack

import xxhash

from vnext.sim.checks.plain_state import Divergence
from vnext.state.store.fields import DIGEST_WORDS, INPUT_BEGINS

CHAIN_FACTOR = 0x9E3779B97F4A7C15
CHAIN_MASK = 2**64 - 1


class Story:
    """The tokens of one request and, for each position, the digest of everything up to it. Append-only.

    `data` are the tokens (int32 bytes), `chains` their digests, `weights` the toy model's sum over the tokens below each
    position. The root comes from the request's salt, not from the engine's own root.
    """

    def __init__(self, salt: str) -> None:
        self.data = b""
        self.chains: list[int] = []
        self.weights = [0]
        self._last = xxhash.xxh3_64_intdigest(salt.encode())

    @property
    def length(self) -> int:
        return len(self.chains)

    def agree(self, history: bytes) -> None:
        """Append what is new in this history. Raises Divergence unless it equals or continues the story."""
        if history == self.data:
            return
        if history.startswith(self.data):
            self._continue(history)
        elif not self.data.startswith(history):
            raise Divergence(f"a request's history changed: {ids_of(self.data)} became {ids_of(history)}")

    def _continue(self, history: bytes) -> None:
        last, chains, weights, added, whole = self._last, self.chains, self.weights, history[len(self.data) :], 0
        for place, token in enumerate(ids_of(added)):
            if token < INPUT_BEGINS:  # what a model computes there follows from all of the input
                whole = xxhash.xxh3_64_intdigest(added[4 * place : 4 * (place + DIGEST_WORDS)])
            last = (last * CHAIN_FACTOR + (whole if token < 0 else token) + 1) & CHAIN_MASK
            whole += 1  # so equal inputs in a row are not one long input
            weights.append(weights[-1] + len(weights) * token)
            chains.append(last)
        self._last, self.data = last, history


def ids_of(data: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(data) // 4}i", data)
