"""Talkers: the interface of the model side of a chat, and its errors."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from vnext.options.reader import ChatCommand
from vnext.runtime.protocol.sampling_params import InvalidRequest, SamplingParams

Messages = list[dict[str, str]]
Sampling = Mapping[str, Any]
"""Fields of SamplingParams that the chat sets; the API uses the same names."""


class TalkFailed(Exception):
    """An answer or the whole chat is impossible: one sentence with the remedy."""


class TalkRefused(TalkFailed):
    """No chat can begin with the given model, setting, URL or key."""


class TalkTooLong(TalkFailed):
    """The messages and the answer are more than the model's context holds."""


TOO_LONG = "context_length_exceeded"
"""The code of such an error, of a server and of an engine."""


class Talker(Protocol):
    """The model side of a chat: a server or an engine. `context`: the tokens of the longest chat with its answer, 0 for unknown."""

    title: str
    context: int

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
