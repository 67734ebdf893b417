"""clients against plain counts, event by event; parts of a log by the clock."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from log_drive import record, small_config

from scripts.make_log import make_log
from vnext.log.timestamps import Timestamps
from vnext.replay.answers.clients import Client, ClientsOfLog, _Counting, clients, print_clients
from vnext.replay.answers.cost import cost
from vnext.replay.answers.slow import slow
from vnext.replay.answers.stat import stat
from vnext.replay.cli.main import main
from vnext.replay.console.commands import terminal
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.index import Index
from vnext.replay.reading.objective import objective_of
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.replay.reading.window import ALWAYS, Window, step_at, time_of, window_of
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned
from vnext.state.outputs import outputs

CROWDED = small_config(page_count=15)


@pytest.fixture(scope="module", params=[(60, False), (30, True)], ids=["steps", "times"])
def log_dir(request, tmp_path_factory) -> Path:
    arrivals, timestamped = request.param
    folder = tmp_path_factory.mktemp("clients") / "log"
    return record(folder, config=CROWDED, seed=3, arrivals=arrivals, timestamped=timestamped)


def counted(log_dir: Path, has=lambda us: True) -> tuple[dict[str, Counter], dict[str, Counter]]:
    """Each figure by client, from all events one by one; the tokens computed for each request by client."""
    log, by = open_log(log_dir), defaultdict(Counter)
    clock, of, planned, last, computed = Clock(timestamps_of(log), absolute=True), {}, {}, None, defaultdict(Counter)
    if not clock.timestamped:
        last = 0.0
    for item in fold(log):
        if not isinstance(item, Folded):
            continue
        us = clock.known_us(item.frame_end, item.before.committed)
        if isinstance(item.event, RequestArrived):
            of[item.event.id] = item.event.client
            by["requests"][item.event.client] += has(us)
        elif isinstance(item.event, StepPlanned):
            planned[item.event.step] = us
        elif isinstance(item.event, StepCommitted):
            step = item.before.in_flight[0]
            starts = [each for each in (planned.pop(step.step, None), last) if each is not None]
            last = us
            if not has(us):
                continue
            lasted = (us - max(starts)) / 1e3 if starts and us is not None else 0.0
            for news in outputs(item.before, item.event, item.after):
                by["sampled_tokens"][of[news.id]] += 1
            queued = Counter(of[each.id] for each in item.before.waiting)
            for client, count in queued.items():
                by["waited_ms"][client] += lasted * count
            parts = Counter()
            for id_, count in zip(step.ids.tolist(), step.counts.tolist()):
                computed[of[id_]][id_] += count
                by["computed_tokens"][of[id_]] += count
                parts[of[id_]] += count
                by["held_ms"][of[id_]] += lasted * count / step.tokens * (sum(queued.values()) - queued[of[id_]])
            for client, microseconds in split(round(lasted * 1e3), parts).items():
                by["step_ms"][client] += microseconds / 1e3
    return by, computed


def split(whole: int, parts: Counter) -> Counter:
    """Whole numbers in proportion to the parts, which add up to the whole."""
    ends = [whole * end // (parts.total() or 1) for end in accumulate(parts.values(), initial=0)]
    return Counter({name: end - begin for name, (begin, end) in zip(parts, pairwise(ends))})


def number_of(each: Client) -> int:
    return int(each.client or "0", 16)


def require_plain_figures(log_dir: Path) -> None:
    answer, (by, computed) = clients(open_log(log_dir)), counted(log_dir)
    for each in answer.clients:
        for name, values in by.items():
            assert getattr(each, name) == pytest.approx(values[number_of(each)]), name
        assert computed[number_of(each)][each.largest] == max(computed[number_of(each)].values())
    assert sum(each.share for each in answer.clients) == pytest.approx(1)
    assert sum(each.step_ms for each in answer.clients) == pytest.approx(answer.step_ms)


def test_every_figure_is_that_of_all_events(log_dir):
    require_plain_figures(log_dir)
    assert {number_of(each) for each in clients(open_log(log_dir)).clients} == {0, 1, 2}


def test_runs_of_steady_frames_count_as_their_events_do(tmp_path, monkeypatch):
    make_log(tmp_path / "log", 900, 4)
    runs: list[int] = []
    meet = _Counting.meet_run
    monkeypatch.setattr(_Counting, "meet_run", lambda self, run: (runs.append(run.frames), meet(self, run))[1])
    require_plain_figures(tmp_path / "log")
    assert sum(runs) > 100


def test_a_part_of_a_log_has_the_steps_that_ended_in_it(tmp_path):
    log_dir = record(tmp_path / "log", config=CROWDED, seed=3, arrivals=30, timestamped=True)
    timestamps = timestamps_of(open_log(log_dir))
    middle_s = (timestamps.times_ns[len(timestamps.times_ns) // 2] - timestamps.times_ns[0]) / 1e9
    window = window_of(timestamps, "", f"+{middle_s}")
    answer, (by, _) = clients(open_log(log_dir), window), counted(log_dir, window.has)
    for each in answer.clients:
        assert each.computed_tokens == by["computed_tokens"][number_of(each)]
    late = clients(open_log(log_dir), window_of(timestamps, f"+{middle_s}", ""))
    whole = clients(open_log(log_dir))
    assert answer.step_ms + late.step_ms == pytest.approx(whole.step_ms)
    assert 0 < sum(each.sampled_tokens for each in late.clients) < sum(each.sampled_tokens for each in whole.clients)


def test_times_as_people_say_them():
    begun_ns, wall_ns = 5_000_000_000, 1_795_874_585_000_000_000  # 2026-11-28T14:03:05Z
    timestamps = Timestamps(np.array([1]), np.array([begun_ns]), wall_ns - begun_ns, {})
    for text, seconds in (
        ("+12.5", 12.5), ("14:03:05", 0), ("14:04", 55), ("2026-11-28T14:03:06.5", 1.5), ("2026-11-28 14:03:06Z", 1),
        ("14:02:30", -35), ("0:03", 10 * 3600 - 5), ("2026-11-27T14:03:05", -86400),
    ):  # fmt: skip
        assert time_of(timestamps, text) == pytest.approx(5e6 + seconds * 1e6), text
    for wrong in ("noon", "25:00", "14:3:99", "+a", "2026-13-01T00:00"):
        with pytest.raises(UnusableLog, match="is no time: write 14:03"):
            time_of(timestamps, wrong)
    with pytest.raises(UnusableLog, match="the log has no times"):
        time_of(None, "14:03")
    with pytest.raises(UnusableLog, match="--from 15:00 is not before --to 14:30"):
        window_of(timestamps, "15:00", "14:30")
    assert window_of(timestamps, "", "") == ALWAYS


def test_a_step_is_found_by_its_number_and_by_its_time(tmp_path, capsys):
    log_dir = record(tmp_path / "log", config=CROWDED, seed=3, arrivals=30, timestamped=True)
    log = open_log(log_dir)
    index, timestamps, clock = Index(log), timestamps_of(log), Clock(timestamps_of(log))
    folded = [item for item in fold(log) if isinstance(item, Folded) and isinstance(item.event, StepPlanned)]
    planned = [(item.event.step, clock.known_us(item.frame_end, 0)) for item in folded]
    for step, us in planned[:: len(planned) // 5]:
        at_once = max(other for other, at_us in planned if at_us == us)
        assert step_at(index, f"+{us / 1e6 + 1e-7:.7f}") == at_once and step_at(index, str(step)) == step
    with pytest.raises(UnusableLog, match="is before the log's first time"):
        step_at(index, "2020-01-01T00:00")
    wall = datetime.fromtimestamp((timestamps.times_ns[-1] + timestamps.wall_minus_monotonic_ns) / 1e9 + 60, UTC)
    assert main(["show", str(log_dir), f"{wall:%Y-%m-%dT%H:%M}"]) == 0
    assert f"step {planned[-1][0]}" in capsys.readouterr().out
    assert main(["show", str(log_dir), "soon"]) == 2 and "soon is no time" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["request", "tenant", "priority", "model"])
def test_other_groups_add_up_to_the_same(log_dir, by):
    one, other = clients(open_log(log_dir)), clients(open_log(log_dir), by=by)
    assert other.step_ms == one.step_ms and round(sum(each.step_ms for each in other.clients) * 1e3) == round(one.step_ms * 1e3)
    for name in ("requests", "computed_tokens", "sampled_tokens"):
        assert sum(getattr(each, name) for each in other.clients) == sum(getattr(each, name) for each in one.clients)


def test_costs_add_up_exactly_and_become_money(log_dir, capsys):
    answer = cost(open_log(log_dir), per_hour=3.6, watts=100.0)
    assert sum(round(each.step_ms * 1e3) for each in answer.requests) == round(answer.step_ms * 1e3) > 0
    assert sum(each.price for each in answer.requests) == pytest.approx(answer.price) == pytest.approx(answer.step_ms / 1e6)
    assert answer.joules == pytest.approx(answer.step_ms / 10)
    assert main(["cost", str(log_dir), "--per-hour", "2", "--top", "3"]) == 0
    assert "requests: 3" in capsys.readouterr().out
    assert main(["cost", str(log_dir), "--watts", "-1"]) == 2 and "--watts -1.0: it must be" in capsys.readouterr().err


def test_the_share_of_requests_that_met_an_objective(log_dir):
    met = {
        text: clients(open_log(log_dir), by="priority", objective=objective_of(text)).clients[0].met
        for text in ("ttft=1us", "ttft=1000s", "ttft=1000s,itl=1us")
    }
    assert met["ttft=1000s"] == 1.0 > met["ttft=1us"] and met["ttft=1000s,itl=1us"] < 1.0
    assert clients(open_log(log_dir)).clients[0].met is None


def test_parts_of_a_log_add_up_to_its_steps_and_latencies(tmp_path):
    """Split at any frame: steps, and waits for tokens but for those across the border."""
    index = Index(open_log(record(tmp_path / "log", config=CROWDED, seed=3, arrivals=30, timestamped=True)))
    timestamps, whole = timestamps_of(index.log), stat(index)
    for frame in (len(timestamps.times_ns) // 3, len(timestamps.times_ns) // 2):
        us = int(timestamps.times_ns[frame]) / 1e3
        parts = Window(-np.inf, us), Window(us, np.inf)
        assert sum(stat(index, part).steps for part in parts) == whole.steps
        assert sum(stat(index, part).sampled_tokens for part in parts) == whole.sampled_tokens
        found = [slow(index, 1000, part) for part in parts]
        assert [sum(counts) for counts in zip(*(each.counts for each in found))] == list(slow(index, 1000).counts)
    with pytest.raises(UnusableLog, match="nothing was recorded between these times"):
        slow(index, 1, Window(us + 1e12, np.inf))


def test_the_command_shows_the_first_clients(log_dir, capsys):
    assert main(["clients", str(log_dir), "--top", "2"]) == 0
    assert "clients: 2" in capsys.readouterr().out
    assert main(["clients", str(log_dir), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["clients"]) == 3


@pytest.mark.parametrize(("share", "held_ms", "is_named"), [(0.8, 900.0, True), (0.3, 900.0, False), (0.8, 0.0, False)])
def test_one_client_is_named_that_took_more_than_its_share(capsys, share, held_ms, is_named):
    """A client that held others up with less than an even share is no culprit."""
    fields = dict(requests=3, prompt_tokens=9, computed_tokens=9, sampled_tokens=9, step_ms=9.0, first_ms=(None, None), largest=7)
    found = [
        Client(client="00000000000000ff", share=share, held_ms=held_ms, waited_ms=0.0, **fields),
        Client(client="", share=1 - share, held_ms=0.0, waited_ms=1800.0, **fields),
    ]
    print_clients(terminal(), ClientsOfLog(clients=found, step_ms=9.0, clock="stamps", ended="complete"))
    words = "client 00000000 held others up most: 80% of the steps' time, 50% of all waiting; its largest request is 7"
    assert (words in " ".join(capsys.readouterr().out.split())) == is_named
