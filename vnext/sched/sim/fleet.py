"""The fleet: all ranks of a simulation, each as far as it has come, and the log from which one comes back.

Owns law Y1: every rank that folded the same events has the same state, however slow it is and however often it crashed.
"""

from __future__ import annotations

from vnext.sched.sim.chance import Chance
from vnext.sched.sim.contents import contents, differences
from vnext.sched.sim.core import WHOLE_CHECK_EVENTS, Core
from vnext.sched.sim.errors import Divergence
from vnext.sched.sim.log import Tape, events_of
from vnext.sched.sim.rank import Rank, StepResult, rebuilt
from vnext.sched.sim.setting import Faults
from vnext.sched.sim.snapshot import Snapshot
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, StepPlanned
from vnext.state.keyframe import decode, encode, keyframe, load
from vnext.state.reduce import reduce, start
from vnext.state.state import State

CODE_VERSION = "simulated"
TORN_BYTES_MAX = 200
TORN_PERCENT = 3
CRASHES_PERCENT = 10
"""Of the probability in Faults: a rank that comes back folds the whole run again."""


class Fleet:
    """Ranks 0 and up; rank 0 runs in the engine core's process. Mutable; `folded` counts each rank's events."""

    def __init__(self, core: Core, started: EngineStarted, faults: Faults, chance: Chance) -> None:
        self.ranks = [Rank(started) for _ in range(started.world_size)]
        self.folded = [1] * started.world_size
        self.core, self._faults, self._chance = core, faults, chance
        self._digests: dict[int, int] = {}
        self._tape = Tape(started, CODE_VERSION) if faults.logged else None
        self._written = 1
        self._loaded: State | None = None

    def tell(self) -> StepResult | None:
        """One more event of the core, for all that are not slow; what rank 0 says to it."""
        event, state = self.core.events[-1], self.core.state
        if isinstance(event, StepPlanned) and len(self.ranks) > 1:
            self._digests[event.step] = digest(state)
        self._follow_keyframe(event)
        said = self.catch_up(0)
        for rank in range(1, len(self.ranks)):
            if not self._chance.happens(self._faults.slow_rank):
                self.catch_up(rank)
        if state.sequence % WHOLE_CHECK_EVENTS == 0:
            for rank in range(1, len(self.ranks)):
                if self.folded[rank] == len(self.core.events):
                    self._compare_contents(rank)
        return said

    def catch_up(self, rank: int) -> StepResult | None:
        """Fold what a rank has not seen; its last result."""
        if self._chance.happens(self._faults.crash) and self._chance.happens(CRASHES_PERCENT):
            self._come_back(rank)
        result = None
        for event in self.core.events[self.folded[rank] :]:
            # The first rank sees every event at once, and shares the engine core's state.
            result = self.ranks[rank].fold(event, None if rank else self.core.seen)
            if result is not None and rank and result.digest != self._digests[result.step]:
                raise Divergence(f"Y1: rank {rank} has another state in step {result.step}")
        self.folded[rank] = len(self.core.events)
        return result

    def _compare_contents(self, rank: int) -> None:
        """Y1 beyond the digest: replicas part by part."""
        differ = differences(contents(self.core.seen), contents(Snapshot(self.ranks[rank].state)))
        if differ:
            raise Divergence(f"Y1: rank {rank} has other {', '.join(differ)} after event {self.core.state.sequence - 1}")

    # ---- crashes and the log -------------------------------------------------------------------------------------

    def _come_back(self, rank: int) -> None:
        """A rank crashes and starts again: rank 0 where it was, another one with what it found of the log."""
        events = self.core.events
        if self._tape is None:
            self.ranks[rank] = rebuilt(events[: self.folded[rank]])
            return
        found = self._torn_log(self._tape)
        if rank == 0:
            found += events[len(found) : self.folded[0]]
        self.ranks[rank], self.folded[rank] = rebuilt(found), len(found)

    def _torn_log(self, tape: Tape) -> list:
        """What is left of a log that was cut somewhere in its last bytes: every whole frame, and nothing else."""
        data = tape.data()
        size = max(len(data) - self._chance.below(TORN_BYTES_MAX), tape.ends[0][0])
        found, kind = events_of(data[:size])
        whole, count = max(end for end in tape.ends if end[0] <= size)
        right = "complete" if whole == size else "torn"
        if kind != right or len(found) != count or found != self.core.events[:count]:
            raise Divergence(f"X2: {len(found)} events were read, {kind}, where {count} are whole in {size} bytes")
        return found

    def _follow_keyframe(self, event: AnyEvent) -> None:
        """X2: a state that was loaded from a log's keyframe is the core's, and stays so until the next one is loaded."""
        if self._tape is None:
            return
        state = self.core.state
        if self._loaded is not None:
            self._loaded = reduce(self._loaded, event)
        if state.sequence % WHOLE_CHECK_EVENTS:
            return
        if self._loaded is not None:
            differ = differences(contents(self.core.seen), contents(Snapshot(self._loaded)))
            if differ or digest(self._loaded) != digest(state):
                raise Divergence(f"X2: a loaded keyframe has other {', '.join(differ)} after event {state.sequence - 1}")
        self._loaded = load(decode(encode(keyframe(state), self._tape.width)), state.config)

    def end_of_iteration(self) -> None:
        """What the engine core did since the last time becomes one frame of its log."""
        if self._tape is None or self._written == len(self.core.events):
            return
        self._tape.write(self.core.events[self._written :], self.core.state)
        self._written = len(self.core.events)
        if self._chance.happens(TORN_PERCENT):
            self._torn_log(self._tape)

    # ---- the end -------------------------------------------------------------------------------------------------

    def require_equal(self) -> None:
        """Every rank is the engine core's equal, and its log, read and written again, is the same log."""
        for rank in range(1, len(self.ranks)):
            self.catch_up(rank)
            self._compare_contents(rank)
        if self._tape is not None:
            self._require_same_log(self._tape)

    def _require_same_log(self, tape: Tape) -> None:
        """X2: log -> replay -> log is byte-identical."""
        events, kind = events_of(tape.data())
        again, state = Tape(events[0], CODE_VERSION), start(events[0])
        for (_, first), (_, end) in zip(tape.ends, tape.ends[1:]):
            for event in events[first:end]:
                state = reduce(state, event)
            again.write(events[first:end], state)
        if kind != "complete" or again.data() != tape.data():
            raise Divergence(f"X2: a log that was read ({kind}), replayed and written again is another one")
