"""Replay: the outputs of a resumed stream up to the event that its client has. They make the answer, and no events."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from vnext.runtime.protocol.merged_output import MergedOutput
from vnext.runtime.protocol.messages import RequestOutput
from vnext.server.answers.resuming import EventIds
from vnext.server.context.errors import OtherSystem

TOKEN_BYTES = 4


class Choice(Protocol):
    """As in generation.py."""

    index: int
    finished: bool
    answer: object


class Taker(Protocol):
    """Passes outputs on to a reader."""

    def choice_of(self, name: str) -> Choice: ...

    def take(self, choice: Choice, output: RequestOutput) -> bool: ...

    def token(self, name: str, token: int) -> bool: ...


class Replay:
    """Takes a resumed stream's outputs. Mutable."""

    def __init__(self, taker: Taker, ids: EventIds) -> None:
        self._taker, self._ids = taker, ids
        self._held: dict[int, MergedOutput] = {}

    def token(self, name: str, token: int) -> bool:
        if not self._ids.lacking:
            return self._taker.token(name, token)
        return self.output(RequestOutput(name=name, tokens=token.to_bytes(TOKEN_BYTES, "little")))

    def output(self, output: RequestOutput) -> bool:
        return self.take(self._taker.choice_of(output.name), output)

    def take(self, choice: Choice, output: RequestOutput) -> bool:
        """As Taker. Raises OtherSystem for an answer that ends before its client's place."""
        if choice.finished:  # by a stop string, whose abort comes back while the events of the end are made
            return True
        if self._ids.cached_tokens is not None:  # what the client has been told
            output = replace(output, cached_tokens=self._ids.cached_tokens)
        reached = self._ids.lacking.get(choice.index)
        if reached is None or (not output.tokens and not output.finish):
            return self._taker.take(choice, output)
        if reached.has_ended:
            self._taker.take(choice, output)
            if choice.finished:
                self._ids.skip(choice.index, 0)
            return True
        if (lacks := reached.tokens - choice.answer.token_count) > 0:
            head, rest = split(output, lacks)
            self._taker.take(choice, head)
            if choice.finished:
                raise OtherSystem("The answer ends before the event that Last-Event-ID names: begin anew without the header.")
            if choice.answer.token_count < reached.tokens:
                return True
            output = rest
        return self._behind(choice, output)

    def _behind(self, choice: Choice, output: RequestOutput | None) -> bool:
        """Take in what follows the tokens that the client has seen to the end; None for nothing yet."""
        reached = self._ids.lacking[choice.index]
        if reached.events:
            held = self._held.setdefault(choice.index, MergedOutput())
            if output is not None:
                held.add(output)
            if output is None or len(held.tokens) < reached.more * TOKEN_BYTES:
                return True
            found = held.merged(output.name)
            found, output = (found, None) if reached.ends else split(found, reached.more)
            self._ids.skip(choice.index, reached.events)
            is_ready = self._taker.take(choice, found)
        else:
            self._ids.skip(choice.index, 0)
            is_ready = True
        return is_ready if output is None else self._taker.take(choice, output)


def split(output: RequestOutput, count: int) -> tuple[RequestOutput, RequestOutput | None]:
    """The first `count` tokens of an output, and the rest of it, None where nothing is left."""
    size = count * TOKEN_BYTES
    if len(output.tokens) < size or (len(output.tokens) == size and not output.finish):
        return output, None
    head = replace(
        output, tokens=output.tokens[:size], logprobs=output.logprobs[:count], finish="", stop_token=-1, retained=None, error="",
        ticket="",
    )  # fmt: skip
    return head, replace(output, tokens=output.tokens[size:], logprobs=output.logprobs[count:], prompt=(), queue_seconds=0.0)
