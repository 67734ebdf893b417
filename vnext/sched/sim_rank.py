"""A rank without a device: it folds every event, "computes" steps into a shadow cache and samples from the toy model.

The shadow cache remembers, for each slot of each block, the whole chain of tokens that wrote it. A step writes its
slots first; then every computed position of every scheduled request must hold its own chain. Silent corruption of the
real cache (a block shared, evicted or named wrongly) becomes an error at the very step.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from vnext.sched.sim_toy import next_token
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, StepCommitted, StepPlanned, pack_tokens
from vnext.state.planning import row_blocks, row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State

CHAIN_FACTOR = 0x9E3779B97F4A7C15
CHAIN_MASK = 2**64 - 1
STORIES_SPARE = 32


class Divergence(Exception):
    """A cache, a replica or a stream is not what it must be: a bug of the engine."""


class StepResult(msgspec.Struct, frozen=True):
    """What a rank says after a step: sampled tokens (int32 bytes) and its digest of the state in which it ran."""

    step: int
    tokens: bytes
    digest: int


class Story:
    """Tokens of one request and, for each position, the digest of everything up to it. Grows and never changes."""

    def __init__(self, root: bytes) -> None:
        self.tokens: list[int] = []
        self.chains: list[int] = []
        self._last = int.from_bytes(root[:8], "little")

    def agree(self, history: list[int]) -> None:
        """Raise Divergence unless this history is the story or continues it; remember what is new."""
        known = min(len(history), len(self.tokens))
        if history[:known] != self.tokens[:known]:
            raise Divergence(f"a request's history changed: {self.tokens} became {history}")
        for token in history[known:]:
            self._last = (self._last * CHAIN_FACTOR + token + 1) & CHAIN_MASK
            self.tokens.append(token)
            self.chains.append(self._last)


class Work(msgspec.Struct, frozen=True):
    """One scheduled request of a step: its table (int32[blocks]), its story, and the range [start, end) it computes.

    `known` counts its tokens with those that its steps in flight sampled.
    """

    id: int
    epoch: int
    blocks: np.ndarray
    story: Story
    start: int
    end: int
    known: int
    samples: bool


class Rank:
    """One replica of the engine. Mutable: give it every event once, in order."""

    def __init__(self, started: EngineStarted) -> None:
        self.state: State = start(started)
        self.cache = np.zeros((started.config.block_count, started.config.block_size), dtype=np.uint64)
        self._stories: dict[int, Story] = {}
        self._in_flight: deque[tuple[bytes, dict[tuple[int, int], int]]] = deque()

    def fold(self, event: AnyEvent) -> StepResult | None:
        """The result of a planned step, None for every other event. Divergence if the cache is wrong."""
        if isinstance(event, StepCommitted):
            own, _ = self._in_flight.popleft()
            if own != event.tokens:
                raise Divergence(f"step {event.step} was committed with tokens that this rank did not sample")
        self.state = reduce(self.state, event)
        return self._run(event.step) if isinstance(event, StepPlanned) else None

    def _run(self, step: int) -> StepResult:
        works = self._works()
        for work in works:
            self._write(work)
        for work in works:
            self._read(work)
        tokens = {(work.id, work.epoch): self._sample(work) for work in works if work.samples}
        packed = pack_tokens(list(tokens.values()))
        self._in_flight.append((packed, tokens))
        self._forget_stories()
        return StepResult(step, packed, digest(self.state))

    def _works(self) -> list[Work]:
        state, flight = self.state, self.state.flights[-1]
        row_of = {id_: row for row, id_ in enumerate(state.rows.id.tolist())}
        works = []
        columns = (flight.ids, flight.epochs, flight.starts, flight.counts, flight.samples)
        for id_, epoch, first, count, samples in zip(*(column.tolist() for column in columns)):
            row = row_of[id_]
            story, known = self._story(id_, epoch, row)
            works.append(Work(id_, epoch, row_blocks(state, row), story, first, first + count, known, samples))
        return works

    def _story(self, id_: int, epoch: int, row: int) -> tuple[Story, int]:
        """The row's story and how much of it is known, with what its steps in flight sampled."""
        pending = [tokens[id_, epoch] for _, tokens in self._in_flight if (id_, epoch) in tokens]
        if id_ not in self._stories:
            self._stories[id_] = Story(self.state.requests[id_].root)
        story, history = self._stories[id_], row_tokens(self.state, row).tolist() + pending
        story.agree(history)
        return story, len(history)

    def _write(self, work: Work) -> None:
        size = self.state.config.block_size
        places = np.arange(work.start, work.end)
        if work.end > work.known or work.samples != (work.end == work.known):
            raise Divergence(f"request {work.id} computes {work.end} of {work.known} tokens, samples: {work.samples}")
        chains = np.array(work.story.chains[work.start : work.end], dtype=np.uint64)
        self.cache[work.blocks[places // size], places % size] = chains

    def _read(self, work: Work) -> None:
        size = self.state.config.block_size
        places = np.arange(work.end)
        found = self.cache[work.blocks[places // size], places % size]
        wrong = np.flatnonzero(found != np.array(work.story.chains[: work.end], dtype=np.uint64))
        if len(wrong):
            raise Divergence(f"request {work.id} reads other content at its position {wrong[0]}")

    def _sample(self, work: Work) -> int:
        """Greedy on the toy model; the tokens are exactly [0, end) because a sampling row has caught up."""
        request = self.state.requests[work.id]
        return next_token(work.story.tokens[: work.end], request.sampling.seed, self.state.config.vocab_size)

    def _forget_stories(self) -> None:
        if len(self._stories) > 2 * len(self.state.requests) + STORIES_SPARE:
            self._stories = {id_: story for id_, story in self._stories.items() if id_ in self.state.requests}


def rebuilt(events: list[AnyEvent]) -> Rank:
    """A rank that crashed, built again from the log: every step is computed again, in order."""
    first, *rest = events
    rank = Rank(first)
    for event in rest:
        rank.fold(event)
    return rank
