"""Fitting: an answer to as much of a chat as the model's context holds.

An answer without a bound of its own gets a share of the context, so that it leaves room for the next question. Where a question
does not fit, the answer gets what is left, and then the oldest questions with their answers are left out of what is sent.
"""

from __future__ import annotations

from collections.abc import Generator

from vnext.commands.chat.talker import Messages, Sampling, Talker, TalkTooLong

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
