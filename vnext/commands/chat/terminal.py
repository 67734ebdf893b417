"""`vnext chat`: a chat in the terminal, with a running server or with an engine that it starts.

Owns the terminal's output. Ctrl-C ends an answer, never the chat; an answer that fails does not end the chat either.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console

from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.commands.bench.load.answers import Models, RequestFailed
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.chat.conversation import BY_NAME, Conversation, is_command, obey
from vnext.commands.chat.engine import Fitting
from vnext.commands.chat.talker import (
    TOO_LONG,
    Messages,
    Sampling,
    Talker,
    TalkFailed,
    TalkRefused,
    TalkTooLong,
    require_sampling,
    sampling_options,
)
from vnext.options.reader import ChatCommand

GREETING = "/help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat"
PROMPT, MORE, FAULT = "you  ", "...  ", "error: "
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
CONTROLS[ord("\r")] = ""
GREEN, PLAIN = "\001\033[1;32m\002", "\001\033[0m\002"  # marked for readline, which counts visible characters


class Asker(Protocol):
    """The source of the user's messages."""

    def ask(self) -> str:
        """The next message. Raises EOFError where there is none, and KeyboardInterrupt."""


def chat(command: ChatCommand) -> int:
    """Talk until the user ends it; returns the exit status (exits.py)."""
    console = Console(highlight=False)
    if sys.stdin.isatty() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell without job control starts its jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with talker(command) as other:
            conversation = Conversation(other.title, command.system, sampling_options(command))
            talk(other, conversation, console, lines(console, command.history))
    except TalkFailed as error:
        print(f"vnext {command.word}: {error}{'' if str(error)[-1] in '.?' else '.'}", file=sys.stderr)
        return REFUSED if isinstance(error, TalkRefused) else FAILED
    except KeyboardInterrupt:
        console.print()
    return DONE


def talker(command: ChatCommand) -> AbstractContextManager[Talker]:
    """The server at the URL, or a newly started engine. Raises TalkFailed."""
    require_sampling(sampling_options(command))
    if command.url:
        return nullcontext(ServerTalker(command))
    from vnext.commands.chat.engine import start_engine_talker  # loads torch and an engine only where there is no server

    return start_engine_talker(command)


def lines(console: Console, history: str) -> Lines:
    """The terminal's lines, with editing and history where there is a terminal."""
    if not (console.is_terminal and sys.stdin.isatty()):
        return Lines(PROMPT, "")
    is_plain = console.no_color or console.is_dumb_terminal
    prompt = PROMPT if is_plain else GREEN + PROMPT.rstrip() + PLAIN + "  "
    return Lines(prompt, MORE, history, sorted(BY_NAME))


def talk(other: Talker, conversation: Conversation, console: Console, asker: Asker) -> None:
    """Take questions and answer them until /exit or the end of input."""
    console.print(f"{seen(other.title)}: {GREETING}", markup=False)
    while True:
        try:
            if turn(other, conversation, console, asker.ask()):
                return
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /exit leaves[/dim]")


def turn(other: Talker, conversation: Conversation, console: Console, words: str) -> bool:
    """Run a command or answer a message; returns whether the chat ends."""
    if is_command(words):
        reply = obey(conversation, words)
        if reply.say:
            console.print(reply.say, style="dim", markup=False)
        if reply.leave:
            return True
        words = reply.ask
    if words:
        answer, fitting = "", Fitting(other, conversation.ask(words), conversation.sampling)
        try:
            shown = show(fitting.pieces(), console)
            answer = shown.text
        finally:
            conversation.answered(answer)
        if fitting.left_out:
            console.print(f"the first {fitting.left_out} messages no longer fit and were left out: /new begins anew", style="dim")
        if conversation.shows_speed:
            console.print(speed(shown), style="dim", markup=False)
    return False


class Shown(NamedTuple):
    """An answer as far as it came, "" for one that failed; `tokens` is 0 where the count is unknown."""

    text: str
    tokens: int
    first_s: float
    elapsed_s: float


def show(pieces: Generator[str, None, int], console: Console) -> Shown:
    """Print an answer while it comes."""
    printed: list[str] = []
    begin_s, first_s, tokens = time.perf_counter(), 0.0, 0
    try:
        with closing(pieces):
            while True:
                piece = next(pieces)
                if not printed:
                    console.print("[bold blue]it[/bold blue]   ", end="")
                if piece and not first_s:
                    first_s = time.perf_counter() - begin_s
                printed.append(piece)
                console.print(seen(piece), end="", markup=False, soft_wrap=True)
                console.file.flush()
    except StopIteration as end:
        tokens = end.value
    except TalkFailed as error:
        if printed:
            console.print()
        console.print(f"{FAULT}{seen(str(error))}", style="red", end="", markup=False)
        printed.clear()
    except KeyboardInterrupt:
        console.print(" [dim](cut short)[/dim]", end="")
    console.print()
    return Shown("".join(printed), tokens, first_s, time.perf_counter() - begin_s)


