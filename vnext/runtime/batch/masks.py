"""Masks of the batch's constrained rows: which tokens may come next, computed by a thread beside the forward.

Owns the matchers of the constrained rows and one mask for each batch row. A token goes to the thread as soon as it is sampled;
the mask of the next one is needed when the next forward is done. What a mask holds depends on the row's tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from vnext.sampling.constraint import Matcher, Vocabulary, mask_words
from vnext.sampling.inputs import Allowed
from vnext.state.params import Constraint

if TYPE_CHECKING:
    from llguidance import LLExecutor


class RowMasks:
    """The masks of at most `row_count` rows. All methods are for one thread."""

    def __init__(self, row_count: int, vocabulary: Vocabulary) -> None:
        self._row_count, self._vocabulary = row_count, vocabulary
        self._matchers: dict[int, Future[Matcher]] = {}
        self._work: list[Future[None]] = []

    def join(self, place: int, constraint: Constraint, answer: Sequence[int]) -> None:
        """A constrained request, with its answer so far, takes a batch row."""
        self._matchers[place] = made = self._thread.submit(Matcher, constraint, self._vocabulary, answer)
        self._work.append(self._thread.submit(self._advance, [(place, made, ())]))

    def leave(self, place: int) -> None:
        """Its row becomes free, if it had one."""
        self._matchers.pop(place, None)

    def take(self, places: np.ndarray, tokens: np.ndarray) -> None:
        """Each row of `places` int64[S] has sampled one more token (int64[S])."""
        if not self._matchers:
            return
        pairs = zip(places.tolist(), tokens.tolist())
        if rows := [(place, self._matchers[place], (token,)) for place, token in pairs if place in self._matchers]:
            self._work.append(self._thread.submit(self._advance, rows))

    def wait(self) -> None:
        """Return when all masks are complete."""
        work, self._work = self._work, []
        for each in work:
            each.result()

    def allowed(self, places: np.ndarray) -> Allowed | None:
        """The masks of the rows at `places` int64[S] that have a constraint; None if none has."""
        rows = [at for at, place in enumerate(places.tolist()) if place in self._matchers]
        if not rows:
            return None
        masks = torch.from_numpy(self._masks.view(np.int32))
        return Allowed(torch.tensor(rows), torch.from_numpy(places[rows]), masks, self.wait)

    def failed(self, places: np.ndarray) -> list[tuple[int, str]]:
        """(index among `places`, why) of the rows whose constraint cannot be followed. Waits."""
        if not self._matchers:
            return []
        self.wait()
        errors = [(at, self._matchers[place].result().error) for at, place in enumerate(places.tolist()) if place in self._matchers]
        return [(at, error) for at, error in errors if error]

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
