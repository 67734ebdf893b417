"""Benchmark of the log: recording a steady iteration and its parts, taking a snapshot, and reading back.

`python -m pytest perf/bench_log.py`. Between two measured frames the engine folds a step, outside the clock, so the
processor's caches are as in a running engine. An iteration commits the older step and plans the next; bench_state.py measures
the digest of the state. Requests have at least 512 to 527 tokens, so that one row in sixteen fills a block each step.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from vnext.commands.bench.control.steady import VOCABULARY, arrivals, empty_engine
from vnext.log import codec, log_bytes, snapshot as snapshots
from vnext.log.redaction import Redactor
from vnext.log.snapshot import snapshot
from vnext.replay.reading.info import info
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.fold_commit import MatchedSamples
from vnext.state.params import Sampling
from vnext.state.reduce import fold
from vnext.state.state import State

ROUNDS = 600
WARMUP = 64
LOG_BYTES = 96 * 2**20
ANSWER_LENGTH = 200
RUNNING = (8, 64, 256)
KEY = bytes(16)
STEP_S = 0.005
COLD_BYTES = 64 * 2**20

Iteration = tuple[list[AnyEvent], list[State], int, tuple, list[MatchedSamples | None]]
running = pytest.mark.parametrize("request_count", RUNNING)
privacies = pytest.mark.parametrize("privacy", ["full", "shape"])


class Engine:
    """A decoding engine; `iteration` folds the next iteration and returns the recorder's input."""

    def __init__(self, request_count: int) -> None:
        self.state = empty_engine(request_count)
        self.started = EngineStarted(
            config=self.state.config, model="none", model_digest="", world_size=1, environment={}, started_ns=0
        )
        self._rng = np.random.default_rng(1)

    def starting(self, request_count: int) -> list[Iteration]:
        """Return the iterations until every prompt is computed and one step is in flight."""
        found = [self._fold([event]) for event in arrivals(request_count)]
        found.append(self._fold([schedule(self.state)]))
        while self.state.waiting or int((self.state.rows.known - self.state.rows.computed).max()) > 0:
            found.append(self.iteration())
        return found

    def iteration(self) -> Iteration:
        scheduled = self.state.in_flight[0]
        sampled = self._rng.integers(3, VOCABULARY, int(scheduled.samples.sum()))
        return self._fold([StepCommitted(step=scheduled.step, tokens=pack_tokens(sampled)), None])

    def _fold(self, events: list[AnyEvent | None]) -> Iteration:
        """Fold events; None stands for the next plan."""
        befores, done, matched = [], [], []
        for event in events:
            event = event or schedule(self.state)
            befores.append(self.state)
            done.append(event)
            self.state, effects = fold(self.state, event)
            matched.append(effects)
        return done, befores, digest(self.state), (), matched


def recorded(log_dir: Path, privacy: str, request_count: int, durable: bool = False) -> tuple[Engine, Recorder]:
    """Return an engine in its steady state and its recorder, with timestamps like a real engine's."""
    engine = Engine(request_count)
    recorder = Recorder.open(log_dir, engine.started, privacy, Bounds(timestamped=True, durable=durable))
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
    """The whole recording, timestamps included."""
    engine, recorder = recorded(tmp_path / "log", privacy, request_count)
    measure(benchmark, engine.iteration, recording(recorder))
    assert recorder.frames_lost == 0 and len(engine.state.rows) == request_count
    benchmark.extra_info["frame_bytes"] = len(recorder._frame)


@privacies
def test_append_cold(benchmark, tmp_path, privacy: str) -> None:
    """The same for 64 requests with cold processor caches, as when ranks run in between."""
    engine, recorder = recorded(tmp_path / "log", privacy, 64)
    others = np.zeros(COLD_BYTES, dtype=np.uint8)

    def setup() -> Iteration:
        iteration = engine.iteration()
        others.__iadd__(1)
        return iteration

    measure(benchmark, setup, recording(recorder))


def test_append_durable(benchmark, tmp_path) -> None:
    """The same for 64 requests, synced to the device."""
    engine, recorder = recorded(tmp_path / "log", "shape", 64, durable=True)
    measure(benchmark, engine.iteration, recording(recorder))
    assert recorder.frames_lost == 0


