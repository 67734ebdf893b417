"""A growing log for the page: followed frame by frame. Recent moments stay in memory; older ones are folded on demand.

Owns the follower's thread, how much of the past is kept, and the description of the engine's condition. Reads the log's
files or copies of them (mirror.py), so no engine waits for a page, and a page that cannot keep up says that it is
behind.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Literal

import numpy as np

from vnext.base.spelling import reason
from vnext.log.codec import Frame, SegmentStart
from vnext.replay.reading.cachefile import Progress
from vnext.replay.reading.folding import IMPOSSIBLE, first_state
from vnext.replay.reading.index import Index, Place, Segment
from vnext.replay.reading.mirror import SEGMENTS_KEPT, Lost, Mirror, Silent
from vnext.replay.reading.show import Json
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.tail import Damaged, Tail
from vnext.replay.ui.opened import Questions, about_log
from vnext.replay.ui.overview import GROWTH, Overview
from vnext.replay.ui.walk import KEPT, Following, Kind, Moment, Walk
from vnext.state.errors import LawBroken
from vnext.state.state import State

POLL_S = 0.2
RETRY_S = 1.0
FRAMES_AT_ONCE = 64
"""Frames folded between two chances to answer a question."""
YIELD_S = 0.001
STEPS_MAX = 1 << 20
"""The most steps of the time line, the newest ones; when full, it drops half of them."""
FIELDS: dict[Kind, str] = {"step": "planned", "event": "sequence", "request": "next_id"}

Condition = Literal["live", "silent", "ended"]


class LiveOverview(Overview):
    """The time line of the newest steps, extended one step at a time."""

    def __init__(self, log: Log, first: State) -> None:
        super().__init__(log, first)
        self._swapping = Lock()

    def points(self, first: int, last: int, count: int) -> Json:
        with self._swapping:
            return super().points(first, last, count)

    def add(self, moment: Moment) -> None:
        if self.count >= STEPS_MAX:
            self.forget_before(self.first_step + STEPS_MAX // 2)
        self._add(moment.after, len(moment.plan.admitted), len(moment.plan.preempted))

    def forget_before(self, step: int) -> None:
        gone = min(max(0, step - self.first_step), self.count)
        if not gone:
            return
        left = self.count - gone
        values = np.zeros((len(self._values), left + GROWTH), dtype=np.int32)
        values[:, :left] = self._values[:, gone : self.count]
        with self._swapping:
            self._values, self.first_step, self.count = values, self.first_step + gone, left


class LiveWalk(Walk):
    """A walk along a growing log. The last KEPT moments are kept as they come. For older ones the log's files are
    indexed again if the existing index does not reach them. Everything happens under `lock`."""

    def __init__(self, log: Log, first: State, progress: Progress | None = None) -> None:
        super().__init__(None)  # no index until someone asks for the past
        self._following = Following(first)
        self._paths = list(log.paths)
        self._first_step = first.planned
        self._recent: OrderedDict[int, Moment] = OrderedDict()
        self._progress, self._indexed_bytes = progress, 0

    @property
    def first_step(self) -> int:
        return self._first_step

    @property
    def last_step(self) -> int:
        return self._following.state.planned - 1

    @property
    def state(self) -> State:
        return self._following.state

    @property
    def events(self) -> int:
        return self._following.state.sequence

    @property
    def requests(self) -> int:
        return self._following.state.next_id

    def take(self, frame: Frame) -> Iterable[Moment]:
        """Add a frame; yields the steps in it. Raises IllegalEvent or LawBroken if the frame does not follow."""
        for moment in self._following.take(frame):
            self._recent[moment.step] = moment
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
            yield moment

    def follow(self, log: Log) -> None:
        """Add a segment. Drops the oldest ones, and those that the engine has deleted."""
        if log.paths[0] == self._paths[-1]:
            return
        self._paths = [path for path in [*self._paths, *log.paths][-SEGMENTS_KEPT:] if path.is_file()]
        self._first_step = max(self._first_step, self._first_planned(log))
        self.index, self._ahead = None, None

    def _first_planned(self, newest: Log) -> int:
        """The first step of the oldest segment that still exists."""
        while len(self._paths) > 1:
            try:
                return Segment(open_log(self._paths[0]), None).counts[1]
            except UnusableLog:
                if self._paths[0].is_file():
                    raise
                del self._paths[0]  # the engine has deleted it meanwhile
        return Segment(newest, None).counts[1]

    def forget_before(self, step: int) -> None:
        self._first_step = max(self._first_step, step)

    def moment(self, step: int) -> Moment:
        found = self._recent.get(step) if step >= self.first_step else None
        if found is not None:
            return found
        try:
            return super().moment(step)
        except OSError as error:
            raise UnusableLog(f"step {step} is gone: the engine has deleted its part of the log ({reason(error)})") from error

    def place(self, kind: Kind, value: int) -> Place:
        grown = self._indexed_bytes != (size := self._paths[-1].stat().st_size)
        if self.index is None or (grown and value >= getattr(self.index.last, FIELDS[kind])):
            self._indexed_bytes, first = size, open_log(self._paths[0])
            log = Log(paths=tuple(self._paths), header=first.header, chain=first.chain)
            self.index, self._ahead = Index(log, self._progress, waits=False), None
        return self._at(self.index, kind, value)


class LiveLog:
    """A running engine's log from its newest segment on, with the same interface as an opened log, and ready at once."""

    opening, error, indexed = False, "", (0, 0)

    def __init__(self, folder: Path, mirror: Mirror | None = None) -> None:
        """`folder` holds the log, or a copy that `mirror` makes. Raises UnusableLog if there is none."""
        self._tail, self._mirror = Tail(folder), mirror
        self.name = mirror.name if mirror is not None else folder.name
        first = first_state(self._tail.log)
        self._questions = Questions()
        self.walk = LiveWalk(self._tail.log, first, self._questions.progress)
        self.overview = LiveOverview(self._tail.log, first)
        self.condition: Condition = "live"
        self.word = ""
        self._behind, self._stopped = True, Event()
        self._heard_s = time.monotonic()
        self._thread = Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    @property
    def log(self) -> Log:
        return self._tail.log

    def close(self) -> None:
        """Stop following; what has been read stays."""
        self._stopped.set()
        self._thread.join()

    async def ask(self, question: Callable[[Walk], Any]) -> Any:
        return await self._questions.ask(self.walk, question)

    def about(self) -> dict[str, Any]:
        now = self.walk.state
        live = {
            "condition": self.condition,
            "word": self.word,
            "behind": self._behind,
            "quiet_s": round(time.monotonic() - self._heard_s, 1),
            "running": len(now.rows),
            "waiting": len(now.waiting),
        }
        return about_log(self) | {"name": self.name, "live": live}

    # ---- the follower --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set() and self.condition != "ended":
            wait_s = POLL_S
            try:
                more = self._mirror.pull() if self._mirror is not None else False
                self._take_news()
                self.condition, self.word, self._behind = "live", "", more
                wait_s = YIELD_S if more else POLL_S
            except Silent as silent:
                self._take_rest()
                self.condition, self.word = "silent", str(silent)
                wait_s = RETRY_S
            except (Lost, Damaged, UnusableLog, OSError) as lost:
                self._take_rest()
                self.condition, self.word = "ended", reason(lost, with_file=True)
            except (LawBroken, *IMPOSSIBLE) as broken:
                self.condition, self.word = "ended", f"the log cannot be folded behind event {self.walk.events - 1}: {broken}"
            self._stopped.wait(wait_s)

    def _take_rest(self) -> None:
        """Take what had arrived before the end."""
        try:
            self._take_news()
        except (Damaged, UnusableLog, OSError, LawBroken, *IMPOSSIBLE):
            return

    def _take_news(self) -> None:
        """Fold new frames, with chances for questions in between."""
        batch: list[Frame] = []
        for item in self._tail.news():
            if isinstance(item, SegmentStart):
                self._fold(batch)
                self._begin()
            else:
                batch.append(item)
                if len(batch) == FRAMES_AT_ONCE:
                    self._fold(batch)
                    self._behind = True
                    time.sleep(YIELD_S)
                    if self._stopped.is_set():
                        return
        self._fold(batch)

    def _fold(self, batch: list[Frame]) -> None:
        if not batch:
            return
        with self.walk.lock:
            for frame in batch:
                for moment in self.walk.take(frame):
                    self.overview.add(moment)
            self.walk.forget_before(self.overview.first_step)
        self._heard_s = time.monotonic()
        batch.clear()

    def _begin(self) -> None:
        """Take the beginning of the segment that is read now."""
        with self.walk.lock:
            self.walk.follow(self._tail.log)
            self.overview.forget_before(self.walk.first_step)
