"""The talk on a terminal of its own: editing, history and Ctrl-C as a user's keys cause them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_server import echo_server

DEADLINE_S = 60.0
UP, CTRL_A, CTRL_C, CTRL_D, TAB = "\033[A", "\001", "\003", "\004", "\t"


def own_terminal() -> None:
    """Make the pseudo-terminal the one whose Ctrl-C reaches this process, which begins as the job of a script does: without SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`vnext chat` on a pseudo-terminal; `type` keys, `until` some words are on the screen."""

    def __init__(self, port: int, state: Path) -> None:
        self.keys, end = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "dumb", "INPUTRC": os.devnull}
        command = [sys.executable, "-m", "vnext.commands.cli", "chat", "--url", f"http://127.0.0.1:{port}"]
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True, preexec_fn=own_terminal
        )
        os.close(end)
        self.screen = ""

    def type(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def press(self, key: str, words: str) -> None:
        """Press a key, again each second, until `words` came: of a signal between readline's prompt and its wait for keys
        Python hears only with the next key."""
        for _ in range(int(DEADLINE_S)):
            self.type(key)
            if self._has(words, 1.0):
                break
        self.until(words)

    def until(self, words: str) -> str:
        """Read until `words` came; returns what was read since the last call, up to and with them."""
        assert self._has(words, DEADLINE_S), f"{words!r} never came: {self.screen!r}"
        read, _, self.screen = self.screen.partition(words)
        return read + words

    def _has(self, words: str, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while words not in self.screen and time.monotonic() < deadline_s:
            if select.select([self.keys], (), (), 0.2)[0]:
                self.screen += os.read(self.keys, 65536).decode(errors="replace")
        return words in self.screen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keys)


@pytest.fixture
def server() -> Iterator[object]:
    with echo_server() as running:
        yield running


@pytest.fixture
def terminal(server, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(server.server_port, tmp_path)
    yield opened
    opened.close()


def test_lines_are_edited_and_come_back(terminal: Terminal, server, tmp_path: Path) -> None:
    terminal.until("you  ")
    terminal.type(f"two{CTRL_A}one \r")  # typed in front
    terminal.until("it ")
    terminal.until("you  ")
    terminal.type(f"{UP}\r")
    terminal.until("it ")
    terminal.until("you  ")
    terminal.type(f"/hel{TAB}\r")
    terminal.until("this list")
    terminal.until("you  ")  # a Ctrl-D before the prompt reaches the terminal's own line discipline, not readline
    terminal.type(CTRL_D)
    assert terminal.process.wait(DEADLINE_S) == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["one two", "one two"]
    history = tmp_path / "vnext" / "chat_history"
    assert history.read_text().splitlines()[-3:] == ["one two", "one two", "/help"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700


def test_ctrl_c_ends_an_answer_and_not_the_talk(terminal: Terminal, server) -> None:
    terminal.until("you  ")
    terminal.type("wait\r")
    terminal.until("it ")
    terminal.until("wait")
    terminal.type(CTRL_C)
    terminal.until("(cut short)")
    terminal.until("you  ")
    terminal.press(CTRL_C, "Ctrl-D or /exit leaves")
    terminal.type("next\r")
    terminal.until("it ")
    terminal.until("you  ")
    terminal.type("/exit\r")
    assert terminal.process.wait(DEADLINE_S) == 0
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["wait", "wait ", "next"]


def test_the_history_of_one_talk_is_there_in_the_next(server, tmp_path: Path) -> None:
    for words, expected in (("first\r", "first"), (f"{UP}\r", "first")):
        opened = Terminal(server.server_port, tmp_path)
        opened.until("you  ")
        opened.type(words)
        opened.until("it ")
        opened.until("you  ")
        opened.close()
        assert server.bodies[-1]["messages"][-1]["content"] == expected


def test_a_state_folder_that_cannot_be_written_costs_the_history_only(server, tmp_path: Path) -> None:
    (tmp_path / "vnext").write_text("a file where a folder should be")
    opened = Terminal(server.server_port, tmp_path)
    opened.until("you  ")
    opened.type("hello\r")
    opened.until("it ")
    opened.until("you  ")
    opened.close()
    assert len(server.bodies) == 1