def recording(recorder: Recorder) -> Callable[..., None]:
    """Return the engine core's recording call of an iteration."""
    took, append = recorder.took, recorder.append

    def record(events, befores, state_digest, ranks, matched) -> None:
        took(events[0].step, STEP_S)
        append(events, befores, state_digest, ranks, matched)

    return record


@running
def test_shape(benchmark, request_count: int) -> None:
    """A frame without texts: pseudonyms, packing, encoding."""
    engine, frame, number = Engine(request_count), bytearray(), itertools.count(10**6)
    redactor = Redactor(engine.started, KEY)
    for events, befores, _, _, matched in engine.starting(request_count):
        list(map(redactor.redact, befores, events, matched))
    made = []

    def shape(events, befores, state_digest, ranks, matched) -> None:
        made.append(redactor.put_steady(frame, next(number), befores[0], events, matched[0], 3))

    measure(benchmark, engine.iteration, shape)
    assert all(made), "a steady step takes the short way"


@running
def test_put(benchmark, request_count: int) -> None:
    """A frame with texts: packing and encoding."""
    engine, frame = Engine(request_count), bytearray()
    engine.starting(request_count)

    def put(events: list[AnyEvent], *rest: object) -> None:
        committed, planned = events
        log_bytes.impl.put_steady(frame, 10**6, committed.step, committed.tokens, planned.step, 3)

    measure(benchmark, engine.iteration, put)


@running
def test_seal(benchmark, request_count: int) -> None:
    """The frame's chained digest and checksum."""
    engine, frame = Engine(request_count), bytearray()
    engine.starting(request_count)
    codec.put_frame(frame, bytes(3 * request_count + 30))

    def seal(*iteration: object) -> None:
        log_bytes.impl.seal_frame(frame, 1, 2, xxhash.xxh3_64_intdigest)

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
def test_snapshot(benchmark, privacy: str, request_count: int) -> None:
    """The cost of a new segment, once per 64 MiB."""
    engine = Engine(request_count)
    redactor = Redactor(engine.started, KEY)
    for events, befores, _, _, matched in engine.starting(request_count):
        list(map(redactor.redact, befores, events, matched))
    made = snapshot if privacy == "full" else redactor.snapshot
    data = benchmark(lambda: snapshots.encode(made(engine.state), 3))
    benchmark.extra_info["snapshot_bytes"] = len(data)


# ---- reading -----------------------------------------------------------------------------------------------------


@running
def test_info(benchmark, tmp_path, request_count: int) -> None:
    """Count a log whose requests have prompts of 512 tokens and answers of 200."""
    engine, number = Engine(request_count), itertools.count()
    recorder = Recorder.open(tmp_path, engine.started, "full", Bounds(required=True))
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
    assert found.frames == step + 2 and found.end.kind == "complete"  # the last frame marks the end of the log
    benchmark.extra_info["mib_per_s_median"] = round(found.size_bytes / 2**20 / benchmark.stats["median"], 1)
    benchmark.extra_info["frames"] = found.frames


def arrival(id_: int, prompt: bytes) -> RequestArrived:
    return RequestArrived(
        id=id_, name=str(id_), prompt=prompt, sampling=Sampling(seed=id_, max_tokens=ANSWER_LENGTH), priority=0, arrival_ns=id_
    )


@running
@privacies
def test_read(benchmark, tmp_path, privacy: str, request_count: int) -> None:
    """Decode every frame, as every command except info does."""
    log_ = steady_log(tmp_path, privacy, request_count)
    frames = benchmark(lambda: sum(1 for _ in log_.items()))
    benchmark.extra_info["us_per_frame_median"] = round(benchmark.stats["median"] * 1e6 / frames, 2)


@running
def test_verify(benchmark, tmp_path, request_count: int) -> None:
    """Fold, re-decide and compare every step."""
    verdict = benchmark.pedantic(verify, args=(steady_log(tmp_path, "shape", request_count),), rounds=5)
    assert verdict.same
    benchmark.extra_info["steps_per_s_median"] = round(verdict.steps / benchmark.stats["median"])


def steady_log(log_dir: Path, privacy: str, request_count: int):
    engine, recorder = recorded(log_dir, privacy, request_count)
    for _ in range(ROUNDS):
        recorder.append(*engine.iteration())
    recorder.close()
    return open_log(log_dir)
