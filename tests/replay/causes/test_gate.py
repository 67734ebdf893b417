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


def test_weights_share_the_tokens_while_all_wait(tmp_path, capsys) -> None:
    """Each tenant's tokens are within 5 % of its weight's share while all wait, the control is without an error, and all end."""
    incidents.record(tmp_path, "tenants", incidents.tenants())
    log = str(tmp_path / "tenants")
    assert main(["clients", log, "--from", "14:13:21", "--to", "14:13:24", "--json"]) == 0
    waited = {each["weight"]: each["computed_tokens"] for each in json.loads(capsys.readouterr().out)["clients"]}
    shares = {weight: tokens / sum(waited.values()) * 8 / weight for weight, tokens in waited.items()}
    assert shares.keys() == {1, 2, 5} and all(abs(share - 1) < 0.05 for share in shares.values()), (waited, shares)
    assert main(["clients", log]) == 0 and "(weight 5) held others up most" in capsys.readouterr().out
    assert main(["explain", log]) == 0 and "(weight 5) filled the engine" in capsys.readouterr().out
    assert main(["req", log, "2"]) == 0 and ", weight 5 arrived" in " ".join(capsys.readouterr().out.split())
    assert main(["req", log, "0"]) == 0 and "weight" not in capsys.readouterr().out
    assert main(["stat", log, "--json"]) == 0 and json.loads(capsys.readouterr().out)["finished"] == 240
    assert main(["gate", log, "--set", "max_num_seqs=16", "--slo", "ttft=1s"]) == 0


def test_a_weight_passes_that_gives_a_guest_its_turns(tmp_path, capsys) -> None:
    incidents.record(tmp_path, "guest", incidents.guest())
    log, slo = str(tmp_path / "guest"), ("--slo", "ttft=500ms")
    assert main(["gate", log, "--set", "weight:7b96=10", *slo, "--json"]) == 0
    (better,) = json.loads(capsys.readouterr().out)["logs"]
    assert better["after"] > better["before"] + 0.3 and better["control"] == better["lost"] == 0
    for wrong, sentence in (("weight:99=3", "of no client of this log"), ("weight:7b=0", "a weight is 1 to"), ("weight:7b=x", "1 to")):
        assert main(["gate", log, "--set", wrong, *slo]) == 2 and sentence in capsys.readouterr().err


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
