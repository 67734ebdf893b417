"""Log lines as JSON: the fields of records, of what children write, and of what ends a process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest
from hypothesis import given, strategies as st

from vnext.runtime.protocol import log_lines
from vnext.runtime.protocol.log_lines import LINE_BYTES_MAX, ChildLines, JsonFormatter, line

FIELDS = {"timestamp", "level", "logger", "process", "pid", "message"}


@pytest.fixture
def json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_process", "launcher")


def test_a_record_has_its_fields_and_extras(json_lines: None) -> None:
    record = logging.makeLogRecord(
        {"name": "vnext.server", "levelname": "INFO", "msg": "a %s\n%r", "args": ("b", "\x1b[0m\ud800"), "request_id": "r", "pid": 0}
    )
    text = JsonFormatter().format(record)
    found = json.loads(text)
    assert "\n" not in text and text.isascii() and found.keys() == FIELDS | {"request_id"}
    assert (found["message"], found["process"], found["request_id"]) == ("a b\n'\\x1b[0m\\ud800'", "launcher", "r")
    assert found["pid"] != 0 and found["timestamp"].endswith("Z") and datetime.fromisoformat(found["timestamp"])


def test_lines_of_a_program_are_text_until_it_begins_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line("vnext: a\nvnext: b") == "vnext: a\nvnext: b"
    assert json.loads(line("vnext serve: c", "WARNING", "json")).items() >= {"message": "c", "level": "WARNING"}.items()
    monkeypatch.setattr(log_lines, "_process", "API server")
    assert [json.loads(each)["message"] for each in line("vnext: a\nvnext: b").split("\n")] == ["a", "b"]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_whatever_a_child_writes_becomes_lines_that_parse(data: bytes, cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "_process", "launcher")
        lines, places = ChildLines("rank 0", 7), [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        parts = [data[start:end] for start, end in zip(places, places[1:]) if end > start]
        written = b"".join(map(lines.push, parts)) + lines.push(b"")
    found = [json.loads(each) for each in written.splitlines()]
    assert len(found) == sum(bool(each.strip()) for each in data.split(b"\n"))


def test_json_of_a_child_passes_and_the_rest_is_wrapped(json_lines: None) -> None:
    lines = ChildLines("rank 0", 7)
    own = b'{"message": "of its own"}\n'
    assert lines.push(own[:5]) == b"" and lines.push(own[5:]) == own
    wrapped = json.loads(lines.push(b'{"no": json}\nhalf'))
    assert wrapped.items() >= {"process": "rank 0", "pid": 7, "logger": "stderr", "message": '{"no": json}'}.items()
    assert lines.push(b"x" * LINE_BYTES_MAX) and json.loads(ChildLines("a", 1).push(b"[1]\n"))["message"] == "[1]"


def test_text_passes_unchanged_and_at_once() -> None:
    assert ChildLines("rank 0", 7).push(b"half a li") == b"half a li"


PROGRAM = """
import logging, sys, threading, warnings
from vnext.runtime.protocol.log_lines import begin
from vnext.runtime.processes.subprocesses import start_child
begin("launcher", sys.argv[1], "info", "%(message)s")
logging.getLogger("a").info("said", extra={"request_id": "r-1"})
warnings.warn("an old thing")
start_child("rank 3", "json.tool", ["/absent"]).wait()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("the end")
"""


def test_every_line_of_a_process_and_its_child_parses() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, "json"], capture_output=True, text=True, timeout=60)
    found = [json.loads(each) for each in ran.stderr.splitlines()]
    assert all(each.keys() >= FIELDS for each in found) and ran.returncode == 1
    assert {each["process"] for each in found} == {"launcher", "rank 3"}
    assert [each["request_id"] for each in found if "request_id" in each] == ["r-1"]
    assert [each["exception"].splitlines()[-1] for each in found if "exception" in each] == [
        "ZeroDivisionError: division by zero", "ValueError: the end",
    ]  # fmt: skip
    assert any("an old thing" in each["message"] for each in found) and any("/absent" in each["message"] for each in found)
    plain = subprocess.run([sys.executable, "-c", PROGRAM, "text"], capture_output=True, text=True, timeout=60)
    assert plain.stderr.startswith("said\n") and "\nValueError: the end\n" in plain.stderr
