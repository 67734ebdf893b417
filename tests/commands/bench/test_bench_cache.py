"""The prefix cache measured: its hits, and reads that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vnext.commands.bench import cache
from vnext.commands.bench.cli import main

ARGV = ["cache", "--executor", "inproc", "--threads", "1", "--block-size", "16", "--num-prompts", "4", "--input-len", "64"]


def counted(tmp_path: Path, *argv: str) -> list[dict[str, float]]:
    report = tmp_path / "cache.json"
    assert main([*ARGV, "--hit-rates", "0,50,100", *argv, "--json", str(report), "--assert", "hit_share_0<=0"]) == 0
    return json.loads(report.read_text())["runs"]


def test_hits_are_those_asked_for_and_a_cascade_reads_them_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows of 64 tokens and two more of the answer: one step of prompts, two of decodes. The last token of a prompt is computed
    whatever the cache holds, so each row has the last block of a whole hit for itself."""
    none, half, whole = counted(tmp_path, "--output-len", "3")
    assert [run["hit_share"] for run in (none, half, whole)] == [0.0, 50.0, 75.0]
    flat = 4 * (64 + 65 + 66)
    assert [run["flat"] for run in (none, half, whole)] == [flat] * 3
    assert none["cascade"] == flat and none["saved"] == 0
    assert half["cascade"] == flat - 3 * 3 * 32
    assert whole["cascade"] == flat - 3 * 3 * 48
    assert all(run["on"] > 0 and run["off"] > 0 and run["gain"] > 0 for run in (none, half, whole))
    shown = capsys.readouterr().out
    assert "tokens/s, off" in shown and "of a cascade" in shown


def test_a_cascade_that_counts_no_shared_block_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "common_blocks", lambda *_: 0)
    assert [run["saved"] for run in counted(tmp_path, "--output-len", "3")] == [0, 0, 0]


def test_hit_rates_are_percentages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, "--hit-rates", "0,120"]) == 2
    assert "write numbers from 0 to 100" in capsys.readouterr().err
