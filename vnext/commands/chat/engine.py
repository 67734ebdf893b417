"""EngineTalker: the model side of `vnext chat` without a server, an engine that lives as long as the chat.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from msgspec.structs import asdict, replace

from vnext.api.llm import LLM
from vnext.commands.chat.talker import TOO_LONG, Messages, Sampling, Talker, TalkFailed, TalkRefused, TalkTooLong
from vnext.options.reader import ChatCommand
from vnext.runtime.client.output_stream import EngineDead, Refused
from vnext.runtime.processes.launch import StartFailed, StartRefused
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.files import CheckpointUnreadable


class EngineTalker:
    """An LLM as a talker."""

    def __init__(self, llm: LLM, title: str, context: int = 0) -> None:
        self._llm = llm
        self.title, self.context = title, context

    def answer(self, messages: Messages, sampling: Sampling) -> Generator[str, None, int]:
        try:
            params = replace(self._llm.get_default_sampling_params(), **{"max_tokens": None, **sampling})
            return (yield from self._llm.stream_chat(messages, params))
        except (InvalidRequest, Refused, EngineDead) as error:
            raise (TalkTooLong if getattr(error, "code", None) == TOO_LONG else TalkFailed)(str(error)) from error


@contextmanager
def start_engine_talker(command: ChatCommand) -> Iterator[EngineTalker]:
    """Start an engine for this chat. Raises TalkFailed, TalkRefused."""
    try:
        llm = LLM(**asdict(command.engine))
    except (StartRefused, CheckpointUnreadable) as error:
        raise TalkRefused(str(error)) from error
    except (StartFailed, ChildDied, EngineDead) as error:
        raise TalkFailed(str(error)) from error
    with llm:
        yield EngineTalker(llm, command.engine.model or "the demo model", llm.ready.config.max_model_len)


# ---- an answer to as much of a chat as the context holds ---------------------------------------------------------
# Fitting: an answer to as much of a chat as the model's context holds.
#
# An answer without a bound of its own gets a share of the context, so that it leaves room for the next question. Where a question
# does not fit, the answer gets what is left, and then the oldest questions with their answers are left out of what is sent.


ANSWER_SHARE = 4
"""One part in so many of the context is an answer's."""


class Fitting:
    """One answer, by `pieces`. `left_out`: the number of messages that no longer fit."""

    def __init__(self, other: Talker, messages: Messages, sampling: Sampling) -> None:
        self._other, self._messages, self._sampling = other, list(messages), dict(sampling)
        self.left_out = 0
        if other.context:
            self._sampling.setdefault("max_tokens", max(1, other.context // ANSWER_SHARE))

    def pieces(self) -> Generator[str, None, int]:
        """As Talker.answer; raises TalkTooLong where the last question alone is too long."""
        while True:
            try:
                return (yield from self._other.answer(self._messages, self._sampling))
            except TalkTooLong:
                if self._sampling.pop("max_tokens", None) is None and not self._leave_out():
                    raise

    def _leave_out(self) -> bool:
        """Drop the oldest question and its answer; returns whether there was one before the last."""
        begin = int(self._messages[0]["role"] == "system")
        if len(self._messages) <= begin + 2:
            return False
        del self._messages[begin : begin + 2]
        self.left_out += 2
        return True
