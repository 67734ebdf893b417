"""A rank without a device: it folds every event, "computes" steps into a shadow cache and samples from the toy model.

The shadow cache remembers, for each slot of each block, the whole chain of tokens that wrote it. A step writes its
slots first; then every computed position of every scheduled request must hold its own chain. Silent corruption of the
real cache (a block shared, evicted or named wrongly) becomes an error at the very step. So does a name that stands for
two contents, or a content with two names.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import xxhash

from vnext.sched.sim.errors import Divergence
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.planning import row_blocks, row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State

CHAIN_FACTOR = 0x9E3779B97F4A7C15
CHAIN_MASK = 2**64 - 1
STORY_PLACES_MIN = 64
STORIES_SPARE = 32


class StepResult(msgspec.Struct, frozen=True):
    """What a rank says after a step: sampled tokens (int32 bytes) and its digest of the state in which it ran.

    The digest is 0 of a rank that shares the engine core's state: there is nothing to compare.
    """

    step: int
    tokens: bytes
    digest: int


class Story:
    """Tokens of one request and, for each position, the digest of everything up to it. Grows and never changes.

    `data` are the tokens (int32 bytes), `chains` their digests (uint64[places], valid below `length`), `weights` the toy
    model's sum over the tokens below each place. The root is made of the request's salt, not of the engine's own root.
    """

    def __init__(self, salt: str) -> None:
        self.data = bytearray()
        self.chains = np.zeros(STORY_PLACES_MIN, dtype=np.uint64)
        self.weights = [0]
        self._last = xxhash.xxh3_64_intdigest(salt.encode())

    @property
    def length(self) -> int:
        return len(self.weights) - 1

    def agree(self, history: bytes) -> None:
        """Raise Divergence unless this history is the story or continues it; remember what is new."""
        known = min(len(history), len(self.data))
        if history[:known] != self.data[:known]:
            raise Divergence(f"a request's history changed: {_ids(self.data)} became {_ids(history)}")
        if len(history) > known:
            self._continue(history[known:])

    def _continue(self, data: bytes) -> None:
        self.data += data
        fresh = []
        for token in _ids(data):
            self._last = (self._last * CHAIN_FACTOR + token + 1) & CHAIN_MASK
            self.weights.append(self.weights[-1] + len(self.weights) * token)
            fresh.append(self._last)
        while self.length > len(self.chains):
            self.chains = np.concatenate((self.chains, np.zeros_like(self.chains)))
        self.chains[self.length - len(fresh) : self.length] = fresh


def _ids(data: bytes | bytearray) -> list[int]:
    return np.frombuffer(bytes(data), dtype="<i4").tolist()


class Work(msgspec.Struct, frozen=True):
    """One scheduled request of a step: its slots (int64[...], flat, in order), its story, and the range it computes.

    The range is [start, end). `known` counts its tokens with those that its steps in flight sampled.
    """

    id: int
    epoch: int
    slots: np.ndarray
    story: Story
    start: int
    end: int
    known: int
    samples: bool


class Rank:
    """One replica of the engine. Mutable: give it every event once, in order."""

    def __init__(self, started: EngineStarted) -> None:
        config = started.config
        self.state: State = start(started)
        self.cache = np.zeros(config.block_count * config.block_size, dtype=np.uint64)
        self._offsets = np.arange(config.block_size)
        self._salts: dict[int, str] = {}
        self._stories: dict[int, Story] = {}
        self._chain_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._in_flight: deque[tuple[bytes, dict[tuple[int, int], int]]] = deque()

    def fold(self, event: AnyEvent, state: State | None = None) -> StepResult | None:
        """The result of a planned step, None for every other event. Divergence if the cache is wrong.

        `state`: the state after the event, for a rank that shares its process with the engine core and folds nothing.
        """
        if isinstance(event, StepCommitted):
            own, _ = self._in_flight.popleft()
            if own != event.tokens:
                raise Divergence(f"step {event.step} was committed with tokens that this rank did not sample")
        self.state = reduce(self.state, event) if state is None else state
        if isinstance(event, RequestArrived):
            self._salts[event.id] = event.cache_salt
        return self._run(event.step, state is not None) if isinstance(event, StepPlanned) else None

    def _run(self, step: int, shares: bool) -> StepResult:
        works = self._works()
        for work in works:
            self._write(work)
        for work in works:
            self._read(work)
        tokens = {(work.id, work.epoch): self._sample(work) for work in works if work.samples}
        packed = pack_tokens(list(tokens.values()))
        self._in_flight.append((packed, tokens))
        self._forget_stories()
        return StepResult(step, packed, 0 if shares else digest(self.state))

    def _works(self) -> list[Work]:
        state, flight, size = self.state, self.state.flights[-1], self.state.config.block_size
        row_of = {id_: row for row, id_ in enumerate(state.rows.id.tolist())}
        sealed, works = state.rows.sealed.tolist(), []
        columns = (flight.ids, flight.epochs, flight.starts, flight.counts, flight.samples)
        for id_, epoch, first, count, samples in zip(*(column.tolist() for column in columns)):
            row = row_of[id_]
            story, known = self._story(id_, epoch, row)
            blocks = row_blocks(state, row)
            if sealed[row] and state.config.prefix_caching:
                self._compare_name(int(blocks[sealed[row] - 1]), int(story.chains[sealed[row] * size - 1]))
            slots = (blocks[:, None].astype(np.int64) * size + self._offsets).ravel()
            works.append(Work(id_, epoch, slots, story, first, first + count, known, samples))
        return works

    def _story(self, id_: int, epoch: int, row: int) -> tuple[Story, int]:
        """The row's story and how much of it is known, with what its steps in flight sampled."""
        pending = [tokens[id_, epoch] for _, tokens in self._in_flight if (id_, epoch) in tokens]
        story = self._stories.get(id_)
        if story is None:
            story = self._stories[id_] = Story(self._salts[id_])
        history = row_tokens(self.state, row).tobytes()
        if pending:
            history += pack_tokens(pending)
        story.agree(history)
        return story, len(history) // 4

    def _compare_name(self, block: int, chain: int) -> None:
        """P1: a name stands for one content, and a content has one name."""
        key = self.state.pool.names.get(block)
        if key is None:
            return
        if self._chain_of.setdefault(key, chain) != chain or self._key_of.setdefault(chain, key) != key:
            raise Divergence(f"P1: block {block} has a name that stands for another content")

    def _write(self, work: Work) -> None:
        if work.end > work.known or work.samples != (work.end == work.known):
            raise Divergence(f"request {work.id} computes {work.end} of {work.known} tokens, samples: {work.samples}")
        if work.end > len(work.slots):
            raise Divergence(f"request {work.id} computes {work.end} tokens and has room for {len(work.slots)}")
        self.cache[work.slots[work.start : work.end]] = work.story.chains[work.start : work.end]

    def _read(self, work: Work) -> None:
        wrong = self.cache[work.slots[: work.end]] != work.story.chains[: work.end]
        if wrong.any():
            raise Divergence(f"request {work.id} reads other content at its position {int(wrong.argmax())}")

    def _sample(self, work: Work) -> int:
        """Greedy on the toy model (toy.py); the tokens are exactly [0, end): a sampling row has caught up."""
        seed = self.state.requests[work.id].sampling.seed
        return (seed + work.story.weights[work.end]) % self.state.config.vocab_size

    def _forget_stories(self) -> None:
        requests = self.state.requests
        if len(self._stories) > 2 * len(requests) + STORIES_SPARE:
            self._stories = {id_: story for id_, story in self._stories.items() if id_ in requests}
            self._salts = {id_: salt for id_, salt in self._salts.items() if id_ in requests}


def rebuilt(events: list[AnyEvent]) -> Rank:
    """A rank that crashed, built again from the log: every step is computed again, in order."""
    first, *rest = events
    rank = Rank(first)
    for event in rest:
        rank.fold(event)
    return rank
