"""Masks of the batch's constrained rows: which tokens may come next, computed by a thread beside the forward.

Owns the matchers of the constrained rows and one mask for each batch row. A token goes to the thread as soon as it is sampled;
the mask of the next one is needed when the next forward is done. What a mask holds depends on the row's tokens alone.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from vnext.sampling.constraint import Matcher, Vocabulary, mask_words
from vnext.sampling.inputs import Allowed
from vnext.state.params import Constraint

if TYPE_CHECKING:
    from llguidance import LLExecutor


ROOM_BYTES = 16 << 20
"""What must be free before llguidance is called: where it lacks memory it ends the process, and says nothing that can be caught."""


class ConstrainedRow(NamedTuple):
    """A row with a constraint: its index among a step's samples, its batch row, and its matcher, which may be in the making."""

    at: int
    place: int
    matcher: Future[Matcher]


TakenRow = tuple[int, Future[Matcher], Sequence[int]]
"""A batch row, its matcher, and tokens that it takes or has taken."""
T = TypeVar("T")


class RowMasks:
    """The masks of at most `row_count` rows, and of `drafts_max` drafts of each: those with `matchers`. All methods are for one
    thread."""

    def __init__(self, row_count: int, vocabulary: Vocabulary | None, drafts_max: int = 0) -> None:
        """Without a `vocabulary` no request with a constraint may join."""
        self._row_count, self._vocabulary, self._drafts_max = row_count, vocabulary, drafts_max
        self.matchers: dict[int, Future[Matcher]] = {}
        self._forced: dict[int, Future[dict[int, list[int]]]] = {}
        self._followed: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        self._spoilt: set[int] = set()
        self._work: list[Future[None] | Future[dict[int, list[int]]]] = []

    def join(self, place: int, constraint: Constraint, answer: Sequence[int]) -> None:
        """A constrained request, with its answer so far, takes a batch row."""
        assert self._vocabulary is not None and self._masks.size, "constraints need the checkpoint's vocabulary"
        if first := first_of(constraint, self._vocabulary.size):
            self._firsts[place] = first
        self.matchers[place] = made = self._thread.submit(self._begin, constraint, answer)
        self._work.append(self._submit(self._fill, [(place, made, [])]))

    def leave(self, place: int) -> None:
        """A row of those becomes free."""
        self._spoilt.discard(place)
        self.matchers.pop(place, None)
        self._forced.pop(place, None)
        self._firsts.pop(place, None)

    def of(self, places: np.ndarray) -> list[ConstrainedRow]:
        """Those of a step's samples, at batch rows `places` int64[S], that have a constraint."""
        found = enumerate(places.tolist())
        return [ConstrainedRow(at, place, self.matchers[place]) for at, place in found if place in self.matchers]

    def take(self, rows: list[ConstrainedRow], tokens: np.ndarray) -> None:
        """A step has sampled `tokens` int64[S]. A row that belongs to another request by now is left alone."""
        taken: dict[int, tuple[int, Future[Matcher], list[int]]] = {}
        for row in rows:
            if self.matchers.get(row.place) is row.matcher:
                taken.setdefault(row.place, (row.place, row.matcher, []))[2].append(int(tokens[row.at]))
        if not taken:
            return
        if not self._drafts_max:
            self._work.append(self._submit(self._advance, list(taken.values())))
            return
        advanced = self._submit(self._take, list(taken.values()))
        self._forced |= dict.fromkeys(taken, advanced)
        self._work += [advanced, self._submit(self._fill, list(taken.values()))]

    def forced(self, place: int, most: int) -> list[int]:
        """Up to `most` tokens that the grammar of a row forces behind those that it has taken. Waits for the row's matcher."""
        advanced = self._forced.get(place)
        return [] if advanced is None else advanced.result()[place][:most]

    def follow(self, place: int, drafts: Sequence[int]) -> None:
        """A step computes these drafts of a constrained row: make the masks of the tokens behind each of them."""
        self._work.append(self._thread.submit(self._follow, place, self.matchers[place], drafts))

    def followed(self, place: int) -> int:
        """How many of the drafts that a row follows may be kept: those before the first behind which its constraint fails.
        Waits."""
        self.wait()
        return self._followed[place]

    def drop(self) -> set[int]:
        """Steps are over without samples. Returns the rows for which something has failed: they have not taken all their tokens."""
        for each in self._work:
            each.exception()  # waits
        self._work.clear()
        spoilt, self._spoilt = self._spoilt, set()
        return spoilt

    def wait(self) -> None:
        """Return when all masks are complete."""
        work, self._work = self._work, []
        for each in work:
            each.result()

    def allowed(self, rows: list[ConstrainedRow]) -> Allowed | None:
        """The masks of these rows; None where there are none."""
        if not rows:
            return None
        counted, masks = Counter[int](), []
        for row in rows:
            masks.append(self._draft_mask(row.place, counted[row.place] - 1) if counted[row.place] else row.place)
            counted[row.place] += 1
        at = np.array([row.at for row in rows], dtype=np.int64)
        firsts = firsts_of([self._firsts.get(row.place) for row in rows], self._size)
        return Allowed(at, np.array(masks, dtype=np.int64), self._masks.view(np.int32), self.wait, firsts)

    def _draft_mask(self, place: int, at: int) -> int:
        """Which mask is that of the token behind draft number `at` of a row."""
        return self._row_count + place * self._drafts_max + at

    def failed(self, rows: list[ConstrainedRow]) -> list[tuple[int, str]]:
        """(index among the samples, why) of the rows whose constraint cannot be followed. Waits."""
        if not rows:
            return []
        self.wait()
        return [(row.at, error) for row in rows if (error := row.matcher.result().error)]

    @property
    def _size(self) -> int:
        assert self._vocabulary is not None, "constraints need the checkpoint's vocabulary"
        return self._vocabulary.size

    @cached_property
    def _masks(self) -> np.ndarray:
        """uint32[rows, words]; they stay where they are."""
        return np.zeros((self._row_count * (1 + self._drafts_max), mask_words(self._size)), dtype=np.uint32)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="vnext-masks")

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor  # imported with the tokenizer

        try:
            return LLExecutor(1)
        except ValueError as error:  # it says what the system said when a thread could not be started
            raise MemoryError(str(error)) from error

    def _submit(self, work: Callable[[list[TakenRow]], T], rows: list[TakenRow]) -> Future[T]:
        """Have the thread do `work`, and note the rows for which it fails: a step without them may be the one that hears of it."""

        def noted() -> T:
            try:
                return work(rows)
            except Exception:
                self._spoilt.update(place for place, _, _ in rows)
                raise

        return self._thread.submit(noted)

    def _begin(self, constraint: Constraint, answer: Sequence[int]) -> Matcher:
        assert self._vocabulary is not None, "join has asked for it"
        require_room()
        return Matcher(constraint, self._vocabulary, answer)

    def _advance(self, rows: list[TakenRow]) -> None:
        """Let rows take their tokens and compute their masks: (place, matcher, tokens)."""
        self._take(rows)
        self._fill(rows)

    def _take(self, rows: list[TakenRow]) -> dict[int, list[int]]:
        """Let rows take their tokens: (place, matcher, tokens). Returns what their grammars force next, if drafts are computed."""
        require_room()
        for _, made, tokens in rows:
            for token in tokens:
                made.result().take(token)
        return {place: made.result().forced() if self._drafts_max else [] for place, made, _ in rows}

    def _follow(self, place: int, made: Future[Matcher], drafts: Sequence[int]) -> None:
        """Compute the masks behind the drafts of a row."""
        require_room()
        matcher, self._followed[place] = made.result().copy(), len(drafts)
        for at, draft in enumerate(drafts):
            matcher.take(draft)
            matcher.fill(self._masks[self._draft_mask(place, at)])
            if matcher.error:
                self._followed[place] = min(self._followed[place], at)

    def _fill(self, rows: list[TakenRow]) -> None:
        """Compute the masks of rows: (place, matcher, tokens that it has taken)."""
        require_room()
        matchers = [(place, made.result()) for place, made, _ in rows]
        if grammars := [(grammar, place) for place, matcher in matchers if (grammar := matcher.grammar) is not None]:
            masks = self._masks
            self._executor.unsafe_compute_mask_ptr(grammars, masks.ctypes.data, masks.strides[0], len(masks))
        for place, matcher in matchers:
            matcher.complete(self._masks[place])


def require_room() -> None:
    """Raise MemoryError where the process cannot have ROOM_BYTES more. Touches none of them."""
    try:
        mmap.mmap(-1, ROOM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise MemoryError(f"a grammar may need {ROOM_BYTES >> 20} MiB: {error.strerror}") from error


def first_of(constraint: Constraint, size: int) -> int | None:
    """The first token that is a time, with a vocabulary of `size`; None without times, one more than the last for an answer without
    times that is judged."""
    return constraint.times[0] if constraint.times else size + 1 if constraint.judged else None


def firsts_of(firsts: Sequence[int | None], size: int) -> np.ndarray | None:
    """`Allowed.firsts` of rows with a vocabulary of `size`; each as first_of has it."""
    return np.array([size if each is None else each for each in firsts], dtype=np.int64) if any(firsts) else None


def failed_requests(ids: np.ndarray, failed: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """(request, why) of (index among a step's samples, why), each once; `ids` int64[S]: the samples' requests."""
    return tuple(dict.fromkeys((int(ids[at]), why) for at, why in failed))
