"""Conversation: the messages so far, the sampling settings, and the commands that change them, such as /set.

Owns the table of commands. Prints nothing and calls no model: a command returns a Reply for the caller to act on.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from vnext.base.spelling import reason
from vnext.commands.chat.talker import Messages, TalkRefused, require_sampling
from vnext.runtime.protocol.sampling_params import PARAMETERS, SamplingParams

SETTABLE = (*PARAMETERS, "max_tokens", "min_tokens", "seed", "stop")
USUAL = ("", "none", "default")
"""Values of /set that reset a setting."""


class Conversation:
    """`turns` are the messages of user and model, in pairs; `question` is the latest question, "" for none yet; `replaced` is
    the pair that /retry is asking again."""

    def __init__(self, title: str, system: str = "", sampling: Mapping[str, Any] | None = None) -> None:
        self.title = title
        self.system = system
        self.sampling = dict(sampling or {})
        self.turns: Messages = []
        self.question = ""
        self.replaced: Messages = []
        self.shows_speed = False

    def messages(self) -> Messages:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, words: str) -> Messages:
        """Add a question; returns the messages to send. The caller then calls `answered`."""
        self.question = words
        self.turns.append({"role": "user", "content": words})
        return self.messages()

    def answered(self, text: str) -> None:
        """Keep the answer. If it is empty, drop the question and restore the pair that /retry removed."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns[-1:] = self.replaced
        self.replaced = []


class Reply(NamedTuple):
    """The result of a command: text to print, a question to ask again, or the end."""

    say: str = ""
    ask: str = ""
    leave: bool = False


class Command(NamedTuple):
    """One command, its alternative names and its line in /help."""

    names: tuple[str, ...]
    argument: str
    help: str
    run: Callable[[Conversation, str], Reply]


def is_command(words: str) -> bool:
    """Whether a message is a command: a slash and a word. A path goes to the model."""
    return re.match(r"/[a-z?]*(\s|$)", words) is not None


def obey(talk: Conversation, words: str) -> Reply:
    """Run a command. Its errors are one sentence in the reply."""
    name, _, argument = words.partition(" ")
    command = BY_NAME.get(name)
    if command is None:
        close = difflib.get_close_matches(name, BY_NAME, n=1)
        meant = f"did you mean {close[0]}?" if close else "/help lists all commands."
        return Reply(f"there is no command {name}: {meant}")
    return command.run(talk, argument.strip())


def _help(talk: Conversation, argument: str) -> Reply:
    rows = [(" or ".join(command.names) + f" {command.argument}".rstrip(), command.help) for command in COMMANDS]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {right}" for left, right in rows]
    return Reply("\n".join([*lines, "A line that ends with \\ goes on; three quotes begin and end a message of several lines."]))


def _clear(talk: Conversation, argument: str) -> Reply:
    talk.turns.clear()
    talk.question = ""
    return Reply("a new talk")


def _system(talk: Conversation, argument: str) -> Reply:
    if argument:
        talk.system = "" if argument == "none" else argument
    return Reply(f"system: {talk.system or 'none'}")


def _retry(talk: Conversation, argument: str) -> Reply:
    if not talk.question:
        return Reply("nothing has been asked yet")
    if talk.turns and talk.turns[-2]["content"] == talk.question:  # else it was not answered
        talk.replaced, talk.turns[-2:] = talk.turns[-2:], []
    return Reply(ask=talk.question)


def _save(talk: Conversation, argument: str) -> Reply:
    if not argument:
        return Reply("name a file, as /save talk.json")
    whole = {"model": talk.title, "sampling": talk.sampling, "messages": talk.messages()}
    try:
        with Path(argument).expanduser().open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    except FileExistsError:
        return Reply(f"{argument} is there already: name another file")
    except (OSError, RuntimeError) as error:
        return Reply(f"{argument} cannot be written ({reason(error)}): name another file")
    return Reply(f"{len(talk.turns)} messages are in {argument}")


def _set(talk: Conversation, argument: str) -> Reply:
    try:
        changed = dict(talk.sampling)
        for word in shlex.split(argument):
            _change(changed, *word.partition("="))
        require_sampling(changed)
    except (TalkRefused, ValueError) as error:
        return Reply(str(error))
    talk.sampling = changed
    return Reply(" ".join(f"{name}={value}" for name, value in changed.items()) or "everything is the model's default")


def _change(sampling: dict[str, Any], name: str, equals: str, value: str) -> None:
    """One `name=value`. Raises TalkRefused."""
    if name not in SETTABLE or not equals:
        raise TalkRefused(f"/set takes name=value, and the names are {', '.join(SETTABLE)}")
    if value.lower() in USUAL:
        sampling.pop(name, None)
        return
    try:
        sampling[name] = msgspec.convert(value, get_type_hints(SamplingParams)[name], strict=False)
    except msgspec.ValidationError as error:
        raise TalkRefused(f"{name} is {value!r}: it must be a number") from error


def _speed(talk: Conversation, argument: str) -> Reply:
    talk.shows_speed = not talk.shows_speed
    return Reply(f"the speed of answers is {'shown' if talk.shows_speed else 'hidden'}")


def _exit(talk: Conversation, argument: str) -> Reply:
    return Reply(leave=True)


COMMANDS = (
    Command(("/help", "/?"), "", "show this list", _help),
    Command(("/clear", "/reset", "/new"), "", "forget the conversation and start again", _clear),
    Command(("/system",), "TEXT", "set the system message; none removes it", _system),
    Command(("/retry",), "", "ask the last question again", _retry),
    Command(("/set",), "NAME=VALUE", "set temperature or another parameter; alone it shows them, NAME= resets one", _set),
    Command(("/speed", "/stats"), "", "show or hide tokens per second after each answer", _speed),
    Command(("/save",), "FILE", "write the conversation as JSON", _save),
    Command(("/exit", "/quit", "/bye"), "", "leave, as Ctrl-D does", _exit),
)
BY_NAME = {name: command for command in COMMANDS for name in command.names}
