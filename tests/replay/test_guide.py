"""The guide is true: every command in it is run, and prints what the guide says. `--rewrite` writes the guide anew.

A story is a section of docs/replay-guide.md, or README.md's one, with ```console blocks: lines that begin with `$ ` are
commands, what follows them is what they print. Commands run one after the other in a folder of the story's own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vnext.replay.cli import main

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from story_logs import STORIES, main as record  # noqa: E402  (needs the path above)

GUIDE, README = ROOT / "docs" / "replay-guide.md", ROOT / "README.md"
BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
COLUMNS = "100"
TIMEOUT_S = 60


def sections(path: Path) -> dict[str, str]:
    """Titles of the sections that have commands, and their texts."""
    parts = re.split(r"^(?=## )", path.read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts if BLOCK.search(part)}


TITLES = [(path, title) for path in (GUIDE, README) for title in sections(path)]


def test_the_guide_has_its_five_stories() -> None:
    assert [title for path, title in TITLES if path == GUIDE] == [
        "A latency spike", "A drifted rank", "A cold prefix cache", "A preemption storm", "A crash becomes a test",
    ]  # fmt: skip
    told = re.findall(r"^\$ .*story_logs.py \. (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert {name for names in told for name in names.split()} == set(STORIES)


@pytest.mark.parametrize(("path", "title"), TITLES, ids=[title for _, title in TITLES])
def test_a_story_prints_what_it_says(path, title, tmp_path, monkeypatch, capfd, request) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    section = sections(path)[title]
    played = BLOCK.sub(lambda block: play(block[0], capfd), section)
    if request.config.getoption("--rewrite"):
        path.write_text(path.read_text().replace(section, played))
        return
    assert played.splitlines() == section.splitlines()


def play(block: str, capfd) -> str:
    """The block again, with what its commands print now."""
    commands = [line for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"{command}\n{printed(command[2:], capfd)}" for command in commands)


def printed(command: str, capfd) -> str:
    """What a command prints, lines stripped of trailing blanks."""
    if command.startswith("python scripts/story_logs.py "):
        record(command.split()[2:])
        text = capfd.readouterr().out
    else:
        text = in_this_process(command, capfd) if is_plain(command) else in_a_shell(command)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def is_plain(command: str) -> bool:
    """Whether it can run here: the log's tool, which imports nothing of the story's, and at most `head`s and `tail`s."""
    return command.startswith("vnext-replay ") and "--own-policy" not in command


def in_this_process(command: str, capfd) -> str:
    words, *filters = command.split(" | ")
    main(shlex.split(words)[1:])
    captured = capfd.readouterr()
    assert not captured.err, captured.err
    lines = captured.out.splitlines()
    for name, count in (shlex.split(each) for each in filters):
        size = int(count.removeprefix("-"))
        lines = {"head": lines[:size], "tail": lines[-size:]}[name]
    return "\n".join(lines)


def in_a_shell(command: str) -> str:
    words = command.replace("vnext-replay ", f"{shlex.quote(sys.executable)} -m vnext.replay ")
    words = words.replace("python -m", f"{shlex.quote(sys.executable)} -m", 1) if words.startswith("python -m") else words
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), ".")), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert not ran.stderr, ran.stderr
    return ran.stdout
