"""Makes a log as a busy engine would leave it: `python scripts/make_log.py DIR --steps 1000000 --batch 8`.

The real scheduler, reducer and recorder, tokens by chance instead of a model, two ranks that agree. Clients keep the batch
full and a few requests waiting; some prompts share a beginning, a request in fifty is aborted, and the cache is a little
too small, so that requests give way now and then. What is decided depends on the seed alone; times are those of the run.
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

from vnext.runtime.recorder import Recorder  # noqa: E402
from vnext.runtime.segments import Bounds  # noqa: E402
from vnext.sched.schedule import schedule  # noqa: E402
from vnext.state.committing import settle  # noqa: E402
from vnext.state.config import SchedulerConfig  # noqa: E402
from vnext.state.digest import digest  # noqa: E402
from vnext.state.events import AnyEvent, EngineStarted, RequestAborted, RequestArrived, StepCommitted, StepPlanned  # noqa: E402
from vnext.state.log import RankDigest  # noqa: E402
from vnext.state.params import Sampling  # noqa: E402
from vnext.state.reduce import reduce, start  # noqa: E402
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
    """Write the log; its bytes. The last request ends whenever the steps do."""
    engine = _Engine(batch, seed)
    recorder = Recorder.open(log_dir, engine.started, privacy, Bounds(stamped=True))
    while engine.state.planned < steps:
        recorder.append(*engine.iteration())
    bytes_written = recorder.bytes_written
    recorder.close()
    return bytes_written


class _Engine:
    """The state and what is still to be told of it: one frame for each `iteration`."""

    def __init__(self, batch: int, seed: int) -> None:
        blocks = batch * (PROMPT_MAX + ANSWER_MAX) // BLOCK_SIZE
        config = SchedulerConfig(
            block_size=BLOCK_SIZE, block_count=max(blocks * 4 // 10, 64), batch_tokens_max=max(512, 2 * batch),
            running_max=batch, model_len_max=PROMPT_MAX + ANSWER_MAX, vocab_size=VOCABULARY,
        )  # fmt: skip
        self.started = EngineStarted(
            config=config, model="none", model_digest="", world_size=2, environment={}, started_ns=time.time_ns()
        )
        self.state: State = start(self.started)
        self._batch = batch
        self._chance = random.Random(seed)
        self._pool = np.random.default_rng(seed).integers(3, VOCABULARY, POOL).astype("<i4").tobytes()
        self._reports: list[RankDigest] = []

    def iteration(self) -> tuple:
        """What a recorder is given of the next turn: the results of the oldest step, arrivals, the next plan."""
        events, befores, settled = [], [], []
        for event in self._chosen():
            befores.append(self.state)
            events.append(event)
            settled.append(settle(self.state, event) if isinstance(event, StepCommitted) else None)
            self.state = reduce(self.state, event, settled[-1])
        state_digest = digest(self.state)
        due = [report for report in self._reports if report.step < self.state.committed]
        self._reports = [report for report in self._reports if report.step >= self.state.committed]
        step = self.state.planned - 1
        if isinstance(events[-1], StepPlanned) and step % self.state.config.digest_interval == 0:
            self._reports += [RankDigest(rank, step, state_digest) for rank in range(2)]
        return events, befores, state_digest, due, settled

    def _chosen(self) -> Iterator[AnyEvent]:
        state = self.state
        live = len(state.rows) + len(state.waiting)
        while live < self._batch + 2:
            yield self._arrival()
            live += 1
        if len(state.flights) == state.config.pipeline_depth or schedule(self.state) is None:
            count = int(state.flights[0].samples.sum())
            at = 4 * self._chance.randrange(POOL - count)
            yield StepCommitted(step=state.committed, tokens=self._pool[at : at + 4 * count])
        if self._chance.random() < self._batch / ANSWER_MAX / 50:
            yield RequestAborted(ids=(self._chance.randrange(self.state.next_id),), reason="client")
        plan = schedule(self.state)
        if plan is not None:
            yield plan

    def _arrival(self) -> RequestArrived:
        chance = self._chance
        length = chance.randint(1, PROMPT_MAX)
        at = 4 * PROMPT_MAX * chance.randrange(SHARED_PROMPTS) if chance.random() < 0.3 else 4 * chance.randrange(POOL - length)
        sampling = Sampling(seed=chance.getrandbits(64), max_tokens=chance.randint(1, ANSWER_MAX), ignore_eos=True)
        return RequestArrived(
            id=self.state.next_id, name=f"request-{self.state.next_id}", prompt=self._pool[at : at + 4 * length],
            sampling=sampling, priority=0, arrival_ns=time.time_ns(),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
