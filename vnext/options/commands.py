"""Commands: the first word after `vnext`. Owns the programs behind these words and the hints for words that are none."""

from __future__ import annotations

from pathlib import Path

from vnext.base.spelling import close_to

COMMANDS = ("serve", "chat", "batch", "restart", "router", "doctor")
PROGRAMS = {"bench": "vnext.commands.bench.cli", "replay": "vnext.replay.cli.main"}
"""Commands that are separate programs too: `vnext bench` is `vnext-bench`."""
HELP, VERSION = "help", "version"
CUTOFF = 0.75
"""The similarity that a misspelling needs. It is low because the words are short: sevre is serve."""
ELSEWHERE = {
    "start": "serve", "server": "serve", "api-server": "serve", "complete": "chat", "talk": "chat",
    "collect-env": "doctor", "env": "doctor", "info": "doctor", "check": "doctor", "benchmark": "bench", "reload": "restart",
    "proxy": "router", "route": "router",
    "run-batch": "batch", "throughput": "bench throughput", "latency": "bench latency", "log": "replay", "logs": "replay",
}  # fmt: skip
"""Other engines' commands and similar words -> the command here."""
TALK = "`vnext chat MODEL` talks with a model in the terminal, and `vnext serve MODEL` serves it over HTTP"
FETCH = "`vnext serve MODEL` downloads a model of the hub at its first start, and `hf download MODEL` does that alone"
LIST = "models lie in the hub's cache, which `hf cache ls` lists; a server names its own at /v1/models"
STOP = "Ctrl-C or SIGTERM stops a server, and `vnext restart` replaces its engine"
DELETE = "models lie in the hub's cache, from which `hf cache rm` removes them"
ANSWERS = {
    "run": TALK, "pull": FETCH, "download": FETCH, "get": FETCH, "list": LIST, "ls": LIST, "ps": LIST, "models": LIST, "show": LIST,
    "stop": STOP, "kill": STOP, "rm": DELETE, "delete": DELETE,
}  # fmt: skip
"""Ollama's commands and their like -> what to do instead."""


def unknown_word(word: str) -> str:
    """The sentence about a first word that is not a command."""
    everything = (*COMMANDS, *PROGRAMS, HELP, VERSION)
    if word.startswith("-"):
        return f"name a command before {word}: {', '.join(everything)}."
    if answer := ANSWERS.get(word):
        return f"there is no command {word}: {answer}."
    if meant := ELSEWHERE.get(word) or close_to(word, everything, CUTOFF):
        return f"there is no command {word}: did you mean `vnext {meant}`?"
    if "/" in word or Path(word).is_dir():
        return f"there is no command {word}: did you mean `vnext serve {word}`?"
    return f"there is no command {word}: choose from {', '.join(everything)}."
