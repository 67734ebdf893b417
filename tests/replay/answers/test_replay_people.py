"""vnext-replay for people: info, show and req say what happened, and drawing together loses nothing."""

from __future__ import annotations

import json

from log_drive import record, small_config

from vnext.replay.answers.render_request_life import spans
from vnext.replay.answers.request_life import life
from vnext.replay.cli.main import main
from vnext.replay.console.render import printable, ranges
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.state.digest import digest
from vnext.state.events import RequestAborted, RequestArrived, StepPlanned
from vnext.state.outputs import outputs


def answer(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_show_gives_the_state_in_which_a_step_ran(tmp_path, capsys):
    log_dir = record(tmp_path / "log")
    states = [item for item in fold(open_log(log_dir)) if isinstance(item, Folded)]
    at = next(item for item in states if isinstance(item.event, StepPlanned) and item.event.step == 17)
    code, found = answer(capsys, "show", log_dir, 17)
    assert code == 0 and found["digest"] == f"{digest(at.after):016x}" and found["event"] == at.number
    assert found["state"]["planned"] == 18 and len(found["state"]["running"]) == len(at.after.rows)
    code, found = answer(capsys, "show", log_dir)
    assert code == 0 and found["plan"] is None and found["digest"] == f"{digest(states[-1].after):016x}"


def test_a_life_accounts_for_every_token_and_step(tmp_path):
    log = open_log(record(tmp_path / "log", config=small_config(page_count=18), arrivals=50))
    reported: dict[int, list] = {}
    preempted: dict[int, int] = {}
    for item in fold(log):
        if isinstance(item, Folded):
            for output in outputs(item.before, item.event, item.after):
                reported.setdefault(output.id, []).append(output)
            if isinstance(item.event, StepPlanned):
                for row in item.event.preempted:
                    request_id = int(item.before.rows.id[row])
                    preempted[request_id] = preempted.get(request_id, 0) + 1
    assert preempted
    whys: set[str] = set()
    for request_id, news in reported.items():
        found = life(Index(log), request_id)
        assert found.generated_tokens == sum(output.token >= 0 for output in news)
        assert found.finish.split(" ")[0] == news[-1].finish and found.moments[0].kind == "arrived"
        assert found.preemptions == preempted.get(request_id, 0) and found.moments[-1].kind == "ended"
        admitted = [moment for moment in found.moments if moment.kind == "admitted"]
        computed = sum(moment.tokens for moment in found.moments if moment.kind == "computed")
        assert len(admitted) in (found.preemptions, found.preemptions + 1)
        if not found.finish.startswith("abort"):
            cached = sum(moment.tokens for moment in admitted)
            assert computed + cached >= found.prompt_tokens + found.generated_tokens - 1
        assert found.queued_steps <= found.waited_steps
        assert sum(each.last_step - each.first_step + 1 for each in found.waits) == found.waited_steps
        assert all(each.why != "unknown" for each in found.waits)
        whys |= {each.why for each in found.waits}
    assert whys >= {"order", "blocks", "preempted", "room"}


def test_every_command_speaks_to_people(tmp_path, capsys):
    log_dir = str(record(tmp_path / "log", "shape"))
    cases = (
        (["info", log_dir], ("privacy", "24 blocks of 4 tokens", "every record is whole")),
        (["verify", log_dir], ("decided again", "the log replays exactly")),
        (["show", log_dir, "5"], ("running: ", "step 5")),
        (["show", log_dir], ("end of the log", "running: none")),
        (["state", log_dir, "5"], ("running: ", "step 5")),
        (["stat", log_dir], ("steps", "per step", "tokens computed", "prefix cache")),
        (["diff", log_dir, log_dir], ("equal: 1 segment", "the logs have the same events")),
        (["ranks", log_dir], ("rank 1", "all ranks agree")),
        (["cut", log_dir, "3", "9", "-o", f"{tmp_path}/cut"], ("3 to 8", "every decision is as it was")),
        (["convert", log_dir, "--to", "jsonl", "-o", f"{tmp_path}/jsonl"], ("40 requests from log to jsonl",)),
        (["req", log_dir, "1"], ("arrives", "is admitted", "computes", "samples", "ends: ", "pseudonyms")),
    )
    for arguments, words in cases:
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words), shown


def test_a_life_is_drawn_together_without_losing_a_moment(tmp_path):
    log = open_log(record(tmp_path / "log", config=small_config(page_count=18), arrivals=50))
    drawn = 0
    for request_id in range(50):
        found = life(Index(log), request_id)
        parts = spans(found.moments)
        assert sorted(moment.event for span in parts for moment in span.moments) == [m.event for m in found.moments]
        for span in parts:
            steps = [moment.step for moment in span.moments]
            assert steps == list(range(steps[0], steps[0] + len(steps))) and len({m.kind for m in span.moments}) == 1
            drawn += len(steps) - 1
    assert drawn > 100


def test_runs_of_blocks_are_drawn_together():
    assert ranges([3, 4, 5, 9, 8, 1, 2]) == "3-5 9 8 1-2" and ranges([]) == ""


def test_a_clients_name_cannot_reach_the_terminal():
    assert printable("a\x1b[31m[red]b\n") == "a?[31m[red]b?"


def test_aborts_are_told(tmp_path):
    log = open_log(record(tmp_path / "log", seed=2, arrivals=60))
    aborted = [item for item in fold(log) if isinstance(item, Folded) and isinstance(item.event, RequestAborted)]
    true = next(item for item in aborted if item.event.ids[0] in item.before.requests)
    assert life(Index(log), true.event.ids[0]).finish == "abort (client)"


def test_info_counts_what_the_engine_did(tmp_path, capsys):
    log_dir = record(tmp_path / "log", size=2000)
    state, arrived = None, 0
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded):
            state, arrived = item.after, arrived + isinstance(item.event, RequestArrived)
    code, found = answer(capsys, "info", log_dir)
    assert code == 0 and found["requests"] == arrived == 40 and found["steps"] == state.planned
    assert found["preemptions"] == state.counters.preempted and found["segments"] == len(list(log_dir.iterdir()))
    assert found["size_bytes"] == sum(path.stat().st_size for path in log_dir.iterdir())
    assert found["schema_is_ours"] and found["end"]["kind"] == "complete"
