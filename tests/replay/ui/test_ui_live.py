"""A growing log on the page: every step as a walk through the finished log has it, and an end that leaves it usable."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from log_drive import as_it_is, record, small_config

from vnext.replay.cli.main import main
from vnext.replay.reading.index import Index
from vnext.replay.reading.mirror import Lost, Silent
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.tail import Tail
from vnext.replay.ui import live, walk as walking
from vnext.replay.ui.app import step_view
from vnext.replay.ui.live import LiveLog
from vnext.replay.ui.overview import COLUMNS, Overview
from vnext.replay.ui.walk import Walk

WAIT_S = 120
"""Beside busy neighbours; what never comes true is a follower that has ended, and that is seen at once."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return record(
        tmp_path_factory.mktemp("live") / "log", config=small_config(page_count=20), seed=3, arrivals=100, size=1500
    )


@pytest.fixture
def growing(tmp_path, whole) -> Callable[[float], Path]:
    """The log as it was when so much of its bytes was written, in a folder that grows with each call, as in life: a file gets
    bytes at its end, and the next one comes when it is whole."""

    def grow(part: float) -> Path:
        left = int(part * sum(path.stat().st_size for path in open_log(whole).paths))
        for path in open_log(whole).paths:
            data = path.read_bytes()[: max(0, left)]
            left -= path.stat().st_size
            if data:
                with (tmp_path / path.name).open("ab") as file:
                    file.write(data[file.tell() :])
        return tmp_path

    return grow


def eventually(followed: LiveLog, condition: Callable[[], bool], ends: bool = False) -> None:
    """Wait until it is true; a follower that has ended sees nothing more."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert ends or followed.condition != "ended", f"the follower has ended: {followed.word}"
        assert time.monotonic() < deadline_s, "never came true"
        time.sleep(0.01)


def test_every_step_is_the_one_of_the_finished_log(growing, whole, monkeypatch):
    """Cut anywhere, inside records too; new steps from memory, old ones from the files, whatever has been let go of."""
    monkeypatch.setattr(live, "KEPT", 5)
    monkeypatch.setattr(walking, "KEPT", 7)
    monkeypatch.setattr(live, "POLL_S", 0.01)
    wanted = Walk(Index(open_log(whole)))
    followed = LiveLog(growing(0.04))  # within the first segment
    try:
        assert followed.walk.first_step == 0
        for part in (0.11, 0.2, 0.35, 0.351, 0.6, 0.9, 1.0):
            end = Tail(growing(part), whole=True)
            events = sum(len(item.events) for item in end.news() if hasattr(item, "events"))
            eventually(followed, lambda events=events: followed.walk.events == events + 1)
            last = followed.walk.last_step
            for step in {followed.walk.first_step, last // 2, last - 20, last - 1, last}:
                if step >= followed.walk.first_step:
                    shown = asyncio.run(followed.ask(lambda walk, step=step: step_view(walk.moment(step))))
                    assert shown == step_view(wanted.moment(step))
        assert followed.walk.last_step == wanted.last_step and followed.condition == "live"
        segments = len(open_log(whole).paths)
        assert segments > live.SEGMENTS_KEPT and followed.walk.first_step > 0, "nothing was let go of"
        with pytest.raises(UnusableLog, match="is not in this log"):
            followed.walk.moment(0)
        first = followed.walk.first_step
        overview = Overview(open_log(whole), wanted.index.first)
        overview.make()
        expected, found = (each.points(first, wanted.last_step, 10**6) for each in (overview, followed.overview))
        assert [found[name] for name in COLUMNS] == [expected[name] for name in COLUMNS]
        assert followed.overview.points(0, 10**6, 10**6)["first"] == first
    finally:
        followed.close()


def test_a_long_time_line_forgets_its_beginning(growing, monkeypatch):
    monkeypatch.setattr(live, "STEPS_MAX", 50)
    followed = LiveLog(growing(1.0))
    try:
        eventually(followed, lambda: not followed.about()["live"]["behind"])
        about = followed.about()
        assert about["first_step"] == followed.overview.first_step > about["last_step"] - 50
        assert about["overview"]["steps"] == about["last_step"] - about["first_step"] + 1
    finally:
        followed.close()


class Mirrored:
    """A mirror of which the test says what happens."""

    name = "engine"

    def __init__(self) -> None:
        self.error: Exception | None = None

    def pull(self) -> bool:
        if self.error is not None:
            raise self.error
        return False


def test_an_end_is_told_and_what_came_stays(growing, monkeypatch):
    monkeypatch.setattr(live, "POLL_S", 0.01)
    monkeypatch.setattr(live, "RETRY_S", 0.01)
    mirror = Mirrored()
    followed = LiveLog(growing(0.5), mirror)
    try:
        eventually(followed, lambda: not followed.about()["live"]["behind"])
        before = followed.walk.last_step
        mirror.error = Silent("nobody answers")
        growing(0.6)  # had come before the server fell silent
        eventually(followed, lambda: followed.condition == "silent" and followed.walk.last_step > before)
        mirror.error = None
        eventually(followed, lambda: followed.condition == "live")
        mirror.error = Lost("another engine runs there now")
        eventually(followed, lambda: followed.condition == "ended", ends=True)
        about = followed.about()
        assert about["live"]["word"] == "another engine runs there now" and about["name"] == "engine"
        first = followed.walk.first_step
        assert first < before and step_view(followed.walk.moment(first))["step"] == first
    finally:
        followed.close()


def test_a_log_that_cannot_be_folded_ends_with_its_reason(tmp_path):
    """A plan is missing from the middle."""

    def change(events, state_digest, ranks):
        change.frames += 1
        return as_it_is(events[:-1] if change.frames == 30 else events, state_digest, ranks)

    change.frames = 0
    followed = LiveLog(record(tmp_path / "log", change=change))
    try:
        eventually(followed, lambda: followed.condition == "ended", ends=True)
        assert followed.word and followed.walk.last_step > 3
    finally:
        followed.close()


def test_a_segment_whose_header_is_not_there_yet_is_waited_for(growing, whole):
    """Without asking again and again."""
    folder = growing(0.0001)
    first, second = open_log(whole).paths[:2]
    shutil.copy(first, folder)
    tail = Tail(folder)
    (folder / second.name).write_bytes(second.read_bytes()[:50])
    before = list(tail.news())
    shutil.copy(second, folder)
    assert before and list(tail.news())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9"], "add --live to follow the server there"),
        (["--live", "http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["--live", "http://127.0.0.1:9", "other"], "--live shows one log"),
        (["--live", "no-such-folder"], "there is no log at no-such-folder"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(arguments, words, capsys):
    assert main(["ui", *arguments]) == 2
    reported = capsys.readouterr().err
    assert words in reported and reported.count("\n") == 1
