"""A ticket leads to its request: by name, by the beginning of a name, and in a log without texts by the operator's key."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from unittest.mock import patch

import log_drive
import pytest
from log_drive import engine, record, small_config, started
from msgspec.structs import replace

from vnext.log.codec import Frame
from vnext.log.pseudonyms import name_label
from vnext.replay.cli.main import main
from vnext.replay.reading.naming import request_of
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.verify import verify
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state.digest import digest
from vnext.state.events import RequestArrived

ID = "chatcmpl-7f3a"


def named(log_dir: Path, privacy: str, **bounds: int) -> dict[str, int]:
    """A log whose requests are called as a server calls them; their numbers by name."""
    names, arrival = {}, log_drive._arrival

    def called(*arguments) -> RequestArrived:
        event = arrival(*arguments)
        name = f"{ID}{event.id // 2:04x}-{event.id % 2}"
        names[name] = event.id
        return replace(event, name=name)

    recorder = Recorder.open(log_dir, started(small_config()), privacy, Bounds(**bounds))
    with patch.object(log_drive, "_arrival", called):
        for events, befores, after, ranks in engine(small_config(), 1, 40):
            recorder.append(events, befores, digest(after), ranks)
    recorder.close()
    return names


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_request_is_found_by_its_name(tmp_path, privacy):
    names = named(tmp_path / "log", privacy, segment_bytes=1500)
    log = open_log(tmp_path / "log")
    assert len(log.paths) >= 3 and verify(log).same and verify(log).snapshots == len(log.paths) - 1
    for name, number in names.items():
        assert request_of(log, name) == request_of(log, str(number)) == number
    with pytest.raises(UnusableLog, match=r"is the beginning of 2 requests' names: 4 \(.*-0\), 5 \(.*-1\); give one of these"):
        request_of(log, f"{ID}0002")  # what a client was told: both answers to it
    with pytest.raises(UnusableLog, match="no request of this log"):
        request_of(log, "chatcmpl-none")


def test_the_beginning_of_a_name_is_enough_where_texts_are_kept(tmp_path, capsys):
    names = named(tmp_path / "log", "full")
    assert main(["req", str(tmp_path / "log"), f"{ID}0003-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == names[f"{ID}0003-1"]
    assert main(["req", str(tmp_path / "log"), ID]) == 2
    assert "is the beginning of 40 requests' names" in capsys.readouterr().err


def test_any_part_of_a_name_is_enough_and_a_client_or_salt_that_one_request_has(tmp_path):
    log = open_log(record(tmp_path / "log", arrivals=12))
    arrivals = [event for item in log.items() if isinstance(item, Frame) for event in item.events if isinstance(event, RequestArrived)]
    name = arrivals[10].name
    assert request_of(log, name[3:]) == request_of(log, name) == 10
    with pytest.raises(UnusableLog, match=f"{name[2:6]} is a part of 12 requests' names: 0"):
        request_of(log, name[2:6])
    for number, has in ((3, {"client": 0x7B96E314 << 32}), (4, {"cache_salt": "team-a"})):
        events = [replace(event, **has) if event.id == number else event for event in arrivals]
        with patch("vnext.replay.reading.naming._arrivals", lambda _, events=events: iter(events)):
            assert request_of(log, "7b96e314" if number == 3 else "team-a") == number


def test_without_the_key_a_shape_log_tells_no_name(tmp_path, capsys):
    """The key is the operator's alone, beside the folder that is passed on, and another start's is another one."""
    names, key = named(tmp_path / "log", "shape"), tmp_path / "log.key"
    name, number = next((name, number) for name, number in names.items() if number == 7)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    whole = b"".join(path.read_bytes() for path in (tmp_path / "log").iterdir())
    assert ID.encode() not in whole and key.read_text().strip().encode() not in whole
    assert bytes.fromhex(key.read_text()) not in whole
    shutil.copytree(tmp_path / "log", tmp_path / "passed" / "on")
    assert main(["req", str(tmp_path / "passed" / "on"), name]) == 2
    assert (
        "its key is not at" in (reported := capsys.readouterr().err).replace("their key", "its key")
        and "--key" in reported
    )
    assert main(["req", str(tmp_path / "passed" / "on"), name, "--key", str(key), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["id"] == number and found["name"] == name_label(bytes.fromhex(key.read_text()), name)
    assert request_of(open_log(tmp_path / "log"), found["name"]) == number, "the log's own word for it leads there too"
    named(tmp_path / "other", "shape")
    assert main(["req", str(tmp_path / "log"), name, "--key", str(tmp_path / "other.key")]) == 2
    assert f"is called {name} under the key" in capsys.readouterr().err
    (tmp_path / "other.key").write_text("no key")
    assert main(["req", str(tmp_path / "log"), name, "--key", str(tmp_path / "other.key")]) == 2
    assert "holds no key" in capsys.readouterr().err


def test_names_of_any_form_are_kept_apart():
    labels = [name_label(b"k" * 16, name) for name in ("", "a", "a-0", "a-1", "b-0", "-0", "a-0-0", "a-x", "é-3", "a-٣")]
    assert len({label for label in labels}) == len(labels)
    assert name_label(b"k" * 16, "a-1")[:16] == name_label(b"k" * 16, "a-0")[:16] == name_label(b"k" * 16, "a")
    assert name_label(b"l" * 16, "a") != name_label(b"k" * 16, "a")


def test_a_key_that_cannot_be_written_costs_names_only(tmp_path, caplog):
    (tmp_path / "log.key").mkdir()
    named(tmp_path / "log", "shape")
    assert verify(open_log(tmp_path / "log")).same and "requests have no names in this log" in caplog.text
    with pytest.raises(UnusableLog, match="give its number|the request's number"):
        request_of(open_log(tmp_path / "log"), f"{ID}0001-0")


def test_requests_that_live_where_a_ring_begins_have_their_names(tmp_path):
    names = named(tmp_path / "log", "full", segment_bytes=1000, max_bytes=4000)
    log = open_log(tmp_path / "log")
    assert log.header.index > 0
    assert request_of(log, f"{ID}0013-1") == names[f"{ID}0013-1"]


def test_a_damaged_log_is_searched_up_to_its_damage(tmp_path):
    names = named(tmp_path / "log", "full")
    path = open_log(tmp_path / "log").paths[0]
    data = bytearray(path.read_bytes())
    data[-len(data) // 4] ^= 1
    path.write_bytes(data)
    for name, number in list(names.items())[:20]:
        assert request_of(open_log(tmp_path / "log"), name) == number
