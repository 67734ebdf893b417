"""Many replicas behind one router: `python -m perf.scale --replicas 8,64,512 [--json FILE]`.

Owns the run: the schedulers of so many engines (the product's reducer and scheduler, whose steps take predicted times), the product's
router over their event streams, and a recorded arrival process (arrivals.py) that each replica brings once, from a place of its own
and with conversations of its own. Hits, waits and the counts of events and bytes follow from the record and the seed, so they repeat;
processor times are those of the router's calls in this process, the rest of which they leave out. docs/benchmarks.md#scale derives from them
what a deployment needs.

A step takes as long as one of the 135M shape with two threads: what a row reads, and the products of each token, both measured
(perf/records/*-scaling.json). Requests and frames take LATE_US from the router to an engine and back.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from perf.arrivals import Arrivals, load, text_of
from perf.record import PERF, parser_of, record_of, write_record
from perf.router import Engine
from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.routing.decision_file import DecisionFile, files_of
from vnext.routing.decisions import FORMAT_VERSION, Header
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.routing.view import View

LATE_US = 1_000
PAGES = 1_500
WARM_SHARE = 0.4
"""Of a run, before what is measured: caches fill meanwhile."""
MEMORY_PAGES = (1_500, 24_000)
MEMORY_VIEWS = 4
READER = "router"
SHAPE, THREADS, PROMPT_ROWS = "135M", 2, 512
"""As perf.scaling has them."""


class StepTime(msgspec.Struct, frozen=True):
    """Microseconds of a step, and of each token in it."""

    step_us: float
    token_us: float

    def of(self, tokens: int) -> float:
        return self.step_us + self.token_us * tokens


class TimedEngine(Engine):
    """An engine whose steps end when predicted. `computed` counts tokens of committed steps."""

    def __init__(self, page_count: int, step_time: StepTime) -> None:
        super().__init__(page_count)
        self._step_time, self._device_us = step_time, 0.0
        self.ends: deque[float] = deque()
        self.computed = 0

    def plan_all(self, now_us: float) -> list[float]:
        """Plan what can be planned; when these steps end."""
        planned = []
        while self.plan():
            self._device_us = max(now_us, self._device_us) + self._step_time.of(self.state.in_flight[-1].tokens)
            planned.append(self._device_us)
        self.ends.extend(planned)
        return planned

    def commit(self) -> list[tuple[str, bool]]:
        self.ends.popleft()
        self.computed += self.state.in_flight[0].tokens
        return super().commit()


class Spent(msgspec.Struct):
    """What the router did while it was measured. Nanoseconds are of processor time."""

    requests: int = 0
    choose_ns: int = 0
    frames: int = 0
    frame_bytes: int = 0
    fold_ns: int = 0


class Fleet:
    """The replicas, their router and the clock. Mutable."""

    def __init__(self, count: int, policy: str, step_time: StepTime, record: Callable[[Any], None] | None = None) -> None:
        self.engines = [TimedEngine(PAGES, step_time) for _ in range(count)]
        self.router = Router(count, policy, record)
        for view, engine in zip(self.router.views, self.engines):
            view.feed(engine.streams.begin(READER, engine.state))
        self.spent, self.is_measured = Spent(), False
        self.waits_us: list[float] = []
        self._asked_us: dict[str, float] = {}
        self._ready = [True] * count
        self._order = itertools.count()
        self._coming: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._now_us = 0.0

    def at(self, time_us: float, what: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._coming, (time_us, next(self._order), what, given))

    def run(self, until_us: float = float("inf")) -> None:
        """Everything that happens before this time."""
        while self._coming and self._coming[0][0] < until_us:
            self._now_us, _, what, given = heapq.heappop(self._coming)
            what(*given)

    def ask(self, name: str, prompt: np.ndarray, answer: np.ndarray) -> None:
        """A request comes to the router."""
        tokens, began_ns = prompt.tobytes(), time.thread_time_ns()
        place = self.router.choose(name, Prompt(tokens), self._ready, key=tokens[:256])
        self.spent.choose_ns += time.thread_time_ns() - began_ns if self.is_measured else 0
        self.spent.requests += self.is_measured
        assert place is not None
        if self.is_measured:
            self._asked_us[name] = self._now_us
        self.at(self._now_us + LATE_US, self._arrive, place, name, prompt.tolist(), answer.tolist())

    def _arrive(self, place: int, name: str, prompt: list[int], answer: list[int]) -> None:
        self.engines[place].arrive(name, prompt, answer)
        self._go_on(place)

    def _go_on(self, place: int) -> None:
        """Plan, and stream what has happened."""
        engine = self.engines[place]
        for end_us in engine.plan_all(self._now_us):
            self.at(end_us, self._commit, place)
        for frame in engine.frames().values():
            self.at(self._now_us + LATE_US, self._feed, place, frame)

    def _commit(self, place: int) -> None:
        for name, has_ended in self.engines[place].commit():
            if (asked_us := self._asked_us.pop(name, None)) is not None:
                self.waits_us.append(self._now_us - asked_us)
            if has_ended:
                self.router.done(name)
        self._go_on(place)

    def _feed(self, place: int, frame: bytes) -> None:
        began_ns = time.thread_time_ns()
        self.router.views[place].feed(frame)
        if self.is_measured:
            self.spent.fold_ns += time.thread_time_ns() - began_ns
            self.spent.frames, self.spent.frame_bytes = self.spent.frames + 1, self.spent.frame_bytes + len(frame)

    def totals(self) -> np.ndarray:
        """Of each replica: prompt tokens that hit, prompt tokens asked, tokens computed, events (int64[4, n])."""
        counters = [(engine.state.counters, engine) for engine in self.engines]
        return np.array(
            [(each.prefix_hit_tokens, each.prefix_queried_tokens, engine.computed, engine.state.sequence) for each, engine in counters]
        ).T


class Found(msgspec.Struct, frozen=True):
    """One number of replicas under one policy. Rates are for each second of the clients' time; `largest_share` and `p99_share` are
    computed tokens of one replica over the mean of all."""

    replicas: int
    policy: str
    requests: int
    unmeasured: int
    hit_rate: float
    wait_ms_p50: float
    wait_ms_p99: float
    largest_share: float
    p99_share: float
    requests_per_s: float
    events_per_s: float
    frames_per_s: float
    bytes_per_s: float
    decision_us: float
    fold_us_per_frame: float
    decision_bytes: float
    cpu_per_s: float
    requests_per_cpu_s: float
    mismatches: int


def simulated(arrivals: Arrivals, count: int, policy: str, seconds: float, step_time: StepTime) -> Found:
    """Play the record to so many replicas for `seconds`, and to the end of the requests that have come by then."""
    with tempfile.TemporaryDirectory() as folder:
        header = Header(format_version=FORMAT_VERSION, code_version=__version__, policy=policy, replicas=("",) * count, started_ns=0)
        file = DecisionFile(Path(folder), header, file_bytes_max=1 << 30)
        fleet = Fleet(count, policy, step_time, file.write)
        asked = _give(fleet, arrivals, count, seconds)
        gc.freeze()  # as a server does that has started
        fleet.run(WARM_SHARE * seconds * 1e6)
        before, fleet.is_measured = fleet.totals(), True
        fleet.run(seconds * 1e6)
        behind, fleet.is_measured = fleet.totals() - before, False
        fleet.run()
        file.close()
        decision_bytes = sum(path.stat().st_size for path in files_of(Path(folder))) / max(asked, 1)
    assert all(view.is_exact for view in fleet.router.views) and not file.lost
    return _found(fleet, policy, asked, behind, (1 - WARM_SHARE) * seconds, decision_bytes)


def _give(fleet: Fleet, arrivals: Arrivals, count: int, seconds: float) -> int:
    """Each copy's requests from its own place in the record; returns how many they are."""
    number = 0
    for copy in range(count):
        begin_s = random.Random(copy).uniform(0, arrivals.seconds - seconds)
        for each in arrivals.requests:
            at_s = each.at_ms / 1e3 - begin_s
            if 0 <= at_s < seconds:
                fleet.at(at_s * 1e6, _ask, fleet, arrivals, copy, each, f"r{number}")
                number += 1
    return number


