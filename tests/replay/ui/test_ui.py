"""The scrubber's answers: the same as the other commands', in any order of questions; hostile ones get a sentence."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from urllib.parse import urlencode

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from log_drive import record, small_config
from yarl import URL

from tests.replay.log_answers import answer
from vnext.replay import Log
from vnext.replay.answers.render_request_life import spans
from vnext.replay.answers.request_life import life
from vnext.replay.answers.slow import slow
from vnext.replay.reading.cachefile import Directory
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.index import Index, Segment
from vnext.replay.reading.show import show
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.ui import opened as asked_logs, walk as walking
from vnext.replay.ui.app import FREE, HELD, KEPT, SHARED, Opened, explained, lanes, make_app, page_files, step_view
from vnext.replay.ui.overview import COLUMNS, Overview
from vnext.replay.ui.walk import Walk
from vnext.server.http.static_files import HEADERS, TYPES, new_token
from vnext.state.events import StepPlanned
from vnext.state.store.versions import Version

ROOT = Path(__file__).parents[3]
CONFIG = small_config(page_count=14)
TOKEN = "its-token"


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("ui") / "log", config=CONFIG, seed=3, arrivals=60, size=4000)


@pytest.fixture(scope="module")
def walk(log_dir) -> Walk:
    return Walk(Index(open_log(log_dir)))


def test_steps_are_those_of_show_in_any_order(log_dir, walk, monkeypatch):
    """Back and forth, further than what is kept: every moment is the one that `show` gives."""
    monkeypatch.setattr(walking, "KEPT", 5)
    rng, index = random.Random(2), Index(open_log(log_dir))
    steps = list(range(walk.first_step, walk.last_step + 1))
    assert len(steps) > 60
    visits = [*steps[:20], *reversed(steps[:20]), *rng.choices(steps, k=60), *steps[-3:]]
    for step in visits:
        found, shown = step_view(walk.moment(step)), show(index, step)
        assert (found["step"], found["event"], found["digest"]) == (step, shown.event, shown.digest)
        assert [row["id"] for row in found["rows"]] == [row["id"] for row in shown.state["running"]]
        assert [row["known"] for row in found["rows"]] == [row["known"] for row in shown.state["running"]]
        assert [entry["id"] for entry in found["queue"]] == [entry["id"] for entry in shown.state["waiting"]]


def test_events_between_steps_are_told_once(walk):
    found = [event for moment in walk.moments(1, walk.last_step) for event, _ in moment.since]
    plans = [moment.event for moment in walk.moments(1, walk.last_step)]
    first = walk.moment(0).event
    assert sorted(found + plans) == list(range(first + 1, plans[-1] + 1))


def test_stepping_on_holds_no_more_than_what_is_kept(log_dir, monkeypatch):
    """An old state that somebody holds keeps all that was folded since."""
    monkeypatch.setattr(walking, "KEPT", 4)
    walk = Walk(Index(open_log(log_dir)))

    def versions_after(step: int) -> int:
        walk.moments(0, step)
        gc.collect()
        return sum(isinstance(each, Version) for each in gc.get_objects())

    soon, later = versions_after(20), versions_after(walk.last_step)
    assert walk.last_step > 60 and later <= soon + 8


def test_the_block_map_counts_every_block(walk):
    for moment in walk.moments(0, walk.last_step)[::7]:
        pool, found = moment.after.pool, step_view(moment)["blocks"]
        kinds = np.frombuffer(base64.b64decode(found["kinds"]), dtype=np.uint8)
        owners = np.frombuffer(base64.b64decode(found["owners"]), dtype="<i4")
        assert len(kinds) == len(owners) == found["count"] == CONFIG.page_count
        assert (kinds == FREE).sum() + (kinds == KEPT).sum() == pool.free and (kinds == KEPT).sum() == pool.kept
        assert ((kinds == SHARED) == (pool.ref > 1)).all() and ((kinds >= HELD) == (owners >= 0)).all()


def test_lanes_have_each_request_in_each_step(walk):
    moments = walk.moments(0, walk.last_step)
    found = {
        (lane["id"], step): (kind, why)
        for lane in lanes(moments, {})
        for first, last, kind, why in lane["runs"]
        for step in range(first, last + 1)
    }
    wanted = {}
    for moment in moments:
        wanted |= {(id_, moment.step): None for id_ in moment.after.in_flight[-1].ids.tolist()}
        wanted |= {(wait.id, moment.step): wait.why for wait in explained(moment).waits}
    assert found.keys() == wanted.keys()
    assert all((why and why["why"]) == wanted[place] for place, (_, why) in found.items())
    assert {kind for kind, _ in found.values()} == {"prompt", "answer", "wait"}


def counted(log_dir: Path) -> np.ndarray:
    """The overview by hand: int32[len(COLUMNS), steps]."""
    columns, ended = [], 0
    for item in fold(open_log(log_dir)):
        if isinstance(item, Folded) and isinstance(item.event, StepPlanned):
            state, plan = item.after, item.event
            now = state.counters.finished + state.counters.aborted
            columns.append([
                int(state.in_flight[-1].counts.sum()), len(state.rows), len(state.waiting), int((state.pool.ref > 0).sum()),
                state.pool.kept, len(plan.admitted), len(plan.preempted), now - ended,
            ])  # fmt: skip
            ended = now
    return np.array(columns, dtype=np.int32).T


def made(log_dir: Path) -> Overview:
    log = open_log(log_dir)
    return Overview(log, Index(log).first)


def test_the_overview_counts_every_step_and_is_read_again_from_its_cache(log_dir):
    wanted, fresh = counted(log_dir), made(log_dir)
    fresh.make()
    everything = fresh.points(0, wanted.shape[1], 10**6)
    assert [everything[name] for name in COLUMNS] == wanted.tolist() and everything["each"] == 1 and fresh.done
    again = made(log_dir)
    again.start()
    assert again.done and again.points(0, wanted.shape[1], 10**6) == everything
    thirds = again.points(0, wanted.shape[1], 3)
    assert len(thirds["tokens"]) == 3 and max(thirds["running"]) == wanted[1].max()
    assert sum(thirds["admitted"]) == wanted[5].sum() and again.peaks()["held"] == wanted[3].max()
    path = next(log_dir.glob("*.vnextsteps"))
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-1], b"x" * len(whole), whole + b"x"):
        path.write_bytes(damaged)
        assert not made(log_dir)._load()
    path.write_bytes(whole)


def test_a_log_that_lost_its_beginning_counts_from_where_it_begins(tmp_path):
    log_dir = record(tmp_path / "log", config=CONFIG, seed=3, arrivals=60, size=2000, max_bytes=6000)
    overview, log = made(log_dir), open_log(log_dir)
    overview.make()
    first, last = Index(log).first, Index(log).at_end().state
    assert first.planned > 0 and overview.first_step == first.planned
    ended = [state.counters.finished + state.counters.aborted for state in (first, last)]
    assert ended[0] > 0 and 0 < sum(overview.points(0, last.planned, 10**6)["ended"]) <= ended[1] - ended[0]


def test_steps_have_their_times_where_the_log_has_them(tmp_path, log_dir):
    timed = record(tmp_path / "log", config=CONFIG, seed=3, arrivals=60, timestamped=True)
    fresh, tables = made(timed), Log(timed)
    fresh.make()
    found, again = fresh.points(0, 10**6, 10**6), made(timed)
    again.start()
    assert again.points(0, 10**6, 10**6) == found and again.peaks()["took"] == max(found["took"])
    worst = slow(Index(open_log(timed)), 1000).steps
    assert len(worst) == len(tables.steps["step"])
    assert all(found["took"][each.step] == pytest.approx(1e3 * each.ms, abs=1) for each in worst)
    assert np.diff(found["at"]).min() >= 0 and len(found["at"]) == found["steps"]
    late = tables.steps["ended"] - np.array(found["at"])[tables.steps["step"]]
    assert (late >= 0).all() and late.max() <= max(found["took"]) * 3e-6
    untimed = made(log_dir)
    untimed.make()
    assert "at" not in untimed.points(0, 10**6, 10**6) and untimed.peaks()["took"] == 0


@pytest.fixture(scope="module")
def timed(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("timed") / "log", config=CONFIG, seed=3, arrivals=60, timestamped=True)


def test_each_step_has_the_longest_waits_for_the_tokens_it_gave(timed):
    overview, worst = made(timed), slow(Index(open_log(timed)), 1000)
    overview.make()
    found = overview.points(0, 10**6, 10**6)
    firsts = dict[int, float]()
    for each in worst.firsts:
        firsts[each.step] = max(firsts.get(each.step, 0.0), 1e3 * each.ms)
    assert len(firsts) > 10 and {step: us for step, us in enumerate(found["ttft"]) if us} == pytest.approx(firsts, abs=1)
    gaps = {each.step: 1e3 * each.ms for each in worst.gaps}
    assert len(gaps) > 50 and {step: us for step, us in enumerate(found["itl"]) if us} == pytest.approx(gaps, abs=1)


def test_a_part_says_what_happened_in_its_steps(timed, log_dir):
    overview, (first, last) = made(timed), (20, 60)
    overview.make()
    columns = overview.points(first, last, 10**6)
    [(status, body)] = ask(timed, [f"/api/part?first={first}&last={last}"])
    found, whole = json.loads(body), slow(Index(open_log(timed)), 1000)
    assert status == 200 and (found["first"], found["last"]) == (first, last)
    assert [found[name] for name in ("tokens", "ended")] == [sum(columns[name]) for name in ("tokens", "ended")]
    assert [found[name] for name in ("running", "waiting")] == [max(columns[name]) for name in ("running", "waiting")]
    here = [each.ms for each in whole.firsts if first <= each.step <= last]
    assert min(here) * 0.9 <= found["firsts"][0] <= found["firsts"][1] <= max(here) * 1.1 and found["gaps"][0] > 0
    [(_, body)] = ask(log_dir, ["/api/part?first=0&last=9"])
    assert json.loads(body)["window"] is None and "firsts" not in json.loads(body)
    [(_, body)] = ask(timed, ["/api/part?first=5000000&last=9"])
    assert json.loads(body)["tokens"] == 0


def test_a_requests_life_is_that_of_req(timed):
    index = Index(open_log(timed))
    for number in (0, 7, 30):
        [(status, body)] = ask(timed, [f"/api/request?id={number}"])
        found, told = json.loads(body), life(index, number)
        assert status == 200 and (found["line"], found["end"]) == (told.waited.line, told.finish)
        assert found["reasons"] == told.waited.by_reason and len(found["waits"]) == len(told.waits)
        assert [each["step"] for each in found["moments"]] == [each.first.step for each in spans(told.moments)]


def test_the_next_step_with_something(log_dir):
    overview, wanted = made(log_dir), counted(log_dir)
    overview.make()
    places = np.flatnonzero(wanted[COLUMNS.index("preempted")]).tolist()
    assert len(places) > 1, "this log shows no preemption"
    assert overview.next_with("preempted", 0, True) == places[0 if places[0] else 1]
    assert overview.next_with("preempted", places[0], True) == places[1]
    assert overview.next_with("preempted", places[1], False) == places[0]
    assert overview.next_with("preempted", places[-1], True) is None
    assert overview.next_with("preempted", places[0], False) is None


def ask(log_dir: Path, paths: list[str], within: str = f"/{TOKEN}", **options) -> list[tuple[int, bytes]]:
    """The answers of a page's server to these paths, one after the other."""

    async def session() -> list[tuple[int, bytes]]:
        opened = [Opened(log_dir)]
        async with TestClient(TestServer(make_app(opened, TOKEN))) as client:
            while opened[0].opening or not opened[0].overview.done:
                await asyncio.sleep(0.01)
            return [await matched(client, URL(within + path, encoded=True), **options) for path in paths]

    return asyncio.run(session())


