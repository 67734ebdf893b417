"""The fleet: all ranks of a simulation, each at its own progress, and the log from which a crashed rank recovers.

Owns law Y1: all ranks that folded the same events have the same state, however slow they are or often they crash.
"""

from __future__ import annotations

from tests.sim.redacted_tape import RedactedTape
from tests.sim.scenario import Faults
from vnext.log import reading as log_read
from vnext.log.codec import EndKind, Frame, LogEnd, SegmentStart
from vnext.log.snapshot import decode, encode, load, snapshot
from vnext.sim.checks.plain_state import Divergence, PlainState, contents, differences
from vnext.sim.core import WHOLE_CHECK_EVENTS, Core
from vnext.sim.findings import Tape
from vnext.sim.rank import Rank, rebuilt
from vnext.sim.rank_values import Contents, StepResult
from vnext.sim.rng import Rng
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineRecovered, EngineStarted, first_of, plan_of
from vnext.state.reduce import reduce, start
from vnext.state.state import State

CODE_VERSION = "simulated"
TORN_BYTES_MAX = 200
TOKEN_BYTES = 4
TORN_PERCENT = 3
CRASHES_PERCENT = 10
"""Scales the crash probability in Faults, because a rank that recovers folds the whole run again."""


class Fleet:
    """Ranks 0 and up; rank 0 runs in the engine core's process. Mutable; `folded` counts each rank's events."""

    def __init__(
        self, core: Core, started: EngineStarted, faults: Faults, rng: Rng, contents: Contents | None = None
    ) -> None:
        """`contents`: those of the disk tier, which outlive ranks."""
        self._contents = contents or Contents()
        self.ranks = [Rank(started, self._contents) for _ in range(started.world_size)]
        self.folded = [1] * started.world_size
        self.core, self._faults, self._rng = core, faults, rng
        self._started = started
        self._digests: dict[int, int] = {}
        self._masks: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._tapes = (Tape(started, CODE_VERSION), RedactedTape(started)) if faults.logged else None
        self._written = 1
        self._loaded: State | None = None

    def tell(self) -> StepResult | None:
        """Fold the core's newest event on all ranks that are not slow; returns the result of rank 0."""
        event, state = self.core.events[-1], self.core.state
        if (plan := plan_of(event)) is not None and len(self.ranks) > 1:
            self._digests[plan.step] = digest(state)
        self._follow_snapshot(event)
        if self._tapes is not None:
            self._tapes[1].hear(event, state)
        if isinstance(event, EngineRecovered):
            self._replace_ranks()
        caught = self.catch_up(0)
        for rank in range(1, len(self.ranks)):
            if not self._rng.happens(self._faults.slow_rank):
                self.catch_up(rank)
        if state.sequence % WHOLE_CHECK_EVENTS == 0:
            for rank in range(1, len(self.ranks)):
                if self.folded[rank] == len(self.core.events):
                    self._compare_contents(rank)
        return caught

    def catch_up(self, rank: int) -> StepResult | None:
        """Fold the events that a rank has not seen; returns its last result."""
        if self._rng.happens(self._faults.crash) and self._rng.happens(CRASHES_PERCENT):
            self._come_back(rank)
        result = None
        for event in self.core.events[self.folded[rank] :]:
            # The first rank sees every event at once, and shares the engine core's state.
            result = self.ranks[rank].fold(event, None if rank else self.core.seen)
            if result is None:
                continue
            masks = (result.masks, result.failed)
            if self._masks.setdefault(result.step, masks) != masks:
                raise Divergence(f"G3: rank {rank} has other masks in step {result.step}")
            if rank and result.digest != self._digests[result.step]:
                raise Divergence(f"Y1: rank {rank} has another state in step {result.step}")
        self.folded[rank] = len(self.core.events)
        return result

    def _compare_contents(self, rank: int) -> None:
        """Y1 beyond the digest: compare replicas part by part."""
        differ = differences(contents(self.core.seen), contents(PlainState(self.ranks[rank].state)))
        if differ:
            raise Divergence(f"Y1: rank {rank} has other {', '.join(differ)} after event {self.core.state.sequence - 1}")

    def _replace_ranks(self) -> None:
        """All ranks are new and begin from the state as it is sent to them, however far the old ones had come."""
        state = self.core.state
        sent = encode(snapshot(state), TOKEN_BYTES)
        arrivals = [self.core.accounting.entries[id_].arrival for id_ in state.requests.mapping()]
        self.ranks = [Rank(self._started, self._contents) for _ in self.ranks]
        for rank in self.ranks:
            rank.go_on_from(load(decode(sent), state.config), arrivals)
        self.folded = [len(self.core.events)] * len(self.ranks)

    # ---- crashes and the log -------------------------------------------------------------------------------------

    def _come_back(self, rank: int) -> None:
        """Crash and restart a rank: rank 0 where it was, another with the events found in the log."""
        events = self.core.events
        if self._tapes is None:
            self.ranks[rank] = rebuilt(events[: self.folded[rank]], self._contents)
            return
        found = self._torn_log(self._tapes[0])
        if rank == 0:
            found += events[len(found) : self.folded[0]]
        self.ranks[rank], self.folded[rank] = rebuilt(found, self._contents), len(found)

    def _torn_log(self, tape: Tape) -> list[AnyEvent]:
        """The events left in a log that was cut somewhere in its last bytes: those of every whole frame, and no others."""
        data = tape.data()
        size = max(len(data) - self._rng.below(TORN_BYTES_MAX), tape.ends[0][0])
        found, kind = events_of(data[:size])
        whole, count = max(end for end in tape.ends if end[0] <= size)
        right = "complete" if whole == size else "torn"
        if kind != right or len(found) != count or found != self.core.events[:count]:
            raise Divergence(f"X2: {len(found)} events were read, {kind}, where {count} are whole in {size} bytes")
        return found

    def _follow_snapshot(self, event: AnyEvent) -> None:
        """X2: a state loaded from a log's snapshot equals the core's and stays equal until the next one is loaded."""
        if self._tapes is None:
            return
        state = self.core.state
        if self._loaded is not None:
            self._loaded = reduce(self._loaded, event)
        if state.sequence % WHOLE_CHECK_EVENTS:
            return
        if self._loaded is not None:
            differ = differences(contents(self.core.seen), contents(PlainState(self._loaded)))
            if differ or digest(self._loaded) != digest(state):
                raise Divergence(f"X2: a loaded snapshot has other {', '.join(differ)} after event {state.sequence - 1}")
        self._loaded = load(decode(encode(snapshot(state), self._tapes[0].width)), state.config)

    def end_of_iteration(self) -> None:
        """Write the engine core's events since the last call as one frame of its log."""
        if self._tapes is None or self._written == len(self.core.events):
            return
        tape, shaped = self._tapes
        tape.write(self.core.events[self._written :], self.core.state)
        shaped.write()
        self._written = len(self.core.events)
        if self._rng.happens(TORN_PERCENT):
            self._torn_log(tape)

    # ---- the end -------------------------------------------------------------------------------------------------

    def require_equal(self) -> None:
        """Require that every rank equals the engine core, and that its log, read and written again, is the same log."""
        for rank in range(1, len(self.ranks)):
            self.catch_up(rank)
            self._compare_contents(rank)
        self.require_same_log()

    @property
    def frames(self) -> int:
        """The frames of the log so far, 0 without one."""
        return len(self._tapes[0].ends) - 1 if self._tapes is not None else 0

    def require_same_log(self) -> None:
        """X2: log -> replay -> log is byte-identical."""
        if self._tapes is not None:
            self._require_same_log(self._tapes[0])

    def _require_same_log(self, tape: Tape) -> None:
        events, kind = events_of(tape.data())
        started = first_of(events)
        again, state = Tape(started, CODE_VERSION), start(started)
        for (_, first), (_, end) in zip(tape.ends, tape.ends[1:]):
            for event in events[first:end]:
                state = reduce(state, event)
            again.write(events[first:end], state)
        if kind != "complete" or again.data() != tape.data():
            raise Divergence(f"X2: a log that was read ({kind}), replayed and written again is another one")


def events_of(data: bytes) -> tuple[list[AnyEvent], EndKind]:
    """The events of a segment, EngineStarted first, and how it ends."""
    events: list[AnyEvent] = []
    for item in log_read.read([data]):
        if isinstance(item, LogEnd):
            return events, item.kind
        if isinstance(item, Frame):
            events += item.events
        elif isinstance(item, SegmentStart):
            events.append(item.header.started)
    raise AssertionError("a log has an end")
