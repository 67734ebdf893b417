"""What the ranks' compute hides of the control plane: turns counted by hand, and an engine's own log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vnext.commands.bench.cli import main
from vnext.commands.bench.overlap import Turns, row, turns_of
from vnext.commands.bench.server_runs import MeasurementFailed

ARGV = ["overlap", "--executor", "inproc", "--threads", "1", "--input-len", "8"]


def test_a_turn_without_the_ranks_work_is_the_control_planes() -> None:
    """A prompt, then decodes of 2 requests that rank 0 computes in 70 of 100 us, with one that another step came before."""
    tokens = np.array([16, *[2] * 10, 1, *[2] * 3])
    requests = np.minimum(tokens, 2)
    features = np.stack([tokens, requests, tokens, tokens], axis=1).astype(float)
    ends = np.cumsum(np.where(tokens == 2, 100.0, 1000.0))
    assert turns_of(features, np.full(len(tokens), 70.0), ends, 2) == Turns(100.0, 70.0, 30.0)
    with pytest.raises(MeasurementFailed, match="0 steps decoded 3 requests at once"):
        turns_of(features, np.full(len(tokens), 70.0), ends, 3)


def test_what_is_left_of_it_is_not_hidden() -> None:
    found = row(4, Turns(130.0, 90.0, 40.0), Turns(100.0, 90.0, 10.0))
    assert found["hidden_share"] == 75.0 and found["gain"] == 1.3 and found["exposed_us"] == 10.0
    assert row(4, Turns(100.0, 90.0, 10.0), Turns(110.0, 90.0, 20.0))["hidden_share"] == 0.0


def test_an_engine_is_measured_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "overlap.json"
    assert main([*ARGV, "--batches", "1,3", "--output-len", "24", "--json", str(report), "--assert", "hidden_share_3>=0"]) == 0
    runs = json.loads(report.read_text())["runs"]
    assert [run["batch"] for run in runs] == [1, 3] and all(run[name] > 0 for run in runs for name in ("busy_us", "turn_us", "gain"))
    assert "hidden %" in capsys.readouterr().out


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, "--batches", "0"]) == 2 and "write numbers from 1 to 1024" in capsys.readouterr().err
    assert main([*ARGV, "--output-len", "4"]) == 2 and "give 16 tokens or more" in capsys.readouterr().err
    assert main([*ARGV, "--batches", "64", "--max-num-seqs", "32"]) == 2 and "--max-num-seqs is 32" in capsys.readouterr().err