def _ask(fleet: Fleet, arrivals: Arrivals, copy: int, each: Any, name: str) -> None:
    length = each.prompt_tokens + each.answer_tokens
    text = text_of(each.conversation, each.system, arrivals.system_tokens, length, copy)
    fleet.ask(name, text[: each.prompt_tokens], text[each.prompt_tokens :])


def _found(fleet: Fleet, policy: str, asked: int, behind: np.ndarray, seconds: float, decision_bytes: float) -> Found:
    spent, computed = fleet.spent, behind[2] / max(float(behind[2].mean()), 1.0)
    assert len(fleet.waits_us) == spent.requests, "every request got its first token"
    return Found(
        replicas=len(fleet.engines), policy=policy, requests=spent.requests, unmeasured=asked - spent.requests,
        hit_rate=float(behind[0].sum() / max(behind[1].sum(), 1)),
        wait_ms_p50=float(np.percentile(fleet.waits_us, 50)) / 1e3, wait_ms_p99=float(np.percentile(fleet.waits_us, 99)) / 1e3,
        largest_share=float(computed.max()), p99_share=float(np.percentile(computed, 99)), requests_per_s=spent.requests / seconds,
        events_per_s=float(behind[3].sum()) / seconds, frames_per_s=spent.frames / seconds, bytes_per_s=spent.frame_bytes / seconds,
        decision_us=spent.choose_ns / spent.requests / 1e3, fold_us_per_frame=spent.fold_ns / spent.frames / 1e3,
        decision_bytes=decision_bytes, cpu_per_s=(spent.choose_ns + spent.fold_ns) / 1e9 / seconds,
        requests_per_cpu_s=spent.requests / spent.choose_ns * 1e9, mismatches=sum(view.mismatches for view in fleet.router.views),
    )  # fmt: skip


