"""State: one immutable value from which every decision and every batch is derived.

Owns the types. Hot data is the rows' matrix (store/rows.py), histories and tables are extents (store/extents.py), pages
are a pool (pool.py). The cold data of a request is in a mapping that changes only when it arrives and ends. No part of
a state is ever modified.
"""

from __future__ import annotations

from enum import Enum

import msgspec
import numpy as np

from vnext.state.block_hash import versioned_root
from vnext.state.config import SchedulerConfig
from vnext.state.events import Pause, RequestId, StepCommitted, unpack_tokens
from vnext.state.params import ALL_TOKENS, Sampling, hits_max
from vnext.state.pool import Pool
from vnext.state.store.clients import Clients
from vnext.state.store.disk_index import DiskIndex
from vnext.state.store.extents import Extents, spans
from vnext.state.store.rows import Line, Rows
from vnext.state.store.versions import VersionedMap


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The data that never changes while a request lives. `root` is the parent hash of its first block, computed
    with the weights that the engine started with, `client` the number of its client, 0 where none is known, `weight`
    its share in turns."""

    id: RequestId
    name: str
    prompt: bytes
    sampling: Sampling
    priority: int
    arrival_ns: int
    root: bytes
    client: int = 0
    weight: int = 1

    @property
    def prompt_length(self) -> int:
        return len(self.prompt) // 4

    def parted(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What `tokens`, its own from the first on, are to penalties: the prompt and the answer."""
        guidance, (prompt, answer) = self.sampling.guidance, np.split(tokens, [self.prompt_length])
        return unpack_tokens(guidance.beside) if guidance is not None and guidance.is_prompt else prompt, answer

    def hits_max(self, config: SchedulerConfig) -> int:
        """The most tokens that it may take from the cache."""
        return hits_max(self.sampling, self.prompt_length, config.guided_hits)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the queue. `tokens` (int32 bytes) are the prompt and everything sampled before a preemption.

    `block_hashes` are those of its full blocks, empty if the prefix cache is off. `cached` is the hit of its first
    admission (-1 before it), kept so that the client learns the real cost of its prompt. `hits_max` is its request's.
    `transfer` is the number of the transfer that it had from disk in this wait, -1 for none.
    """

    id: RequestId
    priority: int
    tokens: bytes
    block_hashes: tuple[bytes, ...]
    preemption_count: int
    cached: int = -1
    hits_max: int = ALL_TOKENS
    transfer: int = -1

    @property
    def known(self) -> int:
        return len(self.tokens) // 4

    def hit_blocks_max(self, block_size: int) -> int:
        """The most blocks that it may take from the cache; at least one token remains to be computed."""
        known = len(self.tokens) // 4 - 1
        return (known if known < self.hits_max else self.hits_max) // block_size


class Copies(msgspec.Struct, frozen=True):
    """Copies of state pages, each (from, to): `before` the step, of the snapshots from which admitted requests go on, and `after`
    it, of what is to become a snapshot (int64[n, 2] each)."""

    before: np.ndarray
    after: np.ndarray


class StepInFlight(msgspec.Struct, frozen=True):
    """A step that is planned and not committed, with one entry for each scheduled request.

    `entries` int64[4, n]: request, preemption count, first position computed, tokens computed. `samples` bool[n]:
    whether the request samples. `tokens` is the sum of the tokens computed. `drafts` int64[n]: how many of an entry's tokens
    are drafts, at most; None in an engine without speculation. Where earlier steps in flight have drafts, `starts` is the
    position that holds if all of them are kept. `copies`: with recurrent layers, the copies of state pages (recurrent.py).
    """

    step: int
    entries: np.ndarray
    samples: np.ndarray
    tokens: int
    drafts: np.ndarray | None = None
    copies: Copies | None = None

    ids = Line("entries", 0)
    preemption_counts = Line("entries", 1)
    starts = Line("entries", 2)
    counts = Line("entries", 3)


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A slot's adapter (adapters.py). `used` is the step that last admitted a request with it, or that followed its loading."""

    name: str
    digest: str
    used: int


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """The weights that ranks compute with since a WeightsChanged."""

    version: int
    digest: str
    path: str

    @property
    def label(self) -> str:
        """What roots the names of blocks: each version's alone, also where weights return."""
        return f"{self.version} {self.digest}"


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of a request that are read from disk: the first `hits` of `pages` are in memory and held, the others are being filled.
    `keys` are the block hashes of all, () where they may not be indexed any more. `state` is the state page into which the snapshot
    behind the last of them is read, -1 for none."""

    number: int
    request: int
    hits: int
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    state: int = -1

    @property
    def count(self) -> int:
        """What is read: blocks, and the snapshot behind them."""
        return len(self.pages) - self.hits + (self.state >= 0)


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier (tier.py): at most `capacity` blocks. `begun` counts transfers, of which `transfers` are in flight; `stored`,
    `gone` and `promoted` count blocks. `snapshots`: the same of snapshots, which have no transfers of their own; None without
    recurrent layers."""

    capacity: int
    disk: DiskIndex
    transfers: tuple[Transfer, ...] = ()
    begun: int = 0
    stored: int = 0
    gone: int = 0
    promoted: int = 0
    snapshots: Tier | None = None


