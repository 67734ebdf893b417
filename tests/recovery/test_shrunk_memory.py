"""A rank's memory that shrinks under load: what shrink_memory.py repeats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from serving import ROOT, serving


def test_streams_do_not_notice_that_a_ranks_memory_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from shrink_memory import MAPPED_ANEW, OPTIONS, found_in, shrink

    for name, value in MAPPED_ANEW.items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path, *OPTIONS) as server:
        load, shrinking = asyncio.run(shrink(server, times=4, streams=4, seed=2))
        assert server.stop() == 0
    found = found_in(server.log_dir)
    assert load.wrong == [] and load.compared >= 4 and shrinking.times == 4
    assert found["verified"] and found["shortages"] >= shrinking.met
    assert all(cause.startswith("rank 0 lacks memory") for cause in found["causes"])