def seen(text: str) -> str:
    """A model's or a server's text without the characters that control the terminal."""
    return text.translate(CONTROLS)


def speed(shown: Shown) -> str:
    words = f"{shown.elapsed_s:.2f} s, the first piece after {shown.first_s:.2f} s"
    if not shown.tokens:
        return words
    rest_s = shown.elapsed_s - shown.first_s
    rate = f", {(shown.tokens - 1) / rest_s:.1f} tokens/s after that" if shown.tokens > 1 and rest_s > 0 else ""
    return f"{shown.tokens} tokens in {words}{rate}"


class ServerTalker:
    """A server that speaks OpenAI's chat API."""

    def __init__(self, command: ChatCommand) -> None:
        self._client = BlockingClient(command.url, command.api_key)
        self.title, self.context = self._first_model()

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str, None, int]:
        body = {"model": self.title, "messages": messages, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        tokens = 0
        try:
            for chunk in self._client.stream("/v1/chat/completions", body):
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                yield chunk.text
        except RequestFailed as error:
            raise self._failed(error) from error
        return tokens

    def _first_model(self) -> tuple[str, int]:
        """The name of the model to use and its context, 0 where the server does not say. Raises TalkRefused, because no chat has
        begun yet."""
        try:
            model = self._client.ask("/v1/models", None, Models).first
            return model.id, model.max_model_len if isinstance(model.max_model_len, int) else 0
        except RequestFailed as error:
            if error.kind == "broken":
                raise TalkRefused(f"{self._client.url} does not answer as an OpenAI server: is the URL right?") from error
            raise TalkRefused(str(self._failed(error))) from error

    def _failed(self, error: RequestFailed) -> TalkFailed:
        """A failed request as the user reads it: the server's own sentence, where there is one."""
        sentence, code = error.stated
        if code == TOO_LONG:
            return TalkTooLong(sentence)
        if not sentence and error.status:
            sentence = f"The server answered with {error.kind}."
        elif not sentence and error.kind == "connect":
            sentence = f"{self._client.url} cannot be reached ({error}): is a server running there?"
        return TalkFailed(sentence or f"The answer broke off: {error}.")


# ---- lines ---------------------------------------------------------------------------------------------------------
# Lines: the user's input. Owns line editing, the history file, and messages of several lines.
# readline edits the lines, if Python has it and input and output are a terminal; otherwise they are read as they come. Only the
# user can read the history file (mode 0600); if it cannot be written, the history is lost, but the chat goes on.

try:
    import readline
except ImportError:  # a Python without it, as on Windows
    readline = None  # type: ignore[assignment]

HISTORY_LINES_MAX = 1000
FENCE = '"""'


class Lines:
    """`prompt` begins a message, `more` each further line of it. `history` is a path, "" for none; `words` are completed by Tab."""

    def __init__(self, prompt: str, more: str, history: str = "", words: Sequence[str] = ()) -> None:
        self._prompt, self._more = prompt, more
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a request is UTF-8, whatever comes through a pipe
        self._history = history if readline is not None else ""
        if readline is not None:
            _complete(words)
        if self._history and not self._open_history():
            self._history = ""

    def ask(self) -> str:
        """Read one message: a line, lines joined by a backslash at the end, or the lines between two lines of three quotes.
        Raises EOFError at the end of input, and KeyboardInterrupt."""
        first = self._line(self._prompt)
        if first.strip().startswith(FENCE):
            return self._fenced(first.strip()[len(FENCE) :])
        lines = [first]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(self._more))
        return "\n".join(lines).strip()

    def _fenced(self, first: str) -> str:
        if first.endswith(FENCE):
            return first[: -len(FENCE)].strip()
        lines = [first]
        while not (line := self._line(self._more)).rstrip().endswith(FENCE):
            lines.append(line)
        return "\n".join([*lines, line.rstrip()[: -len(FENCE)]]).strip()

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        if self._history and line.strip():
            _append(self._history)
        return line

    def _open_history(self) -> bool:
        """Read the history file, creating it for its owner alone; returns whether that worked."""
        path = Path(self._history)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600))
            path.chmod(0o600)
            readline.clear_history()
            readline.read_history_file(path)
        except OSError:
            return False
        readline.set_history_length(HISTORY_LINES_MAX)
        return True


def _append(path: str) -> None:
    """Append the last line to the history file, which other chats write to as well."""
    try:
        if hasattr(readline, "append_history_file"):
            readline.append_history_file(1, path)
        else:  # libedit
            readline.write_history_file(path)
    except OSError:
        pass


def _complete(words: Sequence[str]) -> None:
    """Tab completes the first word of a line to one of `words`."""

    def word(text: str, state: int) -> str | None:
        found = [each for each in words if each.startswith(text)] if readline.get_begidx() == 0 else []
        return found[state] if state < len(found) else None

    readline.set_completer(word)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
