"""Drafts of the batch's rows: the tokens of each request as its rank knows them, and what the drafter makes of them.

A step in flight was planned as if all earlier drafts were kept, and with as many drafts as it may take. Owns what the step
really is on this rank: where each row starts, and the drafts there are. Folds nothing; the state learns of it by the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from vnext.runtime.batch.draft_batch import DraftBatch, DraftedRow
from vnext.sampling.drafters.drafter import Drafter, RowDrafter, drafter_of
from vnext.state.config import SchedulerConfig
from vnext.state.state import Request, SamplePoints, StepInFlight

SPARE = 256
NO_DRAFTS = np.empty(0, dtype=np.int32)


class Drafted(NamedTuple):
    """A step as it is computed: `scheduled` with true starts and counts, and the drafts of its entries, one after another
    (int32[sum of scheduled.drafts])."""

    scheduled: StepInFlight
    tokens: np.ndarray

    def before(self, points: SamplePoints) -> list[np.ndarray] | None:
        """The drafts of the same row before each of its samples; None in a step without drafts."""
        if not len(self.tokens):
            return None
        drafts = self.scheduled.drafts
        assert drafts is not None, "the step has drafts"
        firsts = np.cumsum(drafts) - drafts
        begins, sizes = firsts[points.entries], (drafts[points.entries] - points.back)
        return [self.tokens[first : first + size] for first, size in zip(begins.tolist(), sizes.tolist())]


class Kept(NamedTuple):
    """What a step's samples come to: the tokens kept (int64[T]) and their indices among the samples (int64[T]); for each
    request that sampled, the number of its tokens and of its drafts (uint8 each; both empty in a step without drafts); and the
    drafts (int32[n])."""

    tokens: np.ndarray
    samples: np.ndarray
    counts: bytes
    drafted: bytes
    drafts: np.ndarray


class Grammars(Protocol):
    """The grammars of constrained rows, as RowMasks has them."""

    def forced(self, place: int, most: int) -> list[int]: ...

    def follow(self, place: int, drafts: Sequence[int]) -> None: ...

    def followed(self, place: int) -> int: ...


class DraftRows:
    """The histories of the rows of one batch. Mutable. The drafts of a constrained row are what its grammar forces."""

    def __init__(self, drafter: Drafter, grammars: Grammars, row_count: int, batch: DraftBatch | None = None) -> None:
        """`batch`: the draft model's, which drafts for all rows without a constraint."""
        self._drafter, self._grammars, self._batch = drafter, grammars, batch
        self._rows: dict[int, RowDrafter] = {}
        self._histories: dict[int, np.ndarray] = {}
        self._lengths = np.zeros(row_count, dtype=np.int64)
        self._constrained: set[int] = set()

    def join(self, place: int, tokens: np.ndarray, request: Request) -> None:
        """A request with these known tokens (int32[n]) takes a batch row."""
        self._rows[place] = self._drafter.row(request.root, request.prompt_length)
        self._histories[place] = np.concatenate((tokens, np.empty(SPARE, dtype=np.int32)))
        self._lengths[place] = len(tokens)
        (self._constrained.discard if request.sampling.constraint is None else self._constrained.add)(place)

    def leave(self, place: int, is_finished: bool) -> None:
        """A request leaves its batch row, for good if it `is_finished`."""
        if is_finished:
            self._rows[place].finish(self._tokens(place))
        del self._rows[place], self._histories[place]

    def drafted(self, scheduled: StepInFlight, places: np.ndarray, lengths: np.ndarray | None = None) -> Drafted:
        """The step as this rank computes it; `places` int64[n]: its entries' batch rows. `lengths` int64: how many tokens each
        batch row has, if some are not known here; a step with drafts needs them all."""
        assert scheduled.drafts is not None
        base = scheduled.counts - scheduled.drafts
        starts = np.minimum(scheduled.starts, (self._lengths if lengths is None else lengths)[places] - base)
        if self._batch is not None:
            self._batch.forget(places, starts, scheduled.counts)
        if not scheduled.drafts.any() and starts.tobytes() == scheduled.starts.tobytes():
            return Drafted(scheduled, NO_DRAFTS)
        found = self._found(places.tolist(), scheduled.drafts.tolist())
        counts = np.array([len(each) for each in found], dtype=np.int64)
        entries = scheduled.entries.copy()
        entries[2], entries[3] = starts, base + counts
        step = msgspec.structs.replace(scheduled, entries=entries, tokens=int(entries[3].sum()), drafts=counts)
        return Drafted(step, np.concatenate(found))

    def _found(self, places: list[int], drafts: list[int]) -> list[np.ndarray]:
        found = [self._drafts_of(place, most) for place, most in zip(places, drafts)]
        free = [at for at, place in enumerate(places) if drafts[at] and place not in self._constrained]
        if self._batch is not None and free:
            rows = [DraftedRow(places[at], self._tokens(places[at]), drafts[at]) for at in free]
            for at, tokens in zip(free, self._batch.drafts(rows)):
                found[at] = tokens
        return found

    def kept(self, drafted: Drafted, places: np.ndarray, tokens: np.ndarray) -> Kept:
        """As `kept`, of a step whose samples (int64[S]) are those of rows `places`."""
        return kept(*drafted, tokens, self.bounds(drafted.scheduled, places))

    def bounds(self, scheduled: StepInFlight, places: np.ndarray) -> np.ndarray:
        """How many drafts of each request that samples, at rows `places`, may be kept (int64[n]). A constraint that fails behind a
        draft fails in the next step, as if the draft were wrong: so an answer ends where it ends without drafts."""
        assert scheduled.drafts is not None
        most: np.ndarray = scheduled.drafts[scheduled.samples].copy()
        for at, place in enumerate(places.tolist()):
            if most[at] and place in self._constrained:
                most[at] = self._grammars.followed(place)
        return most

    def take(self, places: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Rows (int64[n], no row twice) have kept `counts` tokens each, one row's after another's."""
        at, kept = 0, tokens.tolist()
        for place, length, count in zip(places.tolist(), self._lengths[places].tolist(), counts.tolist()):
            history = self._histories[place]
            if length + count > len(history):
                history = self._histories[place] = np.concatenate((history, np.empty(len(history), dtype=np.int32)))
            for after in range(length, length + count):
                history[after] = kept[at]
                at += 1
        self._lengths[places] += counts

    def _tokens(self, place: int) -> np.ndarray:
        return self._histories[place][: self._lengths[place]]

    def _drafts_of(self, place: int, most: int) -> np.ndarray:
        if most == 0:
            return NO_DRAFTS
        if place not in self._constrained:
            return self._rows[place].drafts(self._tokens(place), most)
        drafts = self._grammars.forced(place, most)
        if drafts:
            self._grammars.follow(place, drafts)
        return np.array(drafts, dtype=np.int32)


def draft_rows(config: SchedulerConfig, grammars: Grammars, model_drafts: DraftBatch | None = None) -> DraftRows | None:
    """The drafts of a batch's rows; None in an engine without any."""
    speculation = config.speculation
    return None if speculation is None else DraftRows(drafter_of(speculation), grammars, config.max_num_seqs, model_drafts)


def kept(scheduled: StepInFlight, drafts: np.ndarray, tokens: np.ndarray, most: np.ndarray) -> Kept:
    """Which samples (int64[S]) of a step as computed are kept: of each request those up to the first that is not the draft
    behind it. `drafts` int32: those of its entries, one after another. `most` int64[n]: the number of drafts of each request
    that may be kept."""
    planned, samples = scheduled.drafts, scheduled.samples
    if not len(drafts):
        return Kept(tokens, np.arange(len(tokens)), b"", b"", drafts)
    assert planned is not None
    sizes = planned[samples] + 1
    ends, counts, kept_at, at = np.cumsum(sizes), [], [], 0
    for first, size, bound in zip((ends - sizes).tolist(), sizes.tolist(), most.tolist()):
        same = tokens[first : first + size - 1] == drafts[at : at + size - 1]
        count = min(size if same.all() else int(same.argmin()) + 1, bound + 1)
        counts.append(count)
        kept_at.append(np.arange(first, first + count))
        at += size - 1
    where = np.concatenate(kept_at)
    return Kept(tokens[where], where, bytes(counts), planned[samples].astype(np.uint8).tobytes(), drafts)
