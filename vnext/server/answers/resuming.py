"""Resuming: the ids of a stream's events, and a stream that goes on behind the event that its client has.

Nothing is kept for it. The client sends its request again, and the same request with the same seed gives the same tokens wherever
the same system computes it; so it is computed from its beginning, and the events up to the client's last one are left out. Owns the
seed of a stream that brings none; stream_ids.py refuses an id that belongs to another request or another system.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from vnext.server.context.identity import answer_id
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.event_ids import LastEvent, Origin, Reached, last_event, with_id
from vnext.text.answer import Answer

CACHED_MAX = 2**24 - 1


class Choice(Protocol):
    """As in generation.py."""

    answer: Answer


class Call(msgspec.Struct, frozen=True):
    """One call of a client. `id`: its answer's. `seed`: of a stream, where the body has none. `last`: of a stream that the client
    picks up again. `names` begin those of its requests to the engine."""

    id: str
    created_s: int
    names: str
    seed: int | None = None
    last: LastEvent | None = None


def call_of(request: web.Request, kind: str, streams: bool | None) -> Call:
    """The call of a request; a stream that goes on keeps its ids. Raises InvalidRequest."""
    last = last_event(request.headers) if streams else None
    if last is None:
        id_ = answer_id(request, kind)
        return Call(id_, int(time.time()), id_, request.app[SERVER_CONTEXT].draw_seed() if streams else None)
    id_ = f"{kind}-{last.origin.answer}"
    return Call(id_, last.origin.created_s, f"{id_}-{secrets.token_hex(4)}", last.origin.seed, last)


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
