"""Resuming: the ids of a stream's events, and a stream that goes on behind the event that its client has.

Nothing is kept for it. The client sends its request again, and the same request with the same seed gives the same tokens wherever
the same system computes it; so it is computed from its beginning: the outputs up to the client's last event make the answer, and
no events. `call` reads the id that a client sends; writing.py refuses one that belongs to another request or another system.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from vnext.runtime.protocol.merged_output import MergedOutput
from vnext.runtime.protocol.messages import RequestOutput
from vnext.server.context.errors import OtherSystem
from vnext.server.http.event_ids import LastEvent, Origin, Reached, with_id
from vnext.text.answer import Answer

CACHED_MAX = 2**24 - 1
TOKEN_BYTES = 4


class EventIds:
    """Gives events their ids, and leaves out those that the client has. Mutable.

    `by_token`: what an event shows depends on how its tokens came, so each is to come alone. `is_single`: there is one choice.
    """

    def __init__(self, origin: Origin, choices: Sequence[Choice], last: LastEvent | None, by_token: bool) -> None:
        self.by_token, self.is_single = by_token, len(choices) == 1
        self._origin, self._choices = origin, choices
        self._request = b"" if last is None else f"{last.origin.written()}.".encode()
        self._written = [b"0"] * len(choices) if last is None else [each.encode() for each in last.written]
        self._has_ended, self._has_closing = last is not None and last.all_ended, 0 if last is None else last.closing
        self.lacking: dict[int, Reached] = {}
        """By choice: what the client has of those whose events are left out so far."""
        if last is not None:
            self.lacking = {index: each for index, each in enumerate(last.choices) if not each.is_begin}
        self._skipped: dict[int, int] = {}
        self.cached_tokens = last.origin.cached_tokens if last is not None and self.is_single else None

    @property
    def request(self) -> bytes:
        """REQUEST and its dot. It is first asked for when the first output has come."""
        if not self._request:
            cached = min(self._choices[0].answer.cached_token_count, CACHED_MAX) if self.is_single else 0
            self._request = f"{msgspec.structs.replace(self._origin, cached_tokens=cached).written()}.".encode()
        return self._request

    def skip(self, index: int, events: int) -> None:
        """From now on show a choice's events, but for the first of them."""
        del self.lacking[index]
        self._skipped[index] = events

    def of_delta(self, index: int, begin: int, end: int, has_ended: bool, events: list[bytes]) -> list[bytes]:
        """The events of a choice's tokens from `begin` to `end`, with their ids, as far as the client lacks them."""
        if index in self.lacking:
            return []
        mark, found = b"e" if has_ended else b"", []
        for shown, event in enumerate(events, 1):
            part = b"%d+%d%b*%d" % (begin, end - begin, mark, shown) if shown < len(events) else b"%d%b" % (end, mark)
            self._written[index] = part
            found.append(with_id(event, self.request + b",".join(self._written)))
        if skipped := self._skipped.get(index, 0):
            self._skipped[index] = max(0, skipped - len(found))
            return found[skipped:]
        return found

    def has_all(self, closing: int) -> bool:
        """Whether the client has all choices to their ends, and so many events behind them."""
        return self._has_ended and self._has_closing >= closing

    def closing(self, event: bytes, number: int = 0) -> list[bytes]:
        """An event behind all choices' ends, the first one or that of another number, with its id; none where the client has it."""
        if number < self._has_closing:
            return []
        return [with_id(event, b"%b%b/%d" % (self.request, b",".join(self._written), number + 1))]


class Choice(Protocol):
    """As in generation.py."""

    index: int
    finished: bool
    answer: Answer


AnyChoice = TypeVar("AnyChoice", bound=Choice)


class Taker(Protocol[AnyChoice]):
    """Passes outputs on to a reader."""

    def choice_of(self, name: str) -> AnyChoice: ...

    def take(self, choice: AnyChoice, output: RequestOutput) -> bool: ...

    def token(self, name: str, token: int) -> bool: ...


class Replay(Generic[AnyChoice]):
    """Takes a resumed stream's outputs. Mutable."""

    def __init__(self, taker: Taker[AnyChoice], ids: EventIds) -> None:
        self._taker, self._ids = taker, ids
        self._held: dict[int, MergedOutput] = {}

    def token(self, name: str, token: int) -> bool:
        if not self._ids.lacking:
            return self._taker.token(name, token)
        return self.output(RequestOutput(name=name, tokens=token.to_bytes(TOKEN_BYTES, "little")))

    def output(self, output: RequestOutput) -> bool:
        return self.take(self._taker.choice_of(output.name), output)

    def take(self, choice: AnyChoice, output: RequestOutput) -> bool:
        """As Taker. Raises OtherSystem for an answer that ends before its client's place."""
        if is_over(choice):  # by a stop string, whose abort comes back while the events of the end are made
            return True
        if self._ids.cached_tokens is not None:  # what the client has been sent
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
            return self._behind(choice, rest)
        return self._behind(choice, output)

    def _behind(self, choice: AnyChoice, output: RequestOutput | None) -> bool:
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


def is_over(choice: Choice) -> bool:
    """Whether it has ended by now."""
    return choice.finished


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
