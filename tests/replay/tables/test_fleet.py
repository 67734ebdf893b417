"""fleet: its lines are those of stat and slow, all together are the sums, and the engine in trouble stands out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from log_drive import record

from tests.replay.log_answers import answer
from vnext.replay import Log
from vnext.replay.cli.main import main

sys.path.append(str(Path(__file__).resolve().parents[1] / "causes"))

import incidents  # noqa: E402  (needs the path above)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three engines: a client floods one, another one stalls, and one is well."""
    made = tmp_path_factory.mktemp("fleet")
    for name in ("noisy", "disk_stall", "slow_client"):
        incidents.record(made, name)
    return made


def test_lines_are_those_of_stat_and_slow(folder, capsys) -> None:
    code, found = answer(capsys, "fleet", folder)
    assert code == 0 and [each["name"] for each in found["engines"]] == ["disk_stall", "noisy", "slow_client"]
    for each in found["engines"]:
        counted, slow = answer(capsys, "stat", folder / each["name"])[1], answer(capsys, "slow", folder / each["name"])[1]
        assert (each["tokens"], each["hit_rate"], each["preemptions"]) == tuple(
            counted[name] for name in ("computed_tokens", "hit_rate", "preemptions")
        )
        assert each["waiting"] == counted["queue"][-1] and each["requests"] == slow["counts"][0]
        assert [each["first_ms"][0], each["gap_ms"][0]] == slow["medians"][:2]


def test_all_together_are_as_one_engine(folder, capsys) -> None:
    found = answer(capsys, "fleet", folder)[1]
    logs = [Log(folder / each["name"]).requests for each in found["engines"]]
    firsts = np.concatenate([requests["ttft_ms"] for requests in logs])
    expected = np.percentile(firsts, (50, 99), method="lower")
    assert found["whole"]["first_ms"] == pytest.approx(expected, rel=0.005) and found["whole"]["requests"] == len(firsts)
    assert found["whole"]["tokens"] == sum(each["tokens"] for each in found["engines"])
    assert found["whole"]["began"] == min(each["began"] for each in found["engines"])


def test_the_engine_in_trouble_stands_out(folder, capsys) -> None:
    found = answer(capsys, "fleet", *sorted(folder.iterdir(), reverse=True))[1]
    assert found["stands_out"][0].startswith("noisy: first tokens at 99 % take 8,")
    assert any(each.startswith("noisy computed") for each in found["stands_out"])
    assert not any("slow_client" in each for each in found["stands_out"])
    assert found["commands"] == [f"vnext-replay explain {folder / 'noisy'}"]
    assert main(["fleet", str(folder)]) == 0 and "noisy: first tokens" in capsys.readouterr().out


def test_like_engines_do_not_stand_out(folder, tmp_path, capsys) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder / "noisy", tmp_path / name / "log")
    found = answer(capsys, "fleet", tmp_path / "a" / "log", tmp_path / "b" / "log")[1]
    assert found["stands_out"] == [] and [each["name"] for each in found["engines"]] == ["a/log", "b/log"]


def test_a_damaged_log_stands_out_first(folder, tmp_path, capsys) -> None:
    for name in ("a", "b"):
        shutil.copytree(folder / "slow_client", tmp_path / name / "log")
    path = next((tmp_path / "b" / "log").glob("*.vnextlog"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    code, found = answer(capsys, "fleet", tmp_path / "a", tmp_path / "b")
    assert code == 1 and found["stands_out"][0].startswith("b/log: damaged at frame ")
    assert found["commands"] == [f"vnext-replay explain {tmp_path / 'b' / 'log'}"]


def test_an_engine_that_was_not_there_is_named(folder, capsys) -> None:
    found = answer(capsys, "fleet", folder, "--from", "+9")[1]
    assert found["silent"] == ["disk_stall", "slow_client"] and [each["name"] for each in found["engines"]] == ["noisy"]
    whole = answer(capsys, "fleet", folder)[1]["engines"][1]
    assert found["engines"][0]["requests"] < whole["requests"] and found["engines"][0]["tokens"] < whole["tokens"]
    assert found["engines"][0]["seconds"] < whole["seconds"] - 8.5
    assert main(["fleet", str(folder), "--from", "+99"]) == 2 and "no engine recorded" in capsys.readouterr().err


def test_a_log_without_times_has_counts_alone(folder, tmp_path, capsys) -> None:
    record(tmp_path / "untimed")
    found = answer(capsys, "fleet", folder / "noisy", tmp_path / "untimed")[1]
    untimed = found["engines"][1]
    assert untimed["first_ms"] is untimed["began"] is untimed["tokens_per_s"] is None and untimed["tokens"] > 0
    assert not any("first tokens" in each for each in found["stands_out"])


def test_an_empty_folder_has_one_sentence(tmp_path, capsys) -> None:
    assert main(["fleet", str(tmp_path)]) == 2
    assert "holds no segment" in capsys.readouterr().err
