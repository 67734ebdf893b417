"""gate: a policy that serves a log's requests better passes, one that serves them worse is named with the log and a request."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import incidents
import pytest

from vnext.replay.cli.main import main
from vnext.replay.futures import gate as gating


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    incidents.record(folder, "noisy")
    return folder / "noisy"


def test_fair_turns_pass_and_fewer_sequences_do_not(noisy, capsys) -> None:
    assert main(["gate", str(noisy), "--policy", "fair", "--slo", "ttft=1s", "--json"]) == 0
    (better,) = json.loads(capsys.readouterr().out)["logs"]
    assert better["after"] > better["before"] and better["control"] == 0
    assert main(["gate", str(noisy), str(noisy), "--set", "max_num_seqs=4", "--slo", "ttft=1s"]) == 1
    shown = capsys.readouterr().out
    assert shown.count(f"{noisy}: 32.9% of the requests") == 2 and "request 45 most" in shown and "does not hold" in shown


def test_deadlines_pass_without_a_late_request_that_was_in_time(noisy, capsys) -> None:
    assert main(["gate", str(noisy), "--policy", "deadline:1000", "--slo", "ttft=1s", "--json"]) == 0
    (better,) = json.loads(capsys.readouterr().out)["logs"]
    assert better["after"] > 1.5 * better["before"] and better["control"] == better["lost"] == 0


def test_a_log_that_does_not_come_again_is_no_ground(noisy, capsys) -> None:
    """The control: what the simulator gets wrong may not pass as the policy's merit."""
    with patch.object(gating, "reproduced", lambda taken, again: len(taken.events) - 2):
        assert main(["gate", str(noisy), "--policy", "fair", "--slo", "ttft=1s"]) == 1
    assert "control: 2 events of its own settings are not reproduced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--slo", "ttft=1s"], "name what to hold to the logs"), (["--policy", "best", "--slo", "ttft=1s"], "there is no policy 'best'"),
     (["--policy", "fair", "--slo", "soon"], "'soon' is no objective")],
)  # fmt: skip
def test_wrong_questions_have_one_sentence(noisy, capsys, words, sentence) -> None:
    assert main(["gate", str(noisy), *words]) == 2
    assert sentence in capsys.readouterr().err