async def matched(client: TestClient, path: str | URL, **options) -> tuple[int, bytes]:
    """An answer, asked for as often as it waits for an index."""
    while (answer := await client.get(path, **options)).status == 202:
        await asyncio.sleep(0.01)
    return answer.status, await answer.read()


def test_a_part_without_an_index_is_waited_for_and_nothing_else_is(log_dir, tmp_path, monkeypatch):
    shutil.copytree(log_dir, tmp_path / "log", ignore=shutil.ignore_patterns("*.vnextcache"))
    monkeypatch.setattr(asked_logs, "PATIENCE_S", 0.0)
    making, going_on = Segment._build, Event()

    def slow(segment: Segment, *arguments) -> Directory:
        segment._progress(3, 4)
        assert going_on.wait(60)
        return making(segment, *arguments)

    async def session() -> tuple[list[bytes], int, bytes]:
        opened = [Opened(tmp_path / "log")]
        async with TestClient(TestServer(make_app(opened, TOKEN))) as client:
            while opened[0].opening:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(Segment, "_build", slow)
            last = opened[0].walk.last_step
            waiting = [await (await client.get(f"/{TOKEN}/api/step?step=1")).read() for _ in range(20)]
            assert (await matched(client, f"/{TOKEN}/api/step?step={last}"))[0] == 200
            assert not opened[0].walk.index.segments[0].source
            going_on.set()
            return waiting, *await matched(client, f"/{TOKEN}/api/step?step=1")

    waiting, status, body = asyncio.run(session())
    assert all("indexing" in json.loads(each) for each in waiting) and json.loads(waiting[-1]) == {"indexing": [3, 4]}
    assert status == 200 and json.loads(body)["step"] == 1


