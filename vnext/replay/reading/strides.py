"""Runs: folds steady frames as steady turns (vnext/sched/turn.py) and yields them together as one run.

Owns the choice of frames that are folded this way. Most frames of a busy engine commit a step in which every running
request gets a token, and plan the expected next step; a reader needs no state in the middle of such a run. All other
frames, and frames whose turn is not steady, are folded event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np

from vnext.log.codec import Frame
from vnext.log.log_plain import FRAME_HEAD
from vnext.log.reading import STEADY_MIN, Item, Steady
from vnext.replay.reading.folding import IMPOSSIBLE, Folded, missing, refused
from vnext.sched.turn import steady_state
from vnext.state.errors import IllegalEvent
from vnext.state.events import StepCommitted
from vnext.state.fold_commit import MatchedSamples
from vnext.state.pool import Pool
from vnext.state.reduce import fold
from vnext.state.state import State, StepInFlight
from vnext.state.store.extents import Arena, Extents
from vnext.state.store.prefix_index import PrefixIndex
from vnext.state.store.versions import VersionedArray, VersionedMap

replace = msgspec.structs.replace

Hear = Callable[[Folded, MatchedSamples | None], None]
"""Called with each folded event and the samples that a commit matches."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A folded run of `frames` steady frames from event `first_event` on; the first frame commits step `step`. Every
    running request (`ids` int64[r], in row order) gets a token in each frame; `waiting` others are in the queue.

    `in_flight` are the steps in flight before. `plans` int64[n, 4] holds, for each new plan, its requests, its tokens,
    the blocks free after it and how many of those are kept. `digest` is the last frame's, `after` the state after it.
    """

    first_event: int
    step: int
    frames: int
    ids: np.ndarray
    in_flight: tuple[StepInFlight, ...]
    plans: np.ndarray
    digest: int
    after: State

    @property
    def next_events(self) -> np.ndarray:
        """The number of the event after each frame (int64[n])."""
        return self.first_event + 2 * np.arange(1, self.frames + 1)


class Folding:
    """The state while a log is folded. Mutable: `state` is the one after the last yielded item.

    `hear` is called with each event of a frame outside a run; `room` returns how many frames the next run may have.
    """

    def __init__(self, state: State, hear: Hear | None = None, room: Callable[[], int] | None = None) -> None:
        self.state = private_copy(state)
        self._hear, self._room = hear, room

    def through(self, items: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, Item | Run]]:
        """Yield everything folded and the offset where it ends, with runs in place of their frames. Raises one of
        IMPOSSIBLE for a frame that cannot be folded; `state` is then the one before it."""
        for offset, item in items:
            if isinstance(item, Steady):
                yield from self._steady(offset, item)
            elif isinstance(item, Frame):
                self._frame(item)
                yield offset + FRAME_HEAD + len(item.body), item
            else:
                yield offset, item

    def _frame(self, frame: Frame) -> None:
        state = self.state
        if frame.first_event != state.sequence:
            raise IllegalEvent(missing(frame))
        for number, event in enumerate(frame.events, frame.first_event):
            before = state
            try:
                state, matched = fold(state, event)
            except IMPOSSIBLE as error:
                raise IllegalEvent(refused(event, error)) from error
            if self._hear is not None:
                self._hear(Folded(number, event, before, state, frame.first_event + len(frame.events)), matched)
        self.state = state

    def _steady(self, offset: int, run: Steady) -> Iterator[tuple[int, Item | Run]]:
        """Fold the run of frames that begins at this offset, as far as it can be taken in turns."""
        place, taken = 0, [0, *np.cumsum(run.counts).tolist()]
        before = offset - run.offset
        while place < len(run.ends):
            found = self._run(run, place, taken)
            if found is None:
                frame = run.frame(place)
                self._frame(frame)
                yield before + int(run.ends[place]), frame
                place += 1
            else:
                place += found.frames
                yield before + int(run.ends[place - 1]), found

    def _run(self, run: Steady, place: int, taken: list[int]) -> Run | None:
        """The steady turns from this place on in which every running request gets a token; None if there are none."""
        before, first_event = self.state, run.first_event + 2 * place
        steps = (run.committed + place, run.planned + place, first_event)
        count = self._even(run, place)
        if count < STEADY_MIN or steps != (before.committed, before.planned, before.sequence):
            return None
        plans = []
        for at in range(place, place + count):
            event = StepCommitted(step=run.committed + at, tokens=run.tokens[taken[at] : taken[at + 1]].tobytes())
            if (after := _turned(self.state, event)) is None:
                break
            self.state, scheduled, pool = after, after.in_flight[-1], after.pool
            plans.append((len(scheduled.samples), scheduled.tokens, pool.free, pool.kept))
        if not plans:
            return None
        last = place + len(plans) - 1
        return Run(
            first_event=first_event,
            step=run.committed + place,
            frames=len(plans),
            ids=before.rows.id,
            in_flight=before.in_flight,
            plans=np.array(plans),
            digest=run.digest if last == len(run.ends) - 1 else run.frame(last).digest,
            after=self.state,
        )

    def _even(self, run: Steady, place: int) -> int:
        """How many frames from this place on sample a token of every running request."""
        most = len(run.ends) - place if self._room is None else min(self._room(), len(run.ends) - place)
        uneven = np.flatnonzero(run.counts[place : place + most] != len(self.state.rows))
        return int(uneven[0]) if len(uneven) else most


def _turned(state: State, event: StepCommitted) -> State | None:
    """The state after a steady frame; None if its events must be folded one by one."""
    try:
        return steady_state(state, event, recorded=True)
    except IMPOSSIBLE:
        return None


def private_copy(state: State) -> State:
    """The same state in its own stores, so that continuing from it adds no differences to the given state."""
    pool = state.pool
    return replace(
        state,
        tokens=_copy(state.tokens),
        tables=_copy(state.tables),
        requests=VersionedMap(dict(state.requests.items())),
        pool=replace(_own_pool(pool), states=pool.states and _own_pool(pool.states)),
    )


def _own_pool(pool: Pool) -> Pool:
    return replace(
        pool, status=VersionedArray(pool.status.values().copy(), pool.status.hash), queue=_copy(pool.queue),
        prefix_index=PrefixIndex(dict(pool.prefix_index.blocks()), pool.prefix_index.keys()),
    )  # fmt: skip


def _copy(values: Extents) -> Extents:
    return Extents(Arena(values.arena.data.copy()), values.used, 0)
