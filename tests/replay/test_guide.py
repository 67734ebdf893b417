"""The guide is true: every command in it is run, and prints what the guide says. `--rewrite` writes the guide anew.

A story is a section of docs/replay-guide.md, or README.md's one, with ```console blocks: lines that begin with `$ ` are
commands, what follows them is what they print. Commands run one after the other in a folder of the story's own.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vnext.replay.cli.main import main
from vnext.sched.policies import policy_of

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
        "A latency spike", "A drifted rank", "A cold prefix cache", "A noisy client", "A crash becomes a test",
    ]  # fmt: skip
    reported = re.findall(r"^\$ .*story_logs.py \. (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert {name for names in reported for name in names.split()} == set(STORIES)


@pytest.mark.parametrize(("path", "title"), TITLES, ids=[title for _, title in TITLES])
def test_a_story_prints_what_it_says(path, title, tmp_path, monkeypatch, capfd, request) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", COLUMNS)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
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
    forget_policies()
    if command.startswith("python scripts/story_logs.py "):
        record(command.split()[2:])
        text = capfd.readouterr().out
    else:
        text = (in_this_process if command.startswith("vnext-replay ") else in_a_shell)(command, capfd)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def in_this_process(command: str, capfd) -> str:
    """The log's tool, with at most `head`s and `tail`s behind it."""
    words, *filters = command.split(" | ")
    main(shlex.split(words)[1:])
    captured = capfd.readouterr()
    assert not captured.err, captured.err
    lines = captured.out.splitlines()
    for name, count in (shlex.split(each) for each in filters):
        size = int(count.removeprefix("-"))
        lines = {"head": lines[:size], "tail": lines[-size:]}[name]
    return "\n".join(lines)


def forget_policies() -> None:
    """Each command is a process of its own, which imports a policy as it is then."""
    sys.modules.pop("shop_policies", None)
    policy_of.cache_clear()
    importlib.invalidate_caches()


def in_a_shell(command: str, capfd) -> str:
    words = re.sub(r"^python\b", shlex.quote(sys.executable), command)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), ".")), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert not ran.stderr, ran.stderr
    return ran.stdout
