"""vnext-replay over each of a million steps: `verify` confirms every step, `watch` raises no false alarm.

`python -m pytest perf/bench_replay_whole.py`, after `python scripts/make_log.py build/replay-1000000 --steps 1000000 --batch 8`.
Takes about two minutes. bench_replay.py and bench_replay_tools.py measure a step at other batch sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.make_log import make_log
from vnext.log.codec import Frame, SegmentStart
from vnext.replay.answers.watch import Watcher
from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify

LONG_STEPS = 1_000_000
LONG = Path(__file__).resolve().parents[1] / "build" / f"replay-{LONG_STEPS}"
ONCE = dict(rounds=1, warmup_rounds=0)


@pytest.fixture(scope="module")
def long_log() -> Path:
    if not any(LONG.glob("*.vnextlog")):
        make_log(LONG, LONG_STEPS, 8)
    return LONG


def test_verify_all(benchmark, long_log) -> None:
    verdict = benchmark.pedantic(lambda: verify(open_log(long_log)), **ONCE)
    assert verdict.same and verdict.steps >= LONG_STEPS and not verdict.plans_unchecked
    benchmark.extra_info |= dict(steps=verdict.steps, digests=verdict.digests, rank_digests=verdict.rank_digests)
    benchmark.extra_info["steps_per_s"] = round(verdict.steps / benchmark.stats["median"])


def test_watch_all(benchmark, long_log) -> None:
    log = open_log(long_log)
    watcher = Watcher(log)

    def watch() -> None:
        for item in log.items():
            if isinstance(item, (Frame, SegmentStart)):
                watcher.take(item)

    benchmark.pedantic(watch, **ONCE)
    assert watcher.alarm is None and watcher.steps >= LONG_STEPS
    benchmark.extra_info |= dict(steps=watcher.steps, false_alarms=0)
    benchmark.extra_info["steps_per_s"] = round(watcher.steps / benchmark.stats["median"])
