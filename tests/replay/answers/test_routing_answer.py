"""route: a router's decisions made again, by its policy and by another; files that are cut, changed or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vnext.replay.cli.main import main
from vnext.routing.decision_file import DecisionFile, files_of
from vnext.routing.decisions import FORMAT_VERSION, Decision, Header, encode_decision, encode_header
from vnext.routing.policies import Arriving, Candidate, route


def replica(hit_tokens: int, waiting_tokens: int, is_ready: bool = True) -> Candidate:
    return Candidate(
        hit_tokens=hit_tokens, waiting_tokens=waiting_tokens, running=1, waiting=0, free_pages=5, page_count=9, is_ready=is_ready
    )


KNOWN = (
    (replica(80, 10), replica(0, 0)),
    (replica(0, 0), replica(96, 0)),
    (replica(96, 200), replica(0, 0)),
    (replica(0, 0, is_ready=False), replica(0, 0, is_ready=False)),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = DecisionFile(
        tmp_path, Header(format_version=FORMAT_VERSION, code_version="0", policy="prefix", replicas=("left", "right"), started_ns=0)
    )
    for sequence, candidates in enumerate(KNOWN * 3):
        arriving = Arriving(tokens=100, key=b"", sequence=sequence)
        chosen = route("prefix", candidates, arriving)
        file.write(Decision(arriving=arriving, candidates=candidates, chosen=-1 if chosen is None else chosen, time_us=1000 * sequence))
    file.close()
    return tmp_path


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code = main(["route", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_decisions_are_the_same_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = asked(capsys, folder)
    assert code == 0 and answer["differing"] == 0 and answer["decisions"] == 12 and answer["unrouted"] == 3
    assert [each["requests"] for each in answer["replicas"]] == [3, 6]
    assert answer["hit_tokens"] == 3 * (80 + 96) and answer["best_hit_tokens"] == 3 * (80 + 96 + 96)
    assert main(["route", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "made again, all are the same" in printed and "*80/10/1+0" in printed and "not ready" in printed and "left" in printed


def test_a_narrow_terminal_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["route", str(folder)]) == 0
    assert "\u2026" not in capsys.readouterr().out


def test_another_policy_is_a_question_and_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = asked(capsys, folder, "--policy", "least_loaded")
    assert code == 0 and answer["differing"] == 3 and answer["first"] == 0
    code, answer = asked(capsys, folder, "--policy", "round_robin", "--rows", "2")
    assert code == 0 and len(answer["last"]) == 2
    assert main(["route", str(folder), "--policy", "fastest"]) == 2
    assert "there is no routing policy 'fastest'" in capsys.readouterr().err


def test_a_decision_that_falls_otherwise_today_is_a_difference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = files_of(folder)
    wrong = Decision(arriving=Arriving(tokens=100, key=b"", sequence=12), candidates=KNOWN[1], chosen=0, time_us=0)
    path.write_bytes(path.read_bytes() + encode_decision(wrong))
    code, answer = asked(capsys, path)
    assert code == 1 and answer["differing"] == 1 and answer["first"] == 12


def test_what_cannot_be_read_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = files_of(folder)
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    code, answer = asked(capsys, path)
    assert code == 1 and answer["decisions"] == 11 and "ends inside a record behind decision 11" in answer["ended"]
    for bad, words in ((b"", "no file of a router's decisions"), (data[:20], "damaged or cut short")):
        path.write_bytes(bad)
        assert main(["route", str(path)]) == 2
        assert words in capsys.readouterr().err
    header = Header(format_version=FORMAT_VERSION, code_version="0", policy="prefix", replicas=("a",), started_ns=0)
    path.write_bytes(
        encode_header(header) + encode_decision(Decision(arriving=Arriving(tokens=1, key=b"", sequence=0), candidates=(), chosen=4, time_us=0))
    )
    assert main(["route", str(path)]) == 2
    assert "chose a replica that it did not know" in capsys.readouterr().err
    assert main(["route", str(tmp_path / "nothing")]) == 2
    assert main(["route", str(folder), "--rows", "-1"]) == 2
