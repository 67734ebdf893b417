"""Talkers: whoever answers in a terminal talk, and how one fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from vnext.options import ChatCommand
from vnext.sampling_params import InvalidRequest, SamplingParams, validate

Messages = list[dict[str, str]]


class TalkFailed(Exception):
    """An answer or a whole talk is not possible: one sentence with the remedy."""


class TalkRefused(TalkFailed):
    """No talk can begin with what was given: a model, a setting, a URL, a key."""


class Talker(Protocol):
    """Whoever answers."""

    title: str

    def answer(self, messages: Messages) -> Iterator[str]:
        """Pieces of the answer as they come. Raises TalkFailed."""


def require_sampling(command: ChatCommand) -> None:
    """Raise TalkRefused for sampling that every answer would refuse."""
    try:
        validate(SamplingParams(**sampling_options(command)), vocab_size=0)
    except InvalidRequest as error:
        raise TalkRefused(error.message) from error


def sampling_options(command: ChatCommand) -> dict[str, Any]:
    """Sampling fields that the command sets, by the names that the API and SamplingParams share."""
    fields = {"temperature": command.temperature, "max_tokens": command.max_tokens, "seed": command.seed}
    return {name: value for name, value in fields.items() if value is not None}