def test_places_are_found(log_dir, walk):
    moment, arrived = walk.moment(30), walk.moment(20).after.next_id
    paths = ["/api/logs", f"/api/find?event={moment.event}", f"/api/find?request={arrived}", "/api/find?column=preempted&step=0"]
    about, event, request, column = (json.loads(body) for _, body in ask(log_dir, paths))
    assert about["logs"][0]["last_step"] == walk.last_step and about["logs"][0]["config"]["block_count"] == 14
    assert event == {"step": 30}
    assert walk.moment(request["step"]).after.next_id > arrived >= walk.moment(request["step"] - 1).after.next_id
    assert walk.moment(column["step"]).plan.preempted


def test_places_are_found_by_name_and_by_time(tmp_path):
    timed = record(tmp_path / "log", config=CONFIG, seed=3, arrivals=60, timestamped=True)
    tables, steps = Log(timed), Index(open_log(timed)).last.planned
    at = 30
    ended = float(tables.steps["ended"][at])
    moment = datetime.fromtimestamp(ended, UTC)
    texts = ["secret name 12", "name 59", "+0.0", f"{moment:%Y-%m-%dT%H:%M:%S.%f}", "+99999", "secret name 1", "12345", "99:99:99"]
    found = ask(timed, [f"/api/find?{urlencode({'text': text})}" for text in texts])
    answers = [json.loads(body) for _, body in found]
    ids = [json.loads(body)["step"] for _, body in ask(timed, ["/api/find?request=12", "/api/find?request=59"])]
    assert [each["step"] for each in answers[:2]] == ids and answers[2]["step"] == 0 and answers[4]["step"] == steps - 1
    assert abs(answers[3]["step"] - tables.steps["step"][at]) <= CONFIG.pipeline_depth
    assert {status for status, _ in found} == {200} and [each["step"] for each in answers[6:]] == [None, None]
    assert "request 12345 is not in this log" in answers[6]["why"] and "99:99:99 is no time" in answers[7]["why"]


