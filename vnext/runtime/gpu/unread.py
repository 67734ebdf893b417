"""Unread steps: what a device has sampled and the host has not read yet, and what follows from it, in order.

Owns the order. Most steps are read when their result is reported, long after the next one was launched. A step that needs the
tokens of those before it (its drafts follow them, or its masks) reads them all first, and waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import torch

from vnext.runtime.batch.draft_rows import Drafted, DraftRows, Kept, kept
from vnext.runtime.gpu.device import Mark
from vnext.runtime.gpu.sampling_updates import SamplingUpdates
from vnext.state.state import Request, StepInFlight

MADE = -2
"""From here on down numbers stand for drafts that the device keeps; MADE - n is the one at place n."""


def with_made(token_ids: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [T] with the drafts `made` (int64, any number) where numbers stand for them. Waits for no device."""
    return torch.where(token_ids <= MADE, made.index_select(0, (MADE - token_ids).clamp(min=0)), token_ids)


class StepSamples:
    """What a step has sampled: `tokens` int64 [S] on the host once `mark` is reached, and with them the drafts that the device has
    `made` (None for none). `most`: as in `kept`."""

    def __init__(
        self, drafted: Drafted, most: np.ndarray, tokens: torch.Tensor, mark: Mark, made: torch.Tensor | None = None
    ) -> None:
        self._drafted, self._most, self._tokens, self._mark, self._made = drafted, most, tokens, mark, made

    @cached_property
    def tokens(self) -> np.ndarray:
        """All samples (int64 [S]). Waits for them."""
        self._mark.wait()
        return self._tokens.numpy()

    @cached_property
    def kept(self) -> Kept:
        """Those that are kept. Waits for them."""
        (scheduled, drafts), tokens = self._drafted, self.tokens
        if self._made is not None:
            drafts = np.where(drafts <= MADE, self._made.numpy()[np.maximum(MADE - drafts, 0)], drafts).astype(np.int32)
        return kept(scheduled, drafts, tokens, self._most)

    @property
    def is_read(self) -> bool:
        return "tokens" in self.__dict__


class Unread:
    """Deeds that wait for samples. One thread."""

    def __init__(self) -> None:
        self._deeds: deque[tuple[StepSamples | None, Callable[[], None]]] = deque()

    def add(self, samples: StepSamples, deed: Callable[[], None]) -> None:
        """Do this when the samples are read."""
        self._deeds.append((samples, deed))

    def then(self, deed: Callable[[], None]) -> None:
        """Do this after all that was added before."""
        self._deeds.append((None, deed))
        self.look()

    def look(self) -> None:
        """Do what needs no waiting."""
        while self._deeds and (self._deeds[0][0] is None or self._deeds[0][0].is_read):
            self._deeds.popleft()[1]()

    def read(self) -> None:
        """Read all samples, and do all that follows. Waits."""
        while self._deeds:
            self._deeds.popleft()[1]()


class LaterDrafts:
    """The drafts of a device's rows, by `DraftRows`, which learns of each step when the host reads it.

    A row without drafts in unread steps has a known length, because such steps add a token each: it starts where it must and
    waits for nothing. `last` int64: the newest token of the rows in `is_known`, which the device does not have. Mutable.
    """

    def __init__(self, rows: DraftRows, unread: Unread, updates: SamplingUpdates, last: np.ndarray) -> None:
        self._rows, self._unread, self._updates, self._last = rows, unread, updates, last
        self.is_known = np.zeros(len(last), dtype=bool)
        self._lengths = np.zeros(len(last), dtype=np.int64)  # without drafts in unread steps
        self._open = np.zeros(len(last), dtype=np.int64)  # unread steps with drafts of the row
        self._tenants = np.zeros(len(last), dtype=np.int64)  # counts the requests that had the row

    def join(self, place: int, tokens: np.ndarray, request: Request) -> None:
        """As DraftRows.join."""
        self._lengths[place], self._open[place], self.is_known[place] = len(tokens), 0, False
        self._tenants[place] += 1
        self._unread.then(partial(self._rows.join, place, tokens, request))

    def leave(self, place: int, is_finished: bool) -> None:
        """As DraftRows.leave."""
        self._tenants[place] += 1
        self._unread.then(partial(self._rows.leave, place, is_finished))

    def drafted(self, scheduled: StepInFlight, places: np.ndarray) -> Drafted:
        """As DraftRows.drafted. Waits for the steps before if this one may draft, or if a row's drafts there are unread."""
        assert scheduled.drafts is not None
        if scheduled.drafts.any() or self._open[places].any():
            self._unread.read()
        return self._rows.drafted(scheduled, places, self._lengths)

    def bounds(self, scheduled: StepInFlight, places: np.ndarray) -> np.ndarray:
        """As DraftRows.bounds, of a step with drafts; `places` int64 [R]: the rows of its entries."""
        return self._rows.bounds(scheduled, places[scheduled.samples])

    def launched(self, drafted: Drafted, places: np.ndarray, samples: StepSamples) -> None:
        """The step runs; `places` int64 [R]: the rows of its entries."""
        scheduled = drafted.scheduled
        assert scheduled.drafts is not None
        places, drafts = places[scheduled.samples], scheduled.drafts[scheduled.samples]
        plain = places[drafts == 0]
        self._lengths[plain] += 1
        self.is_known[plain] = False
        self._open[places[drafts > 0]] += 1
        self._unread.add(samples, partial(self._take, places, drafts > 0, self._tenants[places], samples))

    def _take(self, places: np.ndarray, has_drafts: np.ndarray, tenants: np.ndarray, samples: StepSamples) -> None:
        found = samples.kept
        counts = np.frombuffer(found.counts, np.uint8).astype(np.int64) if found.counts else np.ones_like(places)
        self._rows.take(places, counts, found.tokens)
        own = has_drafts & (self._tenants[places] == tenants)
        rows = places[own]
        self._open[rows] -= 1
        self._lengths[rows] += counts[own]
        self._last[rows] = found.tokens[np.cumsum(counts)[own] - 1]
        self.is_known[rows] = True
        self._updates.count(rows.repeat(counts[own]), found.tokens[own.repeat(counts)])
