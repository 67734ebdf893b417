"""explain against incidents made on purpose (incidents.py): the true cause first, in ten lines, with what would have helped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import incidents
import kept_incidents
import more_incidents
import msgspec
import pytest
from log_drive import record

from vnext.replay.causes import part
from vnext.replay.causes.charging import charges
from vnext.replay.causes.explain import HEADLINES, Asked, explained, explained_by, failure
from vnext.replay.causes.ledger import ledger, reason_word
from vnext.replay.cli.main import main
from vnext.replay.console.ended import COMPLETE, Ended
from vnext.replay.reading.folding import FrameFolded, fold
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.window import ALWAYS
from vnext.sched.admission import Why
from vnext.state.events import EngineRecovered
from vnext.state.state import State


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("incident")
    incidents.record(folder, "noisy")
    return folder / "noisy"


@pytest.mark.parametrize("name", incidents.INCIDENTS)
def test_the_true_cause_is_first(tmp_path, name) -> None:
    incident = incidents.record(tmp_path, name)
    assert first_cause(tmp_path / name) == incident.cause


@pytest.mark.parametrize("name", more_incidents.MORE)
def test_the_true_cause_is_first_of_later_kinds_too(tmp_path, name) -> None:
    """Made after the rules of `explain`; a recovery of the engine core alone needed another rule."""
    incident = incidents.record(tmp_path, name, more_incidents.MORE[name]())
    assert first_cause(tmp_path / name) == incident.cause


@pytest.mark.parametrize("name", kept_incidents.KEPT)
def test_the_true_cause_of_kinds_that_the_rules_were_not_made_with_is_first(tmp_path, name) -> None:
    incident = incidents.record(tmp_path, name, kept_incidents.KEPT[name]())
    assert first_cause(tmp_path / name) == incident.cause


def test_there_are_incidents_of_most_causes() -> None:
    causes = {make().cause for make in incidents.INCIDENTS.values()}
    assert len(incidents.INCIDENTS) >= 30 and causes <= {*HEADLINES, "none"} and len(causes) >= 21


def test_there_is_a_sentence_for_each_reason_of_the_scheduler() -> None:
    assert {reason_word(why) for why in get_args(Why)} <= {*HEADLINES}


def first_cause(log_dir: Path) -> str:
    found = charges(ledger(open_log(log_dir)))
    top = found.found[0] if found.found else None
    return top.cause if top is not None and top.ms >= 0.1 * found.lived_ms else "none"


ASKED = ({}, {"at": "14:13"}, {"at": "14:13:24"}, {"request": "101"}, {"request": "cmpl-101"}, {"client": "2c41"})


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_whatever_is_asked_about_the_client_is_named_and_what_would_have_helped(noisy, asked) -> None:
    answer = explained(noisy, Asked(**asked))
    assert answer.causes[0].cause == "client" and "client 7b96e314" in answer.headline
    assert answer.helps.what == "--scheduling-policy fair" and answer.helps.then.first_99 < answer.helps.now.first_99 / 5


def test_it_takes_ten_lines_at_most(noisy, capsys) -> None:
    assert main(["explain", str(noisy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10 and lines[0].startswith("client 7b96e314")
    assert main(["explain", str(noisy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"][0]["cause"] == "client"


@pytest.mark.parametrize(
    ("name", "what"), [
        ("paused", "without the pause"), ("few_sequences", "--max-num-seqs"), ("device_stall", "without the stall"),
        ("holder", "--num-blocks-override"), ("cache_off", "--enable-prefix-caching"),
    ]
)  # fmt: skip
def test_what_the_trouble_has_cost(tmp_path, name, what) -> None:
    incidents.record(tmp_path, name, (incidents.INCIDENTS | more_incidents.MORE)[name]())
    found = explained(tmp_path / name).helps
    assert found.what.startswith(what) and found.then.first_99 < found.now.first_99 / 5


@pytest.mark.parametrize("asked", ({"at": "14:13:24"}, {"request": "cmpl-101"}), ids=str)
def test_of_a_longer_log_only_the_part_that_is_asked_about_is_read(noisy, asked, monkeypatch) -> None:
    monkeypatch.setattr(part, "BEFORE", 40)
    monkeypatch.setattr(part, "AFTER", 20)
    with part.part_of(noisy, Asked(**asked)) as (log, _, _):
        read, whole = (len(ledger(each).entries) for each in (log, open_log(noisy)))
    answer = explained(noisy, Asked(**asked))
    assert read < 0.8 * whole and "client 7b96e314" in answer.headline and str(noisy) in answer.commands[0]
    assert answer.helps.what == "--scheduling-policy fair" and answer.helps.then.first_99 < answer.helps.now.first_99


def test_a_request_that_did_not_wait_and_clients_that_are_not_there(noisy) -> None:
    assert explained(noisy, Asked(request="3")).headline.startswith("nothing stands out")
    with pytest.raises(UnusableLog, match="--client zz: 0 clients"):
        explained(noisy, Asked(client="zz"))


@pytest.mark.parametrize("timestamped", [False, True])
def test_any_log_has_an_answer(tmp_path, timestamped) -> None:
    """Of few steps, without times, with recoveries and other weights."""
    record(tmp_path / "log", seed=5, arrivals=40, timestamped=timestamped, recovering=0.02, changing=0.02)
    answer = explained(tmp_path / "log")
    assert answer.ended == "complete" and answer.clock == ("stamps" if timestamped else "steps") and answer.headline
    assert timestamped or not {"stall", "slow"} & {each.cause for each in answer.causes}, "a log without times cannot be slow"


def test_slow_steps_are_counted_and_the_worst_is_named(tmp_path) -> None:
    incidents.record(tmp_path, "slow_stretch")
    answer = explained(tmp_path / "slow_stretch")
    assert answer.headline == "steps took 3.3 times as long as usual for their size: the device was busy with it"
    assert answer.evidence[0].startswith("31 of 715 steps were slow")
    worst = int(answer.evidence[0].split("step ")[-1].split()[0])
    assert answer.commands[-1].endswith(f" {worst}") and 260 < worst < 310


# ---- what ends a log before its time -------------------------------------------------------------------------------


class Recovering(incidents.story_logs.Run):
    """Other ranks take the place of those of which one has drifted."""

    def _commit(self) -> None:
        super()._commit()
        if self._drifted:
            self._fold(EngineRecovered(cause="rank 2 has drifted"))
            self._busy_us.clear()
            self._drifted, self._details = False, {}

    def _report(self, step: int) -> None:
        if not self._details:
            super()._report(step)


@pytest.fixture(scope="module")
def drifted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drifted") / "log"
    incidents.story_logs.Run(folder, incidents.story_logs.drift()).run()
    return folder


def damaged(log: Path, out: Path, at: int) -> Path:
    """A copy with a bit flipped at this byte of its last segment, counted from its end if it is negative."""
    shutil.copytree(log, out)
    path = sorted(out.glob("*.vnextlog"))[-1]
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return out


def test_the_drift_that_ended_an_engine_is_first(drifted, capsys) -> None:
    assert main(["explain", str(drifted)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 2 had drifted by step 192: its state or its tokens were others, and the engine ended with it"
    assert lines[1].startswith("  seen     11 requests had no whole answer yet at 14:13:21 UTC") and "vnext-replay ranks" in lines[2]
    answer = explained(drifted)
    assert [each.cause for each in answer.causes] == ["drift"] and answer.causes[0].first_step == 192
    assert explained(drifted, Asked(request="25")).headline == lines[0], "whose answer it took"
    assert explained(drifted, Asked(request="1")).headline.startswith("nothing stands out"), "it had ended before"


def test_what_made_requests_slow_before_is_second(tmp_path) -> None:
    story = msgspec.structs.replace(incidents.story_logs.noisy(), ranks=4, wrong=(2, 500))
    incidents.story_logs.Run(tmp_path / "log", story).run()
    answer = explained(tmp_path / "log")
    assert [each.cause for each in answer.causes][:2] == ["drift", "client"] and answer.helps is not None
    assert answer.causes[0].lost_ms == 0 < answer.causes[1].lost_ms


def test_a_drift_that_the_engine_survived_is_a_loss_of_ranks(tmp_path) -> None:
    Recovering(tmp_path / "log", incidents.story_logs.drift()).run()
    found = ledger(open_log(tmp_path / "log"))
    assert found.drift is None and "rank 2 has drifted" in found.loud[0][2]
    assert "drift" not in {each.cause for each in explained(tmp_path / "log").causes}


@pytest.mark.parametrize(("kwargs", "words"), [
    ({"requests": (3, 9)}, "it had other tokens for request 3, 9"), ({"fed": ("positions",)}, "it gave the model other inputs (positions)"),
])  # fmt: skip
def test_what_a_rank_had_otherwise_is_said(drifted, kwargs, words) -> None:
    log = open_log(drifted)
    written = ledger(log)
    us, report = written.drift
    written = msgspec.structs.replace(written, drift=(us, msgspec.structs.replace(report, **kwargs)))
    failed = failure(written, COMPLETE, Asked(), lambda _: True, ALWAYS)
    assert words in explained_by(written, drifted, log, ALWAYS, failed).headline


def test_damage_is_first_and_what_is_before_it_second(noisy, tmp_path, capsys) -> None:
    log = damaged(noisy, tmp_path / "log", -20_000)
    assert main(["explain", str(log)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the log is damaged behind step ") and lines[-1].startswith("ended: damaged at frame ")
    assert len(lines) <= 10
    step = int(lines[0].split("step ")[1].split(":")[0])
    answer = explained(log)
    assert [each.cause for each in answer.causes][:2] == ["damage", "client"] and answer.causes[0].last_step == step
    assert step == open_state(log).committed - 1, "the last one that ended"
    assert explained(log, Asked(request="1")).headline.startswith("nothing stands out"), "it had ended before"
    assert explained(log, Asked(at="+0.1")).headline.startswith("client 7b96e314"), "a time before"


def test_damage_at_the_begin_and_a_full_disk(noisy, tmp_path) -> None:
    answer = explained(damaged(noisy, tmp_path / "log", 600))
    assert answer.headline.startswith("the log is damaged behind step 0") and answer.causes[0].cause == "damage"
    answer = explained(noisy, end=Ended(kind="lost", line="frames lost: 3 before frame 7, event 9: they could not be written"))
    assert answer.headline.startswith("the disk had no room") and answer.causes[0].cause == "lost"
    assert explained(noisy, end=Ended(kind="killed", line="killed")).causes[0].cause == "client", "a kill lost nothing"


def open_state(log: Path) -> State:
    """The last state of a log."""
    return [item.state for item in fold(open_log(log)) if isinstance(item, FrameFolded)][-1]
