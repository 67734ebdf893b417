"""`vnext chat`: a talk in the terminal, with a running server or with an engine of its own.

Owns the conversation and what the terminal shows. An answer that fails, or that Ctrl-C cuts short, ends no talk.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol

import msgspec
from rich.console import Console

from vnext.options import ChatCommand

GREETING = "[bold]{title}[/bold]: an empty line ends the talk, Ctrl-C an answer, /new begins anew"
ANSWER_TIMEOUT_S = 600.0
DATA_PREFIX = b"data:"
LAST_DATA = b"[DONE]"

Messages = list[dict[str, str]]


class TalkFailed(Exception):
    """An answer or a whole talk is not possible: one sentence with the remedy."""


class Talker(Protocol):
    """Whoever answers."""

    title: str

    def answer(self, messages: Messages) -> Iterator[str]:
        """Pieces of the answer as they come. Raises TalkFailed."""


def chat(command: ChatCommand) -> int:
    """Talk until the user ends it; returns the exit status."""
    console = Console(highlight=False)
    try:
        with talker(command) as other:
            talk(other, command.system, console)
    except TalkFailed as error:
        print(f"vnext chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print()
    return 0


def talker(command: ChatCommand) -> AbstractContextManager[Talker]:
    """The server at the URL, or an engine that is started now. Raises TalkFailed."""
    if command.url:
        return nullcontext(ServerTalker(command))
    from vnext.chat_engine import start_engine_talker  # torch and an engine only where no server is asked

    return start_engine_talker(command)


def talk(other: Talker, system: str, console: Console) -> None:
    """Question and answer in turn, until an empty line or the end of input."""
    console.print(GREETING.format(title=other.title))
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while words := ask(console):
        if words == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": words})
        said = show(other.answer(messages), console)
        messages.append({"role": "assistant", "content": said}) if said else messages.pop()


def ask(console: Console) -> str:
    """What the user says, "" at the end."""
    try:
        return console.input("[bold green]you[/bold green]  ").strip()
    except EOFError:
        return ""


def show(pieces: Iterator[str], console: Console) -> str:
    """Print an answer while it comes; returns it, as far as it came, and "" for one that failed."""
    said = []
    console.print("[bold blue]it[/bold blue]   ", end="")
    try:
        with closing(pieces):
            for piece in pieces:
                said.append(piece)
                console.print(piece, end="", markup=False, soft_wrap=True)
                console.file.flush()
    except TalkFailed as error:
        console.print(f"[red]{error}[/red]", end="")
        said.clear()
    except KeyboardInterrupt:
        console.print(" [dim](cut short)[/dim]", end="")
    console.print()
    return "".join(said)


class ServerTalker:
    """A server that speaks OpenAI's chat API."""

    def __init__(self, command: ChatCommand) -> None:
        self._url = command.url
        self._headers = {"Content-Type": "application/json"}
        if command.api_key:
            self._headers["Authorization"] = f"Bearer {command.api_key}"
        self._options = sampling_options(command)
        self.title = self._first_model()

    def answer(self, messages: Messages) -> Iterator[str]:
        body = {"model": self.title, "messages": messages, "stream": True} | self._options
        with self._open("/v1/chat/completions", msgspec.json.encode(body)) as response:
            for line in response:
                if line.startswith(DATA_PREFIX) and line[len(DATA_PREFIX) :].strip() != LAST_DATA:
                    yield piece_of(msgspec.json.decode(line[len(DATA_PREFIX) :]))

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            try:
                return msgspec.json.decode(response.read())["data"][0]["id"]
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                raise TalkFailed(f"{self._url} does not answer as an OpenAI server: is the URL right?") from error

    def _open(self, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        try:
            request = urllib.request.Request(self._url + path, body, self._headers)
            return urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise TalkFailed(refusal_of(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TalkFailed(f"{self._url} cannot be reached ({error}): is a server running there?") from error


def sampling_options(command: ChatCommand) -> dict[str, Any]:
    """Sampling fields that the command sets, by the names that the API and SamplingParams share."""
    fields = {"temperature": command.temperature, "max_tokens": command.max_tokens, "seed": command.seed}
    return {name: value for name, value in fields.items() if value is not None}


def piece_of(chunk: Mapping[str, Any]) -> str:
    """The text of one chunk of a stream. Raises TalkFailed for an error that came in place of one."""
    if "error" in chunk:
        raise TalkFailed(str(chunk["error"].get("message", chunk["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))


def refusal_of(error: urllib.error.HTTPError) -> str:
    """The server's own sentence where it sent one."""
    try:
        return msgspec.json.decode(error.read())["error"]["message"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"The server answered with HTTP status {error.code} ({error.reason})."
