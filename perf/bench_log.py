"""What the log costs: recording a steady iteration and its parts, a keyframe, and reading it back.

`python -m pytest perf/bench_log.py`. Recording is measured where it happens: between two frames the engine folds a step,
which is not counted and leaves the processor's caches as an engine would. An iteration commits the older step and plans
the next; the digest of the state is counted by bench_state.py. Requests have 512 to 527 tokens and more, so that one row
in sixteen fills a block each step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from perf.bench_state import VOCABULARY, arrivals, empty_engine
from vnext.replay.info import info
from vnext.replay.source import open_log
from vnext.replay.verify import verify
from vnext.runtime.recorder import Recorder
from vnext.runtime.segments import Bounds
from vnext.sched.schedule import schedule
from vnext.state import keyframe as keyframes, log, log_forms
from vnext.state.committing import Settled, settle
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.keyframe import keyframe
from vnext.state.params import Sampling
from vnext.state.reduce import reduce
from vnext.state.shape import Shaper
from vnext.state.state import State

ROUNDS = 600
WARMUP = 64
LOG_BYTES = 96 * 2**20
ANSWER_LENGTH = 200
RUNNING = (8, 64, 256)
KEY = bytes(16)
STEP_S = 0.005
COLD_BYTES = 64 * 2**20

Iteration = tuple[list[AnyEvent], list[State], int, tuple, list[Settled | None]]
running = pytest.mark.parametrize("request_count", RUNNING)
privacies = pytest.mark.parametrize("privacy", ["full", "shape"])


class Engine:
    """An engine that decodes; `iteration` folds the next one and gives what a recorder is given of it."""

    def __init__(self, request_count: int) -> None:
        self.state = empty_engine(request_count)
        self.started = EngineStarted(
            config=self.state.config, model="none", model_digest="", world_size=1, environment={}, started_ns=0
        )
        self._chance = np.random.default_rng(1)

    def starting(self, request_count: int) -> list[Iteration]:
        """Iterations until every prompt is computed and one step is in flight."""
        found = [self._fold([event]) for event in arrivals(request_count)]
        found.append(self._fold([schedule(self.state)]))
        while self.state.waiting or int((self.state.rows.known - self.state.rows.computed).max()) > 0:
            found.append(self.iteration())
        return found

    def iteration(self) -> Iteration:
        flight = self.state.flights[0]
        sampled = self._chance.integers(3, VOCABULARY, int(flight.samples.sum()))
        return self._fold([StepCommitted(step=flight.step, tokens=pack_tokens(sampled)), None])

    def _fold(self, events: list[AnyEvent | None]) -> Iteration:
        """None is the next plan."""
        befores, done, settled = [], [], []
        for event in events:
            event = event or schedule(self.state)
            befores.append(self.state)
            done.append(event)
            settled.append(settle(self.state, event) if isinstance(event, StepCommitted) else None)
            self.state = reduce(self.state, event, settled[-1])
        return done, befores, digest(self.state), (), settled


def recorded(log_dir: Path, privacy: str, request_count: int, durable: bool = False) -> tuple[Engine, Recorder]:
    """An engine in its steady state, and its log so far, with stamps as a real engine's."""
    engine = Engine(request_count)
    recorder = Recorder.open(log_dir, engine.started, privacy, Bounds(stamped=True, durable=durable))
    for iteration in engine.starting(request_count):
        recorder.append(*iteration)
    return engine, recorder


def measure(benchmark, setup: Callable[[], tuple], target: Callable) -> None:
    benchmark.pedantic(target, setup=lambda: (setup(), {}), rounds=ROUNDS, warmup_rounds=WARMUP)


# ---- recording ---------------------------------------------------------------------------------------------------


def test_loop(benchmark) -> None:
    """1,000 turns of an empty Python loop: how fast this machine is."""

    def loop() -> None:
        for _ in range(1000):
            pass

    benchmark(loop)


@running
@privacies
def test_append(benchmark, tmp_path, privacy: str, request_count: int) -> None:
    """The whole of it, stamps included."""
    engine, recorder = recorded(tmp_path / "log", privacy, request_count)
    measure(benchmark, engine.iteration, recording(recorder))
    assert recorder.frames_lost == 0 and len(engine.state.rows) == request_count
    benchmark.extra_info["frame_bytes"] = len(recorder._frame)


@privacies
def test_append_cold(benchmark, tmp_path, privacy: str) -> None:
    """The same for 64 requests where others had the processor's caches in between, as ranks have them."""
    engine, recorder = recorded(tmp_path / "log", privacy, 64)
    others = np.zeros(COLD_BYTES, dtype=np.uint8)

    def setup() -> Iteration:
        iteration = engine.iteration()
        others.__iadd__(1)
        return iteration

    measure(benchmark, setup, recording(recorder))


def test_append_durable(benchmark, tmp_path) -> None:
    """The same for 64 requests, up to the device."""
    engine, recorder = recorded(tmp_path / "log", "shape", 64, durable=True)
    measure(benchmark, engine.iteration, recording(recorder))
    assert recorder.frames_lost == 0


def recording(recorder: Recorder) -> Callable[..., None]:
    """What the engine core does for each iteration."""
    took, append = recorder.took, recorder.append

    def record(events, befores, state_digest, ranks, settled) -> None:
        took(events[0].step, STEP_S)
        append(events, befores, state_digest, ranks, settled)

    return record