# ---- the memory of views ---------------------------------------------------------------------------------------------


def view_bytes(page_count: int) -> float:
    """Resident bytes that a view of an engine adds whose cache is full."""
    engine, rng = Engine(page_count), np.random.default_rng(0)
    for number in range(page_count * 16 // 1_024 + 1):
        engine.arrive(f"r{number}", rng.integers(1, 3_000, 1_024).tolist(), [5])
        while engine.state.requests:
            engine.step()
    head, before = engine.streams.begin(READER, engine.state), resident_bytes()
    views = [View() for _ in range(MEMORY_VIEWS)]
    for view in views:
        view.feed(head)
    assert all(view.is_exact for view in views)
    return (resident_bytes() - before) / MEMORY_VIEWS


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---- the program -----------------------------------------------------------------------------------------------------


def predicted(shape: str = SHAPE, threads: int = THREADS) -> StepTime:
    """From the newest record of perf.scaling."""
    record = json.loads(newest("scaling").read_text())
    place, found = record["threads"].index(threads), record["ms"][shape]
    return StepTime(found["decode"][place] * 1e3, found["prompt"][place] * 1e3 / PROMPT_ROWS)


def newest(name: str) -> Path:
    return sorted((PERF / "records").glob(f"*-{name}.json"))[-1]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", default="8,64,512", help="numbers of replicas")
    parser.add_argument("--policies", default="prefix,round_robin")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the clients' time")
    options = parser.parse_args()
    before, step_time, source = machine(), predicted(), newest("arrivals")
    arrivals, runs = load(source), []
    memory = {str(pages): view_bytes(pages) for pages in MEMORY_PAGES}
    print({pages: f"{size / 1e6:.1f} MB" for pages, size in memory.items()})
    for count, policy in itertools.product(map(int, options.replicas.split(",")), options.policies.split(",")):
        runs.append(msgspec.to_builtins(simulated(arrivals, count, policy, options.seconds, step_time)))
        print(json.dumps({name: round(each, 3) if isinstance(each, float) else each for name, each in runs[-1].items()}), flush=True)
    command = f"python -m perf.scale --replicas {options.replicas} --policies {options.policies} --seconds {options.seconds:g}"
    measured = {
        "arrivals": source.name, "step_time": msgspec.to_builtins(step_time), "late_us": LATE_US, "pages": PAGES,
        "view_bytes": memory, "runs": runs,
    }  # fmt: skip
    write_record(options.json, record_of(command, before, measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
