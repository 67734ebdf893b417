"""cache --curve: its hit rates are those of reruns with caches of these sizes, and of the log itself at its own size."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from log_drive import record, small_config
from msgspec.structs import replace

from tests.replay.log_answers import answer
from vnext.replay.answers.cache_curve import CacheCurve, _Stack
from vnext.replay.cli.main import main
from vnext.replay.futures.ground import ground_of, timed
from vnext.replay.futures.what_if_run import rerun
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log

sys.path.append(str(Path(__file__).resolve().parents[1] / "causes"))

import incidents  # noqa: E402  (needs the path above)
from story_logs import Coming, Story, config, text  # noqa: E402


@pytest.fixture(scope="module", params=[400_000, 60_000], ids=["one-by-one", "together"])
def log(request, tmp_path_factory) -> Path:
    """Instructions of several lengths, some of which come back soon and others late."""
    rng = random.Random(4)
    clients = []
    for each in range(150):
        which = min(int(rng.paretovariate(0.8)), 25)
        prompt = [*text(f"instruction {which}", 160 + 32 * (which % 9)), *text(f"q {each}", 30)]
        clients.append(Coming(at_us=each * request.param, prompt=prompt, answer=20))
    path = tmp_path_factory.mktemp("curve") / f"every-{request.param}"
    incidents.IncidentRun(path, incidents.Incident(cause="none", story=Story(config=config(page_count=1000), clients=clients))).run()
    return path


def found(path: Path, pages: int) -> int:
    """How many tokens a cache of this many pages finds, by the curve."""
    curve = CacheCurve(open_log(path))
    for item in fold(open_log(path)):
        if isinstance(item, Folded):
            curve.hear(item)
    sizes = np.concatenate(curve._sizes)
    return int((sizes <= pages).sum()) * curve._size


@pytest.mark.parametrize("pages", [100, 180, 330, 700])
def test_a_rerun_with_such_a_cache_has_these_hits(log, pages) -> None:
    ground = ground_of(open_log(log))
    changed = replace(ground.started.config, page_count=pages)
    ran = rerun(ground.taken, ground.started, changed, timed(ground.model, ground.taken, ground.pace))
    assert ran.preemptions == 0 and ran.hit_tokens > 0
    assert found(log, pages) == pytest.approx(ran.hit_tokens, rel=0 if "400000" in log.name else 0.002)


def test_the_command_has_the_curve(log, capsys) -> None:
    code, shown = answer(capsys, "cache", log, "--curve")
    points = {each["pages"]: each["found"] for each in shown["curve"]["points"]}
    assert code == 0 and points[1000] == shown["found"] and len(points) >= 12
    assert list(points.values()) == sorted(points.values()) and list(points) == sorted(points)
    assert all(value == found(log, pages) for pages, value in list(points.items())[::4])
    assert found(log, shown["curve"]["enough"]) >= 0.99 * max(points.values()) > found(log, shown["curve"]["enough"] - 1)
    assert "curve" in shown and answer(capsys, "cache", log)[1]["curve"] is None
    assert main(["cache", str(log), "--curve"]) == 0 and "1,000 (this engine)" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("changes", [{}, {"recovering": 0.02}, {"changing": 0.02}])
def test_at_its_own_size_it_is_what_happened(tmp_path, seed, changes) -> None:
    """With aborts, resets, other salts, recoveries and other weights."""
    path = record(tmp_path / "log", config=small_config(page_count=2000), seed=seed, arrivals=60, **changes)
    use = CacheCurve(open_log(path))
    hits = 0
    for item in fold(open_log(path)):
        if isinstance(item, Folded):
            use.hear(item)
            joined = ~np.isin(item.after.rows.id, item.before.rows.id) & (item.after.rows.preemption_count == 0)
            hits += int(item.after.rows.cached[joined].sum())
    assert found(path, 2000) == hits > 0


def test_pages_above_are_counted_as_by_hand() -> None:
    rng, stack, by_hand = np.random.default_rng(2), _Stack(), list[int]()
    for _ in range(300):
        count = int(rng.integers(1, 80))
        first = stack.push(count)
        by_hand += range(first, first + count)
        gone = rng.choice(by_hand, size=min(len(by_hand), int(rng.integers(0, 60))), replace=False)
        expected = [sum(other > place for other in by_hand) for place in gone.tolist()]
        assert stack.above(gone).tolist() == expected
        stack.remove(gone)
        by_hand = [place for place in by_hand if place not in set(gone.tolist())]


def test_a_cache_of_another_kind_has_one_sentence(tmp_path, capsys) -> None:
    path = record(tmp_path / "log", config=small_config(windows=(0, 5), page_count=60))
    assert main(["cache", str(path), "--curve"]) == 2 and "one kind of page" in capsys.readouterr().err
