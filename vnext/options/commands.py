"""Commands: the first word after `vnext`. Owns the programs behind these words and the hints for words that are none."""

from __future__ import annotations

from pathlib import Path

from vnext.options.hints import close_to

COMMANDS = ("serve", "chat", "batch", "restart", "router", "doctor")
PROGRAMS = {"bench": "vnext.bench.cli", "replay": "vnext.replay.cli.main"}
"""Commands that are separate programs too: `vnext bench` is `vnext-bench`."""
HELP, VERSION = "help", "version"
CUTOFF = 0.75
"""The similarity that a misspelling needs. It is low because the words are short: sevre is serve."""
ELSEWHERE = {
    "run": "serve", "start": "serve", "server": "serve", "api-server": "serve", "complete": "chat", "talk": "chat",
    "collect-env": "doctor", "env": "doctor", "info": "doctor", "check": "doctor", "benchmark": "bench", "reload": "restart",
    "proxy": "router", "route": "router",
    "run-batch": "batch", "throughput": "bench throughput", "latency": "bench latency", "log": "replay", "logs": "replay",
}  # fmt: skip
"""Other engines' commands and similar words -> the command here."""


def unknown_word(word: str) -> str:
    """The sentence about a first word that is not a command."""
    everything = (*COMMANDS, *PROGRAMS, HELP, VERSION)
    if word.startswith("-"):
        return f"name a command before {word}: {', '.join(everything)}."
    if meant := ELSEWHERE.get(word) or close_to(word, everything, CUTOFF):
        return f"there is no command {word}: did you mean `vnext {meant}`?"
    if "/" in word or Path(word).is_dir():
        return f"there is no command {word}: did you mean `vnext serve {word}`?"
    return f"there is no command {word}: choose from {', '.join(everything)}."