def test_the_slowest_are_those_of_the_command(tmp_path, capsys):
    timed = record(tmp_path / "log", config=CONFIG, seed=3, arrivals=60, timestamped=True)
    [(status, body)] = ask(timed, ["/api/slow"])
    found, told = json.loads(body), answer(capsys, "slow", timed, "--top", 6)[1]
    assert status == 200 and len(found["steps"]) == 6
    assert [found[kind] for kind in ("firsts", "gaps", "steps")] == [told[kind] for kind in ("firsts", "gaps", "steps")]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/step", "step must be a whole number"),
        ("/api/step?step=x", "not 'x'"),
        ("/api/step?step=99999", "step 99999 is not in this log"),
        ("/api/step?step=-1", "step -1 is not in this log"),
        ("/api/step?step=1&log=4", "there is no log 4"),
        ("/api/find?event=99999999", "event 99999999 is not in this log"),
        ("/api/find?request=-2", "request -2 is not in this log"),
        ("/api/request?id=99999", "request 99999 is not in this log"),
        ("/api/part?first=1", "last must be a whole number"),
        ("/api/difference", "one log has nothing to differ from"),
        ("/api/find?column=magic&step=1", "there is no column magic"),
        (f"/api/overview?first={10**30}", "first must be a whole number"),
        (f"/api/find?column=tokens&step=-{10**30}", "step must be a whole number"),
    ],
)
def test_bad_questions_get_a_sentence(log_dir, path, words):
    [(status, body)] = ask(log_dir, [path])
    assert status == 400 and words in json.loads(body)["error"]


