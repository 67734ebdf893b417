"""Misses: why the prefix cache had less of a prompt than an earlier one has in common with it.

Owns which blocks prompts asked for lately, and what is lost by each reason. Looks at decisions and makes none: an engine core that
takes over begins without it, and no event depends on it. Of other clients' prompts it says what the tokens found in the cache say
too, in whole blocks: where a prompt departs from another one, and what stands behind another salt, is for the same client alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from operator import attrgetter

import msgspec

from vnext.runtime.protocol.stats import CacheLosses, CacheMiss, MissReason
from vnext.state.block_hash import versioned_root
from vnext.state.preempt import row_tokens
from vnext.state.state import Request, State, Waiting, label_of
from vnext.state.store import columns
from vnext.state.store.fields import CACHED, HASHED_BLOCKS


class Run(msgspec.Struct):
    """Consecutive blocks that the same requests asked for. A block's name is a digest of everything before it, so the place where a
    prompt departs from a run is found by halves: a request costs the runs on its way, not its blocks.

    The blocks' names, the last request that asked for them, the last one of each client, and the runs behind them
    by their first blocks. Mutable."""

    names: tuple[bytes, ...]
    last: int
    own: dict[int, int]
    behind: dict[bytes, Run]

    def common(self, names: Sequence[bytes], at: int) -> int:
        """How many blocks from `at` are this run's."""
        own, left = self.names, len(names) - at
        size = left if left < len(own) else len(own)
        if not size or own[size - 1] == names[at + size - 1]:
            return size
        return bisect_left(range(size), True, key=lambda place: own[place] != names[at + place])

    def split(self, at: int) -> None:
        """Make a run of its own of what stands behind its first `at` blocks."""
        rest = Run(self.names[at:], self.last, dict(self.own), self.behind)
        self.names, self.behind = self.names[:at], {rest.names[0]: rest}


class Trail(msgspec.Struct):
    """The runs along a prompt's blocks, first to last, each with the number of leading blocks up to where it and the prompt part.

    `known`: how many leading blocks somebody asked for, -1 if not even for the root; `own_known`, `own`: how many the prompt's own
    client asked for, and its last request that did."""

    runs: list[tuple[int, Run]]
    known: int
    own_known: int
    own: int | None

    @property
    def last(self) -> int:
        """The last request that asked for the known blocks."""
        return self.runs[-1][1].last

    def last_beyond(self, blocks: int) -> int:
        """The last request that asked for more than so many leading blocks, which are less than are known."""
        return next(run.last for end, run in self.runs if end > blocks)


NOWHERE = Trail([], -1, -1, None)


def own_last(trail: Trail, older: Trail) -> int | None:
    """The client's last request that asked for the most of the leading blocks, in the first of the trails that has it."""
    return trail.own if trail.own_known >= older.own_known else older.own


class Askers:
    """Of one generation of requests, which is `size` large: that many blocks, or clients of runs. Mutable."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Run] = {}
        self._blocks = self._pairs = 0
        self.clients = set[int]()

    @property
    def size(self) -> int:
        return self._blocks if self._blocks > self._pairs else self._pairs

    def trail(self, root: bytes, names: Sequence[bytes], client: int) -> Trail:
        """The runs along these blocks behind a root, as far as somebody asked for them."""
        if (run := self._roots.get(root)) is None:
            return NOWHERE
        runs: list[tuple[int, Run]] = []
        at, own_known, own = 0, -1, None
        while run is not None:
            at += run.common(names, at)
            runs.append((at, run))
            if client in run.own:
                own_known, own = at, run.own[client]
            # where the prompt has left the run, none of its names is behind it
            run = run.behind.get(names[at]) if at < len(names) else None
        return Trail(runs, at, own_known, own)

    def add(self, root: bytes, names: tuple[bytes, ...], trail: Trail, id_: int, client: int) -> None:
        """A request of a client asks for these blocks, which have this trail."""
        at, last = 0, None
        for end, run in trail.runs:
            if end - at < len(run.names):
                run.split(end - at)
                self._pairs += len(run.own)
            self._pairs += client not in run.own
            run.last = run.own[client] = id_
            at, last = end, run
        self.clients.add(client)
        self._blocks += len(names) - at
        if last is None:
            self._roots[root] = Run(names, id_, {client: id_}, {})
            self._pairs += 1
        elif at == len(names):
            return
        elif not last.behind and len(last.own) == 1:
            last.names += names[at:]  # a conversation goes on
        else:
            last.behind[names[at]] = Run(names[at:], id_, {client: id_}, {})
            self._pairs += 1


BLOCKS_REMEMBERED = 4
"""Times the blocks of the cache: how many of a generation are known after they have left it."""
BLOCKS_REMEMBERED_MIN = 4_096
SEEN_BYTES_MAX = 1 << 26
"""Of the requests that are kept to say where another one departs from them."""
REST_BYTES = 512
"""Of one of them beside its tokens."""

RECENT = 3
"""A prompt is compared with so many of its client's last ones, beside the last that has its beginning."""

