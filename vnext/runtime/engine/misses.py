"""Misses: why the prefix cache had less of a prompt than an earlier one has in common with it.

Owns which blocks prompts asked for lately, and what is lost by each reason. Looks at decisions and makes none: an engine core that
takes over begins without it, and no event depends on it. One request's walls are another's: nothing is said of prompts under
another salt, unless the same client sent them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from vnext.runtime.protocol.cache_misses import CacheLosses, CacheMiss, MissReason
from vnext.state.block_hash import block_hashes
from vnext.state.events import RequestId, unpack_tokens
from vnext.state.params import reads_cache
from vnext.state.preempt import row_tokens
from vnext.state.state import Request, State, Waiting, label_of, root_of

BLOCKS_REMEMBERED = 4
"""Times the blocks of the cache: how many are known after they have left it."""
BLOCKS_REMEMBERED_MIN = 4_096
TEXT_BYTES_MAX = 1 << 26
"""Of the prompts that are kept to say where another one departs from them."""


class _Seen(msgspec.Struct, frozen=True, gc=False):
    """A request that was admitted: its tokens, once it has ended with those that it wrote; whose it is; the hashes of its first
    block's parent and of its prompt's last full block, and how many of these there are."""

    tokens: bytes
    client: int
    root: bytes
    last: bytes
    blocks: int
    adapter: str
    weights: str


class CacheMisses:
    """Of one engine core. Mutable."""

    def __init__(self) -> None:
        self._asked: dict[bytes, int] = {}  # block hash, or root -> the last request that asked for it; the oldest first
        self._seen: dict[int, _Seen] = {}
        self._text_bytes = 0
        self._firsts: dict[tuple[int, bytes], int] = {}  # client and first block's tokens -> the last request
        self._lost = Counter[MissReason]()

    @property
    def losses(self) -> CacheLosses:
        """Tokens since the start."""
        return CacheLosses(**{str(reason): tokens for reason, tokens in self._lost.items()})

    def admitted(self, before: State, after: State, ids: Collection[int]) -> Mapping[int, CacheMiss]:
        """What the requests in the last rows of `after`, which waited in `before`, lost; none that computes again what it had."""
        if not before.config.prefix_caching:
            return {}
        queue, found = before.waiting, dict[int, CacheMiss]()
        for row, id_ in enumerate(ids, len(after.rows) - len(ids)):
            entry = queue[bisect_left(queue, id_, key=lambda each: int(each.id))]
            request = after.requests[RequestId(id_)]
            if entry.preemption_count:
                continue
            hit = int(after.rows.cached[row])
            if reads_cache(request.sampling) and (miss := self._miss(before, after, entry, request, hit)) is not None:
                found[id_] = miss
                self._lost[miss.reason] += miss.lost_tokens
            self._remember(after, entry, request)
        return found

    def ended(self, before: State, ids: Collection[int]) -> None:
        """These requests, of which some have a row in `before`, have ended: what they wrote is known too."""
        for row in np.flatnonzero(np.isin(before.rows.id, np.fromiter(ids, np.int64))).tolist():
            id_ = int(before.rows.id[row])
            if (seen := self._seen.pop(id_, None)) is not None:
                tokens, size = row_tokens(before, row).tobytes(), 4 * before.config.block_size
                self._note(block_hashes(seen.last, tokens[seen.blocks * size :], before.config.block_size), id_, before)
                self._keep(id_, msgspec.structs.replace(seen, tokens=tokens), -len(seen.tokens))

    def _miss(self, before: State, after: State, entry: Waiting, request: Request, hit: int) -> CacheMiss | None:
        size = before.config.block_size
        first, names = hit // size, entry.block_hashes[: (entry.known - 1) // size]
        if first >= len(names):
            return None
        known = next((place for place in range(len(names) - 1, first - 1, -1) if names[place] in self._asked), None)
        if known is not None:
            reason = self._why_absent(before, after, names[first], self._asked[names[known]], hit)
            return CacheMiss(reason=reason, at_token=hit, lost_tokens=(known + 1 - first) * size)
        parent = names[first - 1] if first else root_of(after, request)
        miss = self._departure(self._asked.get(parent), request, hit, size)
        return miss or (self._wall(after, request, size) if first == 0 else None)

    def _why_absent(self, before: State, after: State, name: bytes, asker: int, hit: int) -> MissReason:
        """Of blocks that an earlier request had: they are not computed yet, stand there without what goes with them (a snapshot, or
        other groups' pages), or were evicted."""
        at = np.flatnonzero(after.rows.id == asker)
        if len(at) and int(after.rows.computed[at[0]]) <= hit + before.config.block_size:
            return "computing"
        return "incomplete" if before.pool.prefix_index.block_of(name) is not None else "evicted"

    def _departure(self, like: int | None, request: Request, hit: int, size: int) -> CacheMiss | None:
        """Where a prompt departs from an earlier one that goes on for a block at least; None where it goes on from its end."""
        seen = self._seen.get(like) if like is not None else None
        if seen is None:
            return None
        at = _common(seen.tokens, request.prompt)
        lost = min(len(seen.tokens), len(request.prompt)) // (4 * size) * size - hit
        return CacheMiss(reason="changed", at_token=at, lost_tokens=lost) if at and lost >= size else None

    def _wall(self, state: State, request: Request, size: int) -> CacheMiss | None:
        """The same client's earlier prompt with the same first block, under another salt, adapter or weights."""
        seen = self._seen.get(self._firsts.get((request.client, request.prompt[: 4 * size]), -1))
        if seen is None or not request.client:
            return None
        adapter, weights = request.sampling.adapter, label_of(state.weights)
        reason: MissReason = (
            "adapter" if seen.adapter != adapter
            else "weights" if seen.weights != weights
            else "salt"
        )  # fmt: skip
        lost = _common(seen.tokens, request.prompt) // size * size
        return CacheMiss(reason=reason, at_token=0, lost_tokens=lost) if seen.root != root_of(state, request) else None

    def _remember(self, state: State, entry: Waiting, request: Request) -> None:
        id_, root, names = int(request.id), root_of(state, request), entry.block_hashes
        self._note([root, *names], id_, state)
        walls = request.sampling.adapter, label_of(state.weights)
        self._keep(id_, _Seen(request.prompt, request.client, root, names[-1] if names else root, len(names), *walls))
        self._firsts[request.client, request.prompt[: 4 * state.config.block_size]] = id_
        while len(self._firsts) > BLOCKS_REMEMBERED_MIN:
            del self._firsts[next(iter(self._firsts))]

    def _keep(self, id_: int, seen: _Seen, bytes_before: int = 0) -> None:
        self._seen[id_] = seen
        self._text_bytes += len(seen.tokens) + bytes_before
        while self._text_bytes > TEXT_BYTES_MAX:
            self._text_bytes -= len(self._seen.pop(next(iter(self._seen))).tokens)

    def _note(self, names: Sequence[bytes], id_: int, state: State) -> None:
        asked = self._asked
        for name in names:
            asked.pop(name, None)  # it becomes the newest
        asked.update(dict.fromkeys(names, id_))
        excess = len(asked) - max(BLOCKS_REMEMBERED_MIN, BLOCKS_REMEMBERED * state.pool.page_count)
        if excess > 0:
            for name in [name for name, _ in zip(asked, range(excess))]:
                del asked[name]


def _common(one: bytes, other: bytes) -> int:
    """The number of equal leading tokens (int32 bytes each)."""
    size = min(len(one), len(other)) // 4
    differ = np.flatnonzero(unpack_tokens(one)[:size] != unpack_tokens(other)[:size])
    return int(differ[0]) if len(differ) else size