def test_only_loopback_names_are_answered(log_dir):
    for host in ("evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:8000", "evil.example#localhost", "[::2]:1"):
        assert [status for status, _ in ask(log_dir, ["/api/logs", "/"], headers={"Host": host})] == [403, 403]
    for host in ("127.0.0.1:9", "localhost", "[::1]:80"):
        assert [status for status, _ in ask(log_dir, ["/api/logs", "/"], headers={"Host": host})] == [200, 200]


def test_without_the_token_nothing_is_answered(log_dir):
    """Another user of this machine finds the port, not the address."""
    paths = ["/", "/api/logs", "/api/step?step=1", "/main.js", "/none"]
    for within in ("", "/-", "/x", f"/{TOKEN}x", f"/{TOKEN[:-1]}", f"/?token={TOKEN}", "/%ff%00", "/%F0%9F%98%80"):
        assert [status for status, _ in ask(log_dir, paths, within)] == [403] * len(paths), within
    assert len({new_token() for _ in range(100)}) == 100 and len(new_token()) >= 22


def test_only_the_files_of_the_page_are_read(log_dir, tmp_path):
    """A name is looked up and never opened, however its slashes are written."""
    (secret := tmp_path / "secret.html").write_text("another's")
    up = "..%2f" * 12
    paths = [
        f"/{str(secret).replace('/', '%2f')}", f"/{str(secret).replace('/', '%2F')}", f"/{up}{str(secret)[1:].replace('/', '%2f')}",
        f"/{secret}", "/..%2Fapp.py", "/app.py", "/__init__.py", "/none.js", "/..%5capp.py", "/%2e%2e/app.py", "/main.js%00.html",
        "/.%2fmain.js", "/MAIN.JS", f"/{'x' * 4000}", "/%2f%2fetc%2fpasswd",
    ]  # fmt: skip
    found = ask(log_dir, paths)
    assert [status for status, _ in found if status not in (403, 404)] == [] and all(b"another's" not in body for _, body in found)
    files = page_files().files
    for name, file in files.items():
        [(status, reported)] = ask(log_dir, [f"/{name}"])
        assert (status, reported) == (200, file.body) and file.content_type in TYPES.values()
    assert "main.js" in files


def test_refusals_keep_to_themselves_too(log_dir):
    async def session() -> list:
        async with TestClient(TestServer(make_app([Opened(log_dir)], TOKEN))) as client:
            asked = [client.get(path) for path in ("/", f"/{TOKEN}/", f"/{TOKEN}/none", f"/{TOKEN}/api/step")]
            return [(answer.status, dict(answer.headers)) for answer in await asyncio.gather(*asked)]

    found = asyncio.run(session())
    assert [status for status, _ in found] == [403, 200, 404, 400]
    assert all(headers.items() >= HEADERS.items() for _, headers in found)


def test_a_window_of_lanes_is_bounded(log_dir):
    [(status, body)] = ask(log_dir, ["/api/lanes?first=0&last=999999999999"])
    found = json.loads(body)["lanes"]
    assert status == 200 and max(run[1] for lane in found for run in lane["runs"]) <= 239


def test_the_command_serves_until_it_is_stopped(log_dir):
    command = [sys.executable, "-m", "vnext.replay", "ui", str(log_dir), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    served = subprocess.Popen(command, **pipes, text=True, cwd=ROOT)
    try:
        address = json.loads(served.stdout.readline())["address"]
        page = urllib.request.urlopen(address, timeout=60)
        assert b"<title>vnext-replay</title>" in page.read()
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        port = address.split(":")[2].split("/")[0]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        second = subprocess.run([*command, "--port", port], capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert second.returncode == 2 and f"port {port} cannot be used" in second.stderr
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0 and served.stderr.read() == ""
    finally:
        served.kill()


def test_no_log_is_said_at_once(tmp_path):
    with pytest.raises(UnusableLog, match="there is no log"):
        Opened(tmp_path / "nowhere")