SAMPLES, SAMPLE = 8, 8
"""So many samples of so many tokens tell whether two texts are the same but for a shift."""


NOTHING_LOST = CacheLosses()


class _Seen(msgspec.Struct, frozen=True, gc=False):
    """A request that was admitted, its root and the label of the weights then, and its tokens: once it has ended with those that it
    wrote."""

    request: Request
    root: bytes
    weights: str
    tokens: bytes
    size_bytes: int


class CacheMisses:
    """Of one engine core. Mutable. `losses`: tokens since the start."""

    def __init__(self) -> None:
        self._asked, self._asked_before = Askers(), Askers()  # the generation before goes when this one is full
        self._limit = 0  # of a generation's size; 0 before the first request
        self._recent: dict[int, deque[int]] = {}  # the last requests of each client, latest first
        self._seen: dict[int, _Seen] = {}
        self._seen_bytes = 0
        self._firsts: dict[tuple[int, bytes], int] = {}  # client, if known, and first block's tokens -> the last request
        self.losses = NOTHING_LOST

    def admitted(self, before: State, after: State, ids: Collection[int]) -> Mapping[int, CacheMiss]:
        """What the requests in the last rows of `after`, which waited in `before`, lost; none that computes again what it had."""
        if not before.config.prefix_caching:
            return {}
        found: dict[int, CacheMiss] = {}
        queue, cells, weights = before.waiting, after.rows.cells, label_of(after.weights)
        for place, id_ in enumerate(ids, -len(ids)):
            entry = queue[0] if queue[0].id == id_ else queue[bisect_left(queue, id_, key=_id_of)]
            if entry.preemption_count or not entry.block_hashes:
                continue
            request = after.requests[id_]
            root = versioned_root(request.root, weights)
            trail = self._asked.trail(root, entry.block_hashes, request.client)
            if (miss := self._miss(before, after, entry, request, root, cells.item(CACHED, place), trail)) is not None:
                found[id_] = miss
                tokens = getattr(self.losses, miss.reason) + miss.lost_tokens
                self.losses = msgspec.structs.replace(self.losses, **{str(miss.reason): tokens})
            self._remember(after, entry, trail, _Seen(request, root, weights, request.prompt, len(request.prompt) + REST_BYTES))
        return found

    def ended(self, before: State, ids: Collection[int]) -> None:
        """These requests, of which some have a row in `before`, have ended: what they wrote is known too."""
        block_bytes, rows = 4 * before.config.block_size, before.rows.id.tolist()
        for id_ in ids:
            if (seen := self._seen.get(id_)) is None or id_ not in rows:
                continue
            row = rows.index(id_)
            if before.rows.cells.item(HASHED_BLOCKS, row) > len(seen.tokens) // block_bytes:
                tokens = row_tokens(before, row).tobytes()
                del self._seen[id_]
                self._seen_bytes -= seen.size_bytes
                self._keep(id_, _Seen(seen.request, seen.root, seen.weights, tokens, seen.size_bytes + len(tokens)))

    def _miss(
        self, before: State, after: State, entry: Waiting, request: Request, root: bytes, hit: int, trail: Trail
    ) -> CacheMiss | None:
        size = before.config.block_size
        first, most = hit // size, entry.hit_blocks_max(size)
        if first >= most:
            return None
        older = self._asked_before.trail(root, entry.block_hashes, request.client)
        name, longest = entry.block_hashes[first], trail if trail.known >= older.known else older
        if longest.known > first:
            like = (trail if trail.known > first else older).last_beyond(first)
            lost = (min(longest.known, most) - first) * size
            return self._absent(before, after, name, like, CacheMiss("evicted", hit, lost))
        alike, earlier = self._alike(request, root, own_last(trail, older), longest)
        for common, place in alike:
            seen = earlier[place]
            if common >= hit + size:  # in blocks that its answer filled, for which nobody asked
                lost = min(common // size, most) * size - hit
                return self._absent(before, after, name, seen.request.id, CacheMiss("evicted", hit, lost))
            if seen.request.client == request.client:  # a token's place would let a stranger guess the text
                shorter = (len(seen.tokens) if len(seen.tokens) < len(request.prompt) else len(request.prompt)) // 4
                lost = (shorter if shorter < entry.hits_max else entry.hits_max) // size * size - hit
                if lost >= size and _goes_on_alike(seen.tokens, request.prompt, common):
                    return CacheMiss("changed", common, lost)
        return self._wall(after, request, root, size) if first == 0 else None

    def _alike(self, request: Request, root: bytes, own: int | None, longest: Trail) -> tuple[list[tuple[int, int]], list[_Seen]]:
        """How many leading tokens it has in common with earlier requests under the same root, and which of them: those of the
        client, most in common first, then the last one of anybody with the same blocks."""
        ids: Collection[int] = self._recent.get(request.client, ())
        if own is not None and own not in ids:
            ids = [own, *ids]
        earlier, tokens = [], []
        for id_ in ids:
            if (seen := self._seen.get(id_)) is not None and seen.root == root:
                earlier.append(seen)
                tokens.append(seen.tokens)
        alike = columns.impl.most_alike(request.prompt, tokens)
        if longest.runs and (like := longest.last) not in ids and (seen := self._seen.get(like)) is not None:
            alike.append((_common(seen, request), len(earlier)))
            earlier.append(seen)
        return alike, earlier

    def _absent(self, before: State, after: State, name: bytes, asker: int, miss: CacheMiss) -> CacheMiss:
        """Of blocks that an earlier request had: they are not computed yet, stand there without what goes with them (a snapshot, or
        other groups' pages), or were evicted."""
        if (after.rows.id == asker).any():
            computed = before.rows.computed[before.rows.id == asker]
            if not len(computed) or int(computed[0]) < miss.at_token + before.config.block_size:
                return msgspec.structs.replace(miss, reason="computing")
        is_there = before.pool.prefix_index.block_of(name) is not None
        return msgspec.structs.replace(miss, reason="incomplete") if is_there else miss

    def _wall(self, state: State, request: Request, root: bytes, size: int) -> CacheMiss | None:
        """The same client's earlier prompt with the same first block, under another salt, adapter or weights."""
        seen = self._seen.get(self._firsts.get((request.client, request.prompt[: 4 * size]), -1))
        if seen is None or not request.client:
            return None
        if seen.root == root:
            return None
        reason: MissReason = "salt"
        alike = len(request.prompt) // 4
        if seen.request.sampling.adapter != request.sampling.adapter:
            reason = "adapter"
        elif seen.weights != label_of(state.weights):
            reason = "weights"
        if reason != "salt":  # behind another salt may stand another user's text: its length would tell how much is the same
            alike = _common(seen, request)
        return CacheMiss(reason, 0, alike // size * size)

    def _remember(self, state: State, entry: Waiting, trail: Trail, seen: _Seen) -> None:
        request = seen.request
        self._asked.add(seen.root, entry.block_hashes, trail, request.id, request.client)
        if not self._limit:
            self._limit = max(BLOCKS_REMEMBERED_MIN, BLOCKS_REMEMBERED * state.pool.page_count)
        if self._asked.size > self._limit:
            self._asked_before, self._asked = self._asked, Askers()
            clients = self._asked_before.clients
            self._recent = {client: each for client, each in self._recent.items() if client in clients}
        if (recent := self._recent.get(request.client)) is None:
            recent = self._recent[request.client] = deque(maxlen=RECENT)
        recent.appendleft(request.id)
        self._keep(request.id, seen)
        if request.client:
            self._firsts[request.client, request.prompt[: 4 * state.config.block_size]] = request.id
            if len(self._firsts) > BLOCKS_REMEMBERED_MIN:
                del self._firsts[next(iter(self._firsts))]

    def _keep(self, id_: int, seen: _Seen) -> None:
        self._seen[id_] = seen
        self._seen_bytes += seen.size_bytes
        while self._seen_bytes > SEEN_BYTES_MAX:
            self._seen_bytes -= self._seen.pop(next(iter(self._seen))).size_bytes


_id_of = attrgetter("id")


def _common(seen: _Seen, request: Request) -> int:
    """How many leading tokens a request has in common with an earlier one."""
    return columns.impl.most_alike(request.prompt, [seen.tokens])[0][0]


def _goes_on_alike(one: bytes, other: bytes, common: int) -> bool:
    """Whether most of what follows the `common` tokens of `other` follows those of `one` too, at any place. If not, the
    two are different texts behind one beginning, such as a template's, and nothing is lost."""
    if not common:
        return False
    if columns.impl.goes_on_alike(one, other, common):  # some places were changed
        return True
    first, last = common + 1, len(other) // 4 - SAMPLE
    if last < first:
        return False
    places = (first + (last - first) * each // (SAMPLES - 1) for each in range(SAMPLES))
    absent = (at for at in places if one.find(other[4 * at : 4 * (at + SAMPLE)], 4 * common) < 0)
    return next(islice(absent, SAMPLES // 2, None), None) is None