class Encoding(msgspec.Struct, frozen=True, array_like=True):
    """The input that ranks encode (facilities/encoding.py): where it begins in the tokens of which request, how
    many of its units they have computed, and before which step the last of those."""

    id: int
    place: int
    done: int
    units: int
    step: int


class Sought(msgspec.Struct, frozen=True, array_like=True):
    """Vectors of inputs in files (facilities/sought.py): the requests for whose inputs ranks look, and of those for which they have
    looked the places of inputs that they have read. Both keep requests that have ended until the next search."""

    searches: tuple[int, ...] = ()
    found: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine started."""

    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`sequence` events were folded; steps [committed, planned) are in `in_flight`, oldest first; ids below `next_id` arrived.

    `waiting` is in order of arrival, and digests read `waiting_hash` in its place. `token_digest` chains all committed
    tokens. `slots` are those of adapters, None where one is empty. While requests with ids below `cautious` wait or have
    not come, steps follow one another and each admits one request at most. `paused` is the mode of EnginePaused; `weights` are None
    before the first change. `tier` is None in an engine without a disk tier. `clock` is the second of the last tick.
    `clients` (store/clients.py) are None but under the policy `fair`. `lowered_from`: the tokens of a step that the engine started
    with, while a shortage of memory has lowered those of the configuration (facilities/shortage.py), else 0. `encoding`: the newest
    input of which ranks have computed units, until it begins. `sought`: None before ranks have looked for any.
    """

    config: SchedulerConfig
    sequence: int
    next_id: int
    planned: int
    committed: int
    rows: Rows
    waiting: tuple[Waiting, ...]
    waiting_hash: int
    requests: VersionedMap[int, Request]
    tokens: Extents
    tables: Extents
    pool: Pool
    in_flight: tuple[StepInFlight, ...]
    counters: Counters
    token_digest: int
    slots: tuple[Slot | None, ...] = ()
    cautious: int = 0
    paused: Pause = ""
    weights: Weights | None = None
    tier: Tier | None = None
    clock: int = 0
    clients: Clients | None = None
    lowered_from: int = 0
    encoding: Encoding | None = None
    sought: Sought | None = None


def root_of(state: State, request: Request) -> bytes:
    """The parent hash of the first block that a request computes with the state's weights."""
    return versioned_root(request.root, label_of(state.weights))


def label_of(weights: Weights | None) -> str:
    return weights.label if weights else ""


class Status(Enum):
    """Where a request stands. A finished one is not stored: its id is below `next_id`, and it neither waits nor runs."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def status_of(state: State, request_id: int) -> Status:
    if request_id >= state.next_id or request_id < 0:
        return Status.UNKNOWN
    if request_id not in state.requests:
        return Status.FINISHED
    return Status.RUNNING if bool((state.rows.id == request_id).any()) else Status.WAITING


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


# ---- samples -------------------------------------------------------------------------------------------------------
# Where a step samples: an entry that samples does so behind its last known token, and behind each of its drafts.


class SamplePoints(msgspec.Struct, frozen=True):
    """The samples of a step: the entry of each, and how many of the entry's tokens come behind it (int64[S] each)."""

    entries: np.ndarray
    back: np.ndarray


def sample_points(scheduled: StepInFlight) -> SamplePoints:
    """The samples of a step whose drafts are all computed, in order."""
    sampled = scheduled.samples.nonzero()[0]
    if scheduled.drafts is None or not scheduled.drafts.any():
        return SamplePoints(sampled, np.zeros_like(sampled))
    sizes = scheduled.drafts[sampled] + 1
    return SamplePoints(sampled.repeat(sizes), sizes.repeat(sizes) - 1 - spans(np.zeros_like(sizes), sizes))


def runs_in(event: StepCommitted, asked: int) -> tuple[np.ndarray, np.ndarray]:
    """A commit's numbers of tokens and of drafts for each of the `asked` requests that sampled (int64[n] each)."""
    if not event.counts and not event.drafted:
        return np.ones(asked, dtype=np.int64), np.zeros(asked, dtype=np.int64)
    return np.frombuffer(event.counts, np.uint8).astype(np.int64), np.frombuffer(event.drafted, np.uint8).astype(np.int64)


def still_owed(state: State) -> frozenset[int]:
    """The requests that take their samples of the oldest step in flight: they have not given way since it was planned."""
    scheduled, rows = state.in_flight[0], state.rows
    running = dict(zip(rows.id.tolist(), rows.preemption_count.tolist()))
    sampling = zip(scheduled.ids[scheduled.samples].tolist(), scheduled.preemption_counts[scheduled.samples].tolist())
    return frozenset(id_ for id_, preemptions in sampling if running.get(id_) == preemptions)


def with_kept_drafts(scheduled: StepInFlight, event: StepCommitted) -> StepInFlight:
    """The oldest step in flight with those drafts alone that its commit has kept."""
    if scheduled.drafts is None:
        return scheduled
    counts, _ = runs_in(event, int(np.count_nonzero(scheduled.samples)))
    entries, drafts = scheduled.entries.copy(), np.zeros_like(scheduled.drafts)
    drafts[scheduled.samples] = counts - 1
    entries[3] += drafts - scheduled.drafts
    return msgspec.structs.replace(scheduled, entries=entries, tokens=int(entries[3].sum()), drafts=drafts)
