"""slow and cache against plain counts: every wait measured by hand, every prompt compared with every text before it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from log_drive import record, small_config, started

from vnext.replay.answers.cache import cache_use, ttls_of
from vnext.replay.answers.slow import slow
from vnext.replay.answers.stat import stat
from vnext.replay.cli.main import main
from vnext.replay.reading.folding import Folded, first_state, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import open_log
from vnext.runtime.record.recorder import Recorder
from vnext.sched.schedule import schedule
from vnext.state.digest import digest
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

MANY = 10**6


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> Path:
    """Few blocks: requests give way all the time, and wait for a token while they do."""
    return record(tmp_path_factory.mktemp("slow") / "log", config=small_config(page_count=15), seed=3, arrivals=80)


def reported(log_dir: Path) -> dict[int, list[int]]:
    """Steps that gave each request its tokens; in a log without times a committed step is a millisecond."""
    found = defaultdict(list)
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded) and isinstance(item.event, StepCommitted):
            for news in outputs(item.before, item.event, item.after):
                found[news.id].append(item.event.step)
    return found


def test_slow_has_every_first_token_and_every_wait(crowded):
    answer, steps = slow(Index(open_log(crowded)), MANY), reported(crowded)
    arrived = {
        item.event.id: (item.before.committed, item.before.planned)
        for item in fold(open_log(crowded))
        if isinstance(item, Folded) and isinstance(item.event, RequestArrived)
    }
    firsts = {(each.id, each.ms, each.step, each.arrived_step) for each in answer.firsts}
    assert firsts == {(id_, each[0] - arrived[id_][0], each[0], arrived[id_][1]) for id_, each in steps.items()}
    waits = [(step - last, id_, last, step) for id_, each in steps.items() for last, step in zip(each, each[1:])]
    longest = defaultdict(list)
    for ms, _, _, step in waits:
        longest[step].append(ms)
    assert {(each.step, each.ms, each.requests) for each in answer.gaps} == {
        (step, max(each), len(each)) for step, each in longest.items()
    }
    assert {(each.ms, each.id, each.last_step, each.step) for each in answer.gaps} <= set(waits)
    assert sum(each.preempted for each in answer.gaps) > 0 and answer.counts[:2] == (len(steps), len(waits))
    assert answer.counts[2] == len(answer.steps) and answer.clock == "steps" and answer.ended == "complete"
    for kind in (answer.firsts, answer.gaps, answer.steps):
        times = [each.ms for each in kind]
        assert times == sorted(times, reverse=True)
    top = slow(Index(open_log(crowded)), 3)
    assert (top.firsts, top.gaps, top.steps) == (answer.firsts[:3], answer.gaps[:3], answer.steps[:3])


def test_slow_begins_anywhere(tmp_path):
    """A log that lost its beginning, requests alive where it begins included."""
    log_dir = record(tmp_path / "log", config=small_config(page_count=15), seed=3, arrivals=80, size=2000, max_bytes=8000)
    answer, log = slow(Index(open_log(log_dir)), MANY), open_log(log_dir)
    alive = {id_ for id_, _ in first_state(log).requests.items()}
    assert log.header.index > 0 and alive and answer.ended == "complete" and answer.firsts
    assert alive & {each.id for each in answer.gaps} and not alive & {each.id for each in answer.firsts}


def common(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def by_hand(log_dir: Path) -> dict[str, int]:
    """Every prompt beside every text before it."""
    size = open_log(log_dir).header.started.config.block_size
    texts: list[tuple[int, str, list[int]]] = []
    known: dict[int, tuple[int, int, int]] = {}
    sums = dict(requests=0, asked=0, found=0, salted=0, absent=0, new=0)
    for item in fold(open_log(log_dir)):
        if not isinstance(item, Folded):
            continue
        event = item.event
        if isinstance(event, RequestArrived):
            prompt = unpack_tokens(event.prompt).tolist()
            most = (len(prompt) - 1) // size * size
            same, any_salt = (
                max(
                    (common(prompt, text) // size * size for _, salt, text in texts if salt == event.cache_salt or every),
                    default=0,
                )
                for every in (False, True)
            )
            known[event.id] = (most, min(same, most), min(any_salt, most))
            texts.append((event.id, event.cache_salt, prompt))
        elif isinstance(event, StepCommitted):
            for news in outputs(item.before, event, item.after):
                next(text for id_, _, text in texts if id_ == news.id).append(news.token)
        elif isinstance(event, StepPlanned) and event.admitted:
            scheduled = item.after.in_flight[-1]
            for id_, start in zip(scheduled.ids.tolist(), scheduled.starts.tolist()):
                if id_ in known and id_ not in item.before.rows.id.tolist():
                    most, same, any_salt = known.pop(id_)
                    sums["requests"] += 1
                    sums["asked"] += most
                    sums["found"] += start
                    sums["absent"] += max(same, start) - start
                    sums["salted"] += max(any_salt - max(same, start), 0)
                    sums["new"] += most - max(any_salt, same, start)
    return sums


def test_cache_tells_why_each_block_was_not_there(crowded):
    """The texts of requests that live are still growing by hand, and known here when they have ended: no more than that."""
    answer, wanted = cache_use(open_log(crowded), MANY), by_hand(crowded)
    assert (answer.requests, answer.asked, answer.found) == (wanted["requests"], wanted["asked"], wanted["found"])
    assert answer.found + answer.absent + answer.salted + answer.new == answer.asked
    assert answer.absent <= wanted["absent"] and answer.new >= wanted["new"]
    assert min(answer.found, answer.absent, answer.salted, answer.new) > 0
    assert sum(each.missed for each in answer.partings) == answer.salted + answer.new
    assert [each.missed for each in answer.partings] == sorted((each.missed for each in answer.partings), reverse=True)


def test_a_prompt_under_another_adapter_is_none_that_the_cache_lacked():
    """Two prompts, each with three adapters and none."""
    path = Path(__file__).parents[2] / "golden" / "logs" / "digest-2-adapters"
    answer = cache_use(open_log(path), MANY)
    assert (answer.found, answer.absent, answer.salted, answer.new) == (0, 0, 12, 4)
    assert [(each.token, each.like) for each in answer.partings] == [(0, -1)]


def test_cache_agrees_with_the_engine_and_with_a_log_of_shapes(tmp_path):
    config = small_config(page_count=400)
    full = record(tmp_path / "full", config=config, seed=5, arrivals=60)
    answer = cache_use(open_log(full), MANY)
    assert answer.found == stat(Index(open_log(full))).hit_tokens > 0
    shape = cache_use(open_log(record(tmp_path / "shape", "shape", config=config, seed=5, arrivals=60)), MANY)
    assert (shape.asked, shape.found, shape.absent) == (answer.asked, answer.found, answer.absent)
    assert shape.salted == 0 and shape.new == answer.salted + answer.new
    places = [[(each.token, each.requests, each.missed) for each in found.partings] for found in (answer, shape)]
    assert places[0] == places[1]


def test_both_as_json_and_bad_numbers(crowded, capsys):
    for command in ("slow", "cache"):
        assert main([command, str(crowded), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ended"] == "complete"
        assert main([command, str(crowded), "--top", "0"]) == 2
        assert "must lie between 1 and" in capsys.readouterr().err


def played(tmp_path: Path, *steps: tuple[int, list[int]]) -> Path:
    """A log of requests that come at these seconds and end at once, in a cache of eight blocks of four tokens."""
    config = small_config(page_count=8, max_num_batched_tokens=40, vocab_size=100)
    state, log_dir = start(started(config)), tmp_path / "log"
    recorder = Recorder.open(log_dir, started(config), "full")
    for seconds, prompt in steps:
        arrival = RequestArrived(
            id=state.next_id, name="r", prompt=pack_tokens(prompt), sampling=Sampling(seed=1, max_tokens=1), priority=0,
            arrival_ns=seconds * 10**9,
        )  # fmt: skip
        commit = StepCommitted(step=state.planned, tokens=pack_tokens([9]))
        for given in (arrival, None, commit):
            before, event = state, given or schedule(state)
            state = reduce(before, event)
            recorder.append([event], [before], digest(state), [])
    recorder.close()
    return log_dir


def test_a_retention_pays_where_a_prompt_comes_back_in_time(tmp_path):
    prompt, other = list(range(1, 14)), [50] * 29
    log_dir = played(tmp_path, (0, prompt), (10, other), (100, prompt), (110, other), (1110, prompt))
    answer = cache_use(open_log(log_dir), MANY, ttls_of("5m,1h,30s"))
    saved = {each.ttl_s: each.saved for each in answer.retentions}
    assert saved == {30: 0, 300: 12 + 12, 3600: 24 + 12}
    held = {each.ttl_s: (each.block_seconds, each.blocks_max) for each in answer.retentions}
    assert held == {30: (600.0, 10), 300: (4000.0, 10), 3600: (3 * 1110 + 7 * 1100, 10)}


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "0s", "5m;1h", "1h,,5m", ",".join(["1s"] * 17)])
def test_times_that_are_none_are_refused(crowded, capsys, text):
    assert main(["cache", str(crowded), f"--ttl={text}"]) == (0 if text == "" else 2)
    assert text == "" or "write up to 16 times such as" in capsys.readouterr().err
