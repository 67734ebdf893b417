"""Streams that are cut at random bytes while API servers, engine cores and routers are killed: what cut_streams.py repeats."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from serving import ROOT, serving


def test_streams_that_are_cut_and_killed_are_those_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from cut_streams import OPTIONS, Routers, storm

    with serving(tmp_path, *OPTIONS) as server:
        routers = Routers(1, [server])
        try:
            found = asyncio.run(storm([server], routers, streams=8, seed=3, cuts=60, kills=1, every_s=1.0))
        finally:
            routers.close()
    assert found["faults"] == [] and found["cuts"] >= 60 and found["streams"] >= 8 and min(found["kills"].values()) >= 1
