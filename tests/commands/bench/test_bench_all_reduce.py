"""The ranks' sums measured: every form adds, and the switch point is where the fastest form changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vnext.commands.bench import all_reduce_ranks
from vnext.commands.bench.all_reduce import LIBRARY, ONE_SHOT, TWO_SHOT, switch_kib, winners
from vnext.commands.bench.cli import main

ARGV = ["allreduce", "--device", "cpu", "--rounds", "2"]


def test_every_form_is_timed_by_size_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "sums.json"
    assert main([*ARGV, "--sizes", "2,64", "--ranks", "2,3", "--json", str(report), "--assert", "one_shot_us_2_2>0"]) == 0
    runs = json.loads(report.read_text())["runs"]
    assert [(run["ranks"], run["kib"]) for run in runs] == [(2, 2), (2, 64), (3, 2), (3, 64)]
    assert all(run[name] > 0 for run in runs for name in (LIBRARY, ONE_SHOT, TWO_SHOT, "gain"))
    shown = capsys.readouterr().out
    assert "one-shot us" in shown and "note: 3 ranks: fastest from 2 KiB" in shown


def rows(*times: tuple[int, float, float, float]) -> list[dict[str, float]]:
    return [{"kib": kib, LIBRARY: library, ONE_SHOT: one, TWO_SHOT: two} for kib, library, one, two in times]


def test_the_switch_point_is_named() -> None:
    found = rows((2, 9, 1, 2), (16, 9, 2, 3), (64, 9, 5, 4), (512, 9, 8, 9))
    assert switch_kib(found) == 16 and winners(found) == "fastest from 2 KiB one-shot, from 64 KiB two-shot, from 512 KiB one-shot"
    assert switch_kib(rows((2, 1, 2, 3))) == 0 and winners(rows((2, 1, 2, 3))) == "fastest from 2 KiB library"


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*ARGV, "--ranks", "9"]) == 2 and "write numbers from 2 to 8" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["allreduce", "--device", "cuda"]) == 2
    assert "here are 1 GPUs for 2 ranks: give fewer --ranks, or --device cpu." in capsys.readouterr().err


def test_a_form_that_adds_wrongly_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of ones is the number of ranks."""
    monkeypatch.setattr(all_reduce_ranks, "host_forms", lambda *_: {ONE_SHOT: lambda tensor: tensor})
    monkeypatch.setattr("sys.argv", ["", "0", "2", "cpu", str(tmp_path / "meeting"), "1", "2"])
    with pytest.raises(ArithmeticError, match="one_shot adds 2 KiB of 2 ranks wrongly"):
        all_reduce_ranks.main()


def test_a_rank_that_fails_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.commands.bench.all_reduce.sys.executable", "/bin/false")
    assert main([*ARGV, "--sizes", "2"]) == 1 and "A rank failed: it said nothing." in capsys.readouterr().err
