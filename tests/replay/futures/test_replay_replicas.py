"""what-if over replicas: one replica is what-if's own run, more share its requests, and every request gets its answer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_replay_what_if import Machine, machine_log, real_config, ring_of

from vnext.replay.cli.main import main
from vnext.routing.policies import POLICIES


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["what-if", *map(str, arguments), "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def test_one_replica_is_the_unchanged_run(tmp_path, capsys):
    log = machine_log(tmp_path / "log", real_config(page_count=24), noise_percent=20)
    unchanged = asked(capsys, log)["unchanged"]
    [run] = asked(capsys, log, "--replicas", "1")["runs"]
    figures = ("ttft_ms", "itl_ms", "tokens_s", "steps", "preemptions", "hit_rate", "requests", "refused")
    assert {name: run["score"][name] for name in figures} == {name: unchanged[name] for name in figures}
    assert run["requests"] == [run["score"]["requests"]] and run["largest_share"] == 1.0


def test_more_replicas_share_the_requests_and_wait_less(tmp_path, capsys):
    log = machine_log(tmp_path / "log", real_config(max_num_seqs=3), gap_us=1_500)
    answer = asked(capsys, log, "--replicas", "1,3")
    one, *more = answer["runs"]
    assert [(run["replicas"], run["policy"]) for run in answer["runs"]] == [(1, ""), *((3, policy) for policy in POLICIES)]
    for run in more:
        assert sum(run["requests"]) == one["score"]["requests"] and run["score"]["refused"] == 0
        if run["policy"] != "consistent_hash":
            assert run["score"]["ttft_ms"][1] < one["score"]["ttft_ms"][1] and min(run["requests"]) > 0
    by_policy = {run["policy"]: run["score"]["hit_rate"] for run in more}
    assert by_policy["prefix"] > by_policy["round_robin"]
    assert main(["what-if", str(log), "--replicas", "2", "--routing", "prefix", "--set", "max_num_seqs=2"]) == 0
    assert "largest: the share" in capsys.readouterr().out


def test_each_replica_pays_for_the_prompts_that_begin_in_it(tmp_path, capsys, monkeypatch):
    """In each run: replicas count their requests alike."""
    monkeypatch.setattr(Machine, "turn_us", np.array([[0.0, 50_000.0], [0.0, 50_000.0]]))
    log = machine_log(tmp_path / "log", gap_us=200_000)
    one, three, again = asked(capsys, log, "--replicas", "1,3,1", "--routing", "round_robin")["runs"]
    assert again == one and min(one["score"]["ttft_ms"][0], three["score"]["ttft_ms"][0]) > 50


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--replicas", "0"), "write numbers between 1 and"),
        (("--replicas", "2,x"), "write numbers between 1 and"),
        (("--replicas", "2", "--routing", "fastest"), "there is no routing policy 'fastest'"),
        (("--replicas", "2", "--sweep", "max_num_seqs=2,3"), "neither --sweep nor --auto"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, words):
    log = machine_log(tmp_path / "log")
    assert main(["what-if", str(log), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_log_that_begins_in_mid_run_is_refused(tmp_path, capsys):
    ring = ring_of(machine_log(tmp_path / "log"), tmp_path / "ring")
    assert main(["what-if", str(ring), "--replicas", "2"]) == 2
    assert "begins in mid-run" in capsys.readouterr().err
