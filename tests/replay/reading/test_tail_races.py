"""A log is followed while its engine writes: whatever happens between two looks of the follower, it reads each frame once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from log_drive import record, small_config

from vnext.log import codec
from vnext.log.codec import Frame
from vnext.replay.reading import source, tail as tailing
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.tail import Damaged, Tail, newest_log
from vnext.replay.ui.live import LiveWalk


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return record(
        tmp_path_factory.mktemp("races") / "log", config=small_config(page_count=14), seed=3, arrivals=60, size=1500
    )


def frames_of(items) -> list[Frame]:
    return [item for item in items if isinstance(item, Frame)]


class Engine:
    """What writes a copy of a log, so many bytes at a time: a segment begins when the one before it is whole."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self._left = [(folder / path.name, path.read_bytes()) for path in open_log(whole).paths]

    def write(self, count: int) -> None:
        while count and self._left:
            path, data = self._left[0]
            with path.open("ab") as file:
                file.write(data[:count])
            self._left[0] = path, data[count:]
            count -= min(count, len(data))
            if not self._left[0][1]:
                del self._left[0]

    @property
    def done(self) -> bool:
        return not self._left


def before_and_behind(monkeypatch, name: str, happens: Callable[[], None]) -> None:
    """The engine goes on right before, and right behind, each look that the follower takes by this function of its own."""
    looks = getattr(tailing, name)

    def look(*arguments):
        happens()
        try:
            return looks(*arguments)
        finally:
            happens()

    monkeypatch.setattr(tailing, name, look)


@pytest.mark.parametrize("step", [7, 61, 90, 400, 1500])
@pytest.mark.parametrize("name", ["part_of", "open_log", "size_of"])
def test_an_engine_that_writes_between_two_looks_is_followed(whole, tmp_path, monkeypatch, name, step):
    """So the rest of a record and the next segment come between the end of a file and the look for what follows."""
    engine = Engine(whole, tmp_path)
    engine.write(open_log(whole).paths[0].stat().st_size - 40)
    following = Tail(tmp_path, whole=True)
    before_and_behind(monkeypatch, name, lambda: engine.write(step))
    found = []
    while not engine.done:
        found += frames_of(following.news())
        engine.write(step)
    found += frames_of(following.news())
    assert found == frames_of(open_log(whole).items())


def test_half_a_record_that_is_taken_back_is_not_remembered(whole, tmp_path):
    """A full disk: the engine cuts off what it wrote of a frame, and other bytes stand there later."""
    first = open_log(open_log(whole).paths[0])
    data, frames = first.paths[0].read_bytes(), frames_of(first.items())
    last = len(data) - len(frames[-1].body) - codec.digest_word.size - codec.record_head.size
    path = tmp_path / first.paths[0].name
    path.write_bytes(data[:last] + codec.record_head.pack(300, 0) + b"half of a longer frame")
    following = Tail(tmp_path)
    assert frames_of(following.news()) == frames[:-1]
    with path.open("r+b") as file:
        file.truncate(last)
    assert frames_of(following.news()) == []
    with path.open("ab") as file:
        file.write(data[last:])
    assert frames_of(following.news()) == frames[-1:]


def test_a_follower_that_the_ring_has_overtaken_says_so(whole, tmp_path):
    engine = Engine(whole, tmp_path)
    engine.write(2000)
    following = Tail(tmp_path, whole=True)
    list(following.news())
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(Damaged, match="--log-max-bytes"):
        list(following.news())


def test_a_segment_that_goes_while_it_is_looked_for_is_passed(whole, tmp_path, monkeypatch):
    """The oldest segment of a running engine's log goes between the list of its files and their opening."""
    engine = Engine(whole, tmp_path)
    engine.write(10**9)
    paths, head = sorted(tmp_path.iterdir()), source._head

    def deleted(path: Path) -> bytes | None:
        paths[0].unlink(missing_ok=True)
        return head(path)

    monkeypatch.setattr(source, "_head", deleted)
    assert open_log(tmp_path).header.index == 1
    walk = LiveWalk(open_log(paths[1]), first_state(open_log(paths[1])))
    monkeypatch.setattr(source, "_head", lambda path: paths[1].unlink(missing_ok=True) if path == paths[1] else head(path))
    walk.follow(open_log(paths[2]))
    assert walk.first_step == first_state(open_log(paths[2])).planned > 0


def test_a_link_to_nothing_is_one_sentence(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "segment-000000.vnextlog").symlink_to(tmp_path / "nothing")
    with pytest.raises(UnusableLog, match="link to nothing"):
        open_log(tmp_path / "log")
    assert newest_log_or_words(tmp_path).endswith("give the directory of its log")


def newest_log_or_words(folder: Path) -> str:
    try:
        return str(newest_log(folder))
    except UnusableLog as error:
        return str(error)
