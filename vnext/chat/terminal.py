"""`vnext chat`: a talk in the terminal, with a running server or with an engine of its own.

Owns the conversation and what the terminal shows. An answer that fails, or that Ctrl-C cuts short, ends no talk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext

from rich.console import Console

from vnext.chat.server import ServerTalker
from vnext.chat.talker import Messages, Talker, TalkFailed, TalkRefused, require_sampling
from vnext.exits import DONE, FAILED, REFUSED
from vnext.options import ChatCommand

GREETING = "[bold]{title}[/bold]: an empty line ends the talk, Ctrl-C an answer, /new begins anew"


def chat(command: ChatCommand) -> int:
    """Talk until the user ends it; returns the exit status (exits.py)."""
    console = Console(highlight=False)
    try:
        with talker(command) as other:
            talk(other, command.system, console)
    except TalkFailed as error:
        print(f"vnext chat: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, TalkRefused) else FAILED
    except KeyboardInterrupt:
        console.print()
    return DONE


def talker(command: ChatCommand) -> AbstractContextManager[Talker]:
    """The server at the URL, or an engine that is started now. Raises TalkFailed."""
    require_sampling(command)
    if command.url:
        return nullcontext(ServerTalker(command))
    from vnext.chat.engine import start_engine_talker  # torch and an engine only where no server is asked

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
