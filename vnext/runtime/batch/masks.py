"""Masks of the batch's constrained rows: which tokens may come next, computed by a thread beside the forward.

Owns the matchers of the constrained rows and one mask for each batch row. A token goes to the thread as soon as it is sampled;
the mask of the next one is needed when the next forward is done. What a mask holds depends on the row's tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vnext.sampling.constraint import Matcher, Vocabulary, mask_words
from vnext.sampling.inputs import Allowed
from vnext.state.params import Constraint
from vnext.state.state import StepInFlight

if TYPE_CHECKING:
    from llguidance import LLExecutor


class ConstrainedRow(NamedTuple):
    """A row with a constraint: its index among a step's samples, its batch row, and its matcher, which may be in the making."""

    at: int
    place: int
    matcher: Future[Matcher]


class RowMasks:
    """The masks of at most `row_count` rows. All methods are for one thread."""

    def __init__(self, row_count: int, vocabulary: Vocabulary | None) -> None:
        """Without a `vocabulary` no request with a constraint may join."""
        self._row_count, self._vocabulary = row_count, vocabulary
        self._matchers: dict[int, Future[Matcher]] = {}
        self._work: list[Future[None]] = []

    def join(self, place: int, constraint: Constraint, answer: Sequence[int]) -> None:
        """A constrained request, with its answer so far, takes a batch row."""
        assert self._vocabulary is not None, "constraints need the checkpoint's vocabulary"
        self._matchers[place] = made = self._thread.submit(Matcher, constraint, self._vocabulary, answer)
        self._work.append(self._thread.submit(self._advance, [(place, made, ())]))

    def leave(self, place: int) -> None:
        """Its row becomes free, if it had one."""
        self._matchers.pop(place, None)

    def of(self, places: np.ndarray) -> list[ConstrainedRow]:
        """Those of a step's samples, at batch rows `places` int64[S], that have a constraint."""
        if not self._matchers:
            return []
        found = enumerate(places.tolist())
        return [ConstrainedRow(at, place, self._matchers[place]) for at, place in found if place in self._matchers]

    def take(self, rows: list[ConstrainedRow], tokens: np.ndarray) -> None:
        """A step has sampled `tokens` int64[S]. A row that belongs to another request by now is left alone."""
        live = [row for row in rows if self._matchers.get(row.place) is row.matcher]
        if live:
            taken = [(row.place, row.matcher, (int(tokens[row.at]),)) for row in live]
            self._work.append(self._thread.submit(self._advance, taken))

    def wait(self) -> None:
        """Return when all masks are complete."""
        work, self._work = self._work, []
        for each in work:
            each.result()

    def allowed(self, rows: list[ConstrainedRow]) -> Allowed | None:
        """The masks of these rows; None where there are none."""
        if not rows:
            return None
        at, places = torch.tensor([row.at for row in rows]), torch.tensor([row.place for row in rows])
        return Allowed(at, places, torch.from_numpy(self._masks.view(np.int32)), self.wait)

    def failed(self, rows: list[ConstrainedRow]) -> list[tuple[int, str]]:
        """(index among the samples, why) of the rows whose constraint cannot be followed. Waits."""
        if not rows:
            return []
        self.wait()
        return [(row.at, error) for row in rows if (error := row.matcher.result().error)]

    @cached_property
    def _masks(self) -> np.ndarray:
        """uint32[rows, words]; they stay where they are."""
        return np.zeros((self._row_count, mask_words(self._vocabulary.size)), dtype=np.uint32)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="vnext-masks")

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor  # imported with the tokenizer

        return LLExecutor(torch.get_num_threads())

    def _advance(self, rows: list[tuple[int, Future[Matcher], tuple[int, ...]]]) -> None:
        """Let rows take their tokens and compute their masks: (place, matcher, tokens)."""
        matchers = [(place, made.result()) for place, made, _ in rows]
        for (_, matcher), (*_, tokens) in zip(matchers, rows):
            for token in tokens:
                matcher.take(token)
        if grammars := [(grammar, place) for place, matcher in matchers if (grammar := matcher.grammar) is not None]:
            masks = self._masks
            self._executor.unsafe_compute_mask_ptr(grammars, masks.ctypes.data, masks.strides[0], len(masks))
        for place, matcher in matchers:
            matcher.complete(self._masks[place])

def failed_requests(scheduled: StepInFlight, failed: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """(request, why) of (index among a step's samples, why)."""
    ids = scheduled.ids[scheduled.samples]
    return tuple((int(ids[at]), why) for at, why in failed)
