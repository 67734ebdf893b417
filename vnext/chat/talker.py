"""Talkers: the interface of the model side of a chat, and its errors."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from vnext.options.reader import ChatCommand
from vnext.sampling_params import InvalidRequest, SamplingParams

Messages = list[dict[str, str]]
Sampling = Mapping[str, Any]
"""Fields of SamplingParams that the chat sets; the API uses the same names."""


class TalkFailed(Exception):
    """An answer or the whole chat is impossible: one sentence with the remedy."""


class TalkRefused(TalkFailed):
    """No chat can begin with the given model, setting, URL or key."""


class Talker(Protocol):
    """The model side of a chat: a server or an engine."""

    title: str

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str, None, int]:
        """Yield pieces of the answer as they come; the generator returns the number of its tokens. Raises TalkFailed."""


def require_sampling(sampling: Sampling) -> None:
    """Raise TalkRefused for sampling that every answer would refuse."""
    try:
        SamplingParams(**sampling)
    except InvalidRequest as error:
        raise TalkRefused(error.message) from error


def sampling_options(command: ChatCommand) -> dict[str, Any]:
    """Sampling fields that the command sets."""
    fields = {"temperature": command.temperature, "max_tokens": command.max_tokens, "seed": command.seed}
    return {name: value for name, value in fields.items() if value is not None}
