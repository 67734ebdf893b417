"""what-if --auto: it finds the setting against a trouble that was made, judges it like any other, and prints the serve line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from log_drive import small_config, started

from tests.replay.log_answers import answer
from vnext.replay.cli.main import main
from vnext.replay.futures.what_if import serve_line

sys.path.append(str(Path(__file__).resolve().parents[1] / "causes"))

import incidents  # noqa: E402  (needs the path above)


@pytest.mark.parametrize(
    ("incident", "objective", "setting"),
    [("noisy", "ttft=1s", "policy=fair"), ("slow_client", "ttft=1s", "")],
)
def test_what_helps_is_found(tmp_path, capsys, incident, objective, setting) -> None:
    incidents.record(tmp_path, incident)
    code, found = answer(capsys, "what-if", tmp_path / incident, "--auto", "--slo", objective)
    assert code == int(bool(setting)) and setting in found["recommended"] and bool(found["recommended"]) == bool(setting)
    assert len({each["changes"] for each in found["runs"]}) == len(found["runs"]) <= 3
    best = max([each["met"] for each in found["runs"]], default=1.0)
    assert best >= found["unchanged"]["met"]
    assert found["serve"].startswith("vnext serve example-8b --" if setting else "")
    assert bool(found["serve"]) == bool(setting)


def test_the_line_has_the_options_of_serve() -> None:
    line = serve_line(started(small_config()), "policy=fair prefix_caching=False chunked_prefill=True max_num_seqs=64")
    options = "--scheduling-policy fair --no-enable-prefix-caching --enable-chunked-prefill --max-num-seqs 64"
    assert line == f"vnext serve toy {options}" and serve_line(started(small_config()), "") == ""


def test_without_an_objective_there_is_nothing_to_seek(tmp_path, capsys) -> None:
    incidents.record(tmp_path, "slow_client")
    assert main(["what-if", str(tmp_path / "slow_client"), "--auto"]) == 2
    assert "--auto seeks the settings that meet an objective" in capsys.readouterr().err