@running
def test_shape(benchmark, request_count: int) -> None:
    """The frame without texts: pseudonyms, packing, encoding."""
    engine, frame, number = Engine(request_count), bytearray(), itertools.count(10**6)
    shaper = Shaper(engine.started, KEY)
    for events, befores, _, _, settled in engine.starting(request_count):
        list(map(shaper.shape, befores, events, settled))
    made = []

    def shape(events, befores, state_digest, ranks, settled) -> None:
        made.append(shaper.put_steady(frame, next(number), befores[0], events, settled[0], 3))

    measure(benchmark, engine.iteration, shape)
    assert all(made), "a steady step takes the short way"


@running
def test_put(benchmark, request_count: int) -> None:
    """The frame as it is: packing and encoding."""
    engine, frame = Engine(request_count), bytearray()
    engine.starting(request_count)

    def put(events: list[AnyEvent], *rest: object) -> None:
        committed, planned = events
        log_forms.kernels.put_steady(frame, 10**6, committed.step, committed.tokens, planned.step, 3)

    measure(benchmark, engine.iteration, put)


@running
def test_seal(benchmark, request_count: int) -> None:
    """Its chained digest and its checksum."""
    engine, frame = Engine(request_count), bytearray()
    engine.starting(request_count)
    log.put_frame(frame, bytes(3 * request_count + 30))

    def seal(*iteration: object) -> None:
        log_forms.kernels.seal_frame(frame, 1, 2, xxhash.xxh3_64_intdigest)

    measure(benchmark, engine.iteration, seal)


@running
def test_write(benchmark, tmp_path, request_count: int) -> None:
    """The system call."""
    engine, frame = Engine(request_count), bytearray(3 * request_count + 46)
    engine.starting(request_count)
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    measure(benchmark, engine.iteration, lambda *iteration: os.write(fd, frame))
    os.close(fd)


@running
@privacies
def test_keyframe(benchmark, privacy: str, request_count: int) -> None:
    """What a new segment costs, once in 64 MiB."""
    engine = Engine(request_count)
    shaper = Shaper(engine.started, KEY)
    for events, befores, _, _, settled in engine.starting(request_count):
        list(map(shaper.shape, befores, events, settled))
    made = keyframe if privacy == "full" else shaper.keyframe
    data = benchmark(lambda: keyframes.encode(made(engine.state), 3))
    benchmark.extra_info["keyframe_bytes"] = len(data)


# ---- reading -----------------------------------------------------------------------------------------------------


@running
def test_info(benchmark, tmp_path, request_count: int) -> None:
    """Counting a log in which each request has a prompt of 512 tokens and an answer of 200."""
    engine, number = Engine(request_count), itertools.count()
    recorder = Recorder.open(tmp_path, engine.started, "full")
    tokens = [pack_tokens(np.random.default_rng(seed).integers(0, VOCABULARY, 512)) for seed in range(64)]
    for step in itertools.count():
        events: list[AnyEvent] = [StepCommitted(step=step, tokens=tokens[step % 64][: 4 * request_count])]
        if step * request_count // ANSWER_LENGTH > (step - 1) * request_count // ANSWER_LENGTH:
            events.insert(0, arrival(next(number), tokens[step % 64]))
        recorder.append([*events, StepPlanned(step=step + 1, admitted=((0, 512),) * (len(events) - 1))], (), step)
        if recorder.bytes_written > LOG_BYTES:
            break
    recorder.close()
    found = benchmark.pedantic(info, args=(open_log(tmp_path),), rounds=7)
    assert found.frames == step + 1 and found.end.kind == "complete"
    benchmark.extra_info["mib_per_s_median"] = round(found.size_bytes / 2**20 / benchmark.stats["median"], 1)
    benchmark.extra_info["frames"] = found.frames


def arrival(id_: int, prompt: bytes) -> RequestArrived:
    return RequestArrived(
        id=id_, name=str(id_), prompt=prompt, sampling=Sampling(seed=id_, max_tokens=ANSWER_LENGTH), priority=0, arrival_ns=id_
    )


@running
@privacies
def test_read(benchmark, tmp_path, privacy: str, request_count: int) -> None:
    """Every frame decoded, as every command but info reads them."""
    log_ = steady_log(tmp_path, privacy, request_count)
    frames = benchmark(lambda: sum(1 for _ in log_.items()))
    benchmark.extra_info["us_per_frame_median"] = round(benchmark.stats["median"] * 1e6 / frames, 2)


@running
def test_verify(benchmark, tmp_path, request_count: int) -> None:
    """Folded, decided and compared again."""
    verdict = benchmark.pedantic(verify, args=(steady_log(tmp_path, "shape", request_count),), rounds=5)
    assert verdict.same
    benchmark.extra_info["steps_per_s_median"] = round(verdict.steps / benchmark.stats["median"])


def steady_log(log_dir: Path, privacy: str, request_count: int):
    engine, recorder = recorded(log_dir, privacy, request_count)
    for _ in range(ROUNDS):
        recorder.append(*engine.iteration())
    recorder.close()
    return open_log(log_dir)
