"""Write the log of a busy engine: `python scripts/make_log.py DIR --steps 1000000 --batch 8`.

Runs the real scheduler, reducer and recorder with random tokens instead of a model and two ranks that agree. Clients keep
the batch full and a few requests waiting; some prompts share a prefix, one request in fifty is aborted, and the cache is a
little too small, so some requests are preempted. All decisions depend on the seed alone; timestamps are those of the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.log.codec import RankDigest  # noqa: E402
from vnext.runtime.record.recorder import Recorder  # noqa: E402
from vnext.runtime.record.segments import Bounds  # noqa: E402
from vnext.sched.schedule import schedule  # noqa: E402
from vnext.state.config import SchedulerConfig  # noqa: E402
from vnext.state.digest import digest  # noqa: E402
from vnext.state.events import AnyEvent, EngineStarted, RequestAborted, RequestArrived, StepCommitted, StepPlanned  # noqa: E402
from vnext.state.params import Sampling  # noqa: E402
from vnext.state.reduce import fold, start  # noqa: E402
from vnext.state.state import State  # noqa: E402

VOCABULARY = 128_000
BLOCK_SIZE = 16
PROMPT_MAX = 256
ANSWER_MAX = 512
SHARED_PROMPTS = 8
POOL = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=8, help="requests that run at once")
    parser.add_argument("--privacy", choices=("full", "shape"), default="full")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.perf_counter()
    bytes_written = make_log(options.log_dir, options.steps, options.batch, options.privacy, options.seed)
    seconds = time.perf_counter() - began
    print(f"{options.steps:,} steps, {bytes_written:,} bytes, {options.steps / seconds:,.0f} steps a second")
    return 0


def make_log(log_dir: Path, steps: int, batch: int, privacy: str = "full", seed: int = 1) -> int:
    """Write the log and return its size in bytes. The last requests end with the last step."""
    engine = _Engine(batch, seed)
    recorder = Recorder.open(log_dir, engine.started, privacy, Bounds(timestamped=True))
    while engine.state.planned < steps:
        recorder.append(*engine.iteration())
    bytes_written = recorder.bytes_written
    recorder.close()
    return bytes_written


class _Engine:
    """The state and its unrecorded events; each `iteration` returns one frame."""

    def __init__(self, batch: int, seed: int) -> None:
        blocks = batch * (PROMPT_MAX + ANSWER_MAX) // BLOCK_SIZE
        config = SchedulerConfig(
            block_size=BLOCK_SIZE, page_count=max(blocks * 4 // 10, 64), max_num_batched_tokens=max(512, 2 * batch),
            max_num_seqs=batch, max_model_len=PROMPT_MAX + ANSWER_MAX, vocab_size=VOCABULARY,
        )  # fmt: skip
        self.started = EngineStarted(
            config=config, model="none", model_digest="", world_size=2, environment={}, started_ns=time.time_ns()
        )
        self.state: State = start(self.started)
        self._batch = batch
        self._rng = random.Random(seed)
        self._pool = np.random.default_rng(seed).integers(3, VOCABULARY, POOL).astype("<i4").tobytes()
        self._reports: list[RankDigest] = []

    def iteration(self) -> tuple:
        """Return the recorder's input for the next turn: the results of the oldest step, arrivals, the next plan."""
        events, befores, matched = [], [], []
        for event in self._chosen():
            befores.append(self.state)
            events.append(event)
            self.state, effects = fold(self.state, event)
            matched.append(effects)
        state_digest = digest(self.state)
        due = [report for report in self._reports if report.step < self.state.committed]
        self._reports = [report for report in self._reports if report.step >= self.state.committed]
        step = self.state.planned - 1
        if isinstance(events[-1], StepPlanned) and step % self.state.config.digest_interval == 0:
            self._reports += [RankDigest(rank, step, state_digest) for rank in range(2)]
        return events, befores, state_digest, due, matched

    def _chosen(self) -> Iterator[AnyEvent]:
        state = self.state
        live = len(state.rows) + len(state.waiting)
        while live < self._batch + 2:
            yield self._arrival()
            live += 1
        if len(state.in_flight) == state.config.pipeline_depth or schedule(self.state) is None:
            count = int(state.in_flight[0].samples.sum())
            at = 4 * self._rng.randrange(POOL - count)
            yield StepCommitted(step=state.committed, tokens=self._pool[at : at + 4 * count])
        if self._rng.random() < self._batch / ANSWER_MAX / 50:
            yield RequestAborted(ids=(self._rng.randrange(self.state.next_id),), reason="client")
        plan = schedule(self.state)
        if plan is not None:
            yield plan

    def _arrival(self) -> RequestArrived:
        rng = self._rng
        length = rng.randint(1, PROMPT_MAX)
        at = 4 * PROMPT_MAX * rng.randrange(SHARED_PROMPTS) if rng.random() < 0.3 else 4 * rng.randrange(POOL - length)
        sampling = Sampling(seed=rng.getrandbits(64), max_tokens=rng.randint(1, ANSWER_MAX), ignore_eos=True)
        return RequestArrived(
            id=self.state.next_id, name=f"request-{self.state.next_id}", prompt=self._pool[at : at + 4 * length],
            sampling=sampling, priority=0, arrival_ns=time.time_ns(),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
