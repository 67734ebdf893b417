"""A prompt as a router sees it: its tokens and all that names its blocks in an engine's prefix cache.

Block hashes are made once for each root, so engines that share weights and block size share them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.allocate import hit_tokens_of, prefix_hits
from vnext.state.block_hash import block_hashes, root_hash, versioned_root
from vnext.state.events import RequestId
from vnext.state.params import ALL_TOKENS, Sampling, hits_max
from vnext.state.state import State, Waiting, label_of


class Prompt:
    """One arriving request. `tokens` are int32 bytes (with a resumed request's own tokens), `adapter` is a digest;
    `hits_max` as in vnext.state.params."""

    def __init__(self, tokens: bytes, cache_salt: str = "", adapter: str = "", hits_max: int = ALL_TOKENS) -> None:
        self.tokens, self.cache_salt, self.adapter, self.hits_max = tokens, cache_salt, adapter, hits_max
        self._entries: dict[tuple[str, int], Waiting] = {}

    @classmethod
    def of(cls, prompt: bytes, sampling: Sampling, cache_salt: str = "", generated: bytes = b"") -> Prompt:
        """The prompt of a request with these parameters, whose `adapter` is set, with what it has `generated` if it is resumed."""
        return cls(prompt + generated, cache_salt, sampling.adapter, hits_max(sampling, len(prompt) // 4))

    def __len__(self) -> int:
        """Its length in tokens."""
        return len(self.tokens) // 4

    def hashes(self, state: State) -> tuple[bytes, ...]:
        """The names of its full blocks in this engine, none without a prefix cache."""
        return self._entry(state).block_hashes

    def hit_tokens(self, state: State) -> int:
        """Its leading tokens that the engine's cache holds, as an admission would find them in this state."""
        return hit_tokens_of(state.config, self.hit_pages(state))

    def hit_pages(self, state: State) -> np.ndarray:
        """The pages of these tokens, as prefix_hits has them (int32[n])."""
        return prefix_hits(state.config, state.pool, self._entry(state))

    def _entry(self, state: State) -> Waiting:
        """It as the engine's queue would have it; made once for all engines that name blocks alike."""
        size, weights = state.config.block_size if state.config.prefix_caching else 0, label_of(state.weights)
        if (found := self._entries.get((weights, size))) is None:
            root = versioned_root(root_hash(self.cache_salt, size, self.adapter), weights)
            found = self._entries[weights, size] = Waiting(
                id=RequestId(-1), priority=0, tokens=self.tokens, preemption_count=0, hits_max=self.hits_max,
                block_hashes=block_hashes(root, self.tokens, size) if size else (),
            )  # fmt: skip
        return found


def waiting_hits(state: State, entry: Waiting) -> int:
    """`hit_tokens` of a request that waits in the engine."""
    return hit_tokens_of(state.config, prefix_hits(state.config, state.pool, entry))


class Routed(msgspec.Struct, frozen=True):
    """A request on its way: the tokens that it leaves to compute, the names of its blocks, and how many steps the engine had
    planned, as far as was known, when it was routed."""

    tokens: int
    hashes: tuple[bytes, ...]
    step: int = 0
