"""State: one immutable value from which every decision and every batch is derived.

Owns the types. Hot data is columns (rows.py), histories and tables are extents (extents.py), blocks are a pool (pool.py);
cold data of a request sits in a mapping that changes on arrival and finish only. Nothing here is ever written again.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestId
from vnext.state.extents import Extents
from vnext.state.lifecycle import Status
from vnext.state.params import Sampling
from vnext.state.pool import Pool
from vnext.state.rows import Rows
from vnext.state.versions import VersionedMap


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes while a request lives. `root` is the parent key of its first block."""

    id: RequestId
    name: str
    prompt: bytes
    sampling: Sampling
    priority: int
    arrival_ns: int
    root: bytes

    @property
    def prompt_length(self) -> int:
        return len(self.prompt) // 4


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the queue. `tokens` (int32 bytes) are the prompt and all that was sampled before a preemption.

    `keys` are the chain keys of its full blocks, none with the prefix cache off; `cached` the hit of its first admission
    (-1 before it), kept so that the client is told what its prompt really cost.
    """

    id: RequestId
    priority: int
    tokens: bytes
    keys: tuple[bytes, ...]
    epoch: int
    cached: int = -1

    @property
    def known(self) -> int:
        return len(self.tokens) // 4


class Flight(msgspec.Struct, frozen=True):
    """A step that is planned and not committed: what it computes, one entry per scheduled request.

    `entries` int64[4, n]: request, epoch, first position computed, tokens computed; `samples` bool[n]. `tokens` is their sum.
    """

    step: int
    entries: np.ndarray
    samples: np.ndarray
    tokens: int

    @property
    def ids(self) -> np.ndarray:
        return self.entries[0]

    @property
    def epochs(self) -> np.ndarray:
        return self.entries[1]

    @property
    def starts(self) -> np.ndarray:
        return self.entries[2]

    @property
    def counts(self) -> np.ndarray:
        return self.entries[3]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine started."""

    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`sequence` events folded; steps [committed, planned) are in `flights`, oldest first; ids below `next_id` arrived.

    `waiting` is in order of arrival, `waiting_sum` stands for it in digests (order.py). `token_digest` chains all committed tokens.
    """

    config: SchedulerConfig
    sequence: int
    next_id: int
    planned: int
    committed: int
    rows: Rows
    waiting: tuple[Waiting, ...]
    waiting_sum: int
    requests: VersionedMap[int, Request]
    tokens: Extents
    tables: Extents
    pool: Pool
    flights: tuple[Flight, ...]
    counters: Counters
    token_digest: int


def status_of(state: State, request_id: int) -> Status:
    """Where a request is in its life."""
    if request_id >= state.next_id or request_id < 0:
        return Status.UNKNOWN
    if request_id not in state.requests:
        return Status.FINISHED
    return Status.RUNNING if bool((state.rows.id == request_id).any()) else Status.WAITING


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // block_size)
