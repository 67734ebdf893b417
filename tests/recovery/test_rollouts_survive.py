"""Rollouts with updates between them, under kills: what is bounded here, scripts/rollouts_under_kills.py does a thousand times."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import ROOT


def test_the_digests_are_those_of_an_undisturbed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from rollouts_under_kills import compared, run

    calm = run(tmp_path / "calm", 2, 10, 3)
    killed = run(tmp_path / "killed", 2, 10, 3, kills_per_round=1)
    assert compared(calm, killed, 2) == []
    assert calm.answers == 20 and calm.kills == {} and sum(killed.kills.values()) >= 2
    other = run(tmp_path / "other", 1, 10, 4)
    assert other.digest != calm.digest and other.log_digest != calm.log_digest
