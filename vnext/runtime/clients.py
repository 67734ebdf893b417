"""Clients of an engine core: the ROUTER socket, who asked for what, and the step from a wish to an event.

Owns the numbering of requests, their arrival times and the seeds of unseeded ones: all that is not a fact yet becomes
one here, once. A client's mistake is answered and never becomes an event.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
import zmq

from vnext.runtime.messages import (
    AbortRequests,
    EngineMessage,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    Outputs,
    RequestOutput,
    RequestRefused,
    ResetPrefixCache,
    SubmitRequest,
    client_decoder,
    encoder,
)
from vnext.state.events import (
    AbortReason,
    AnyEvent,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestId,
    unpack_tokens,
)
from vnext.state.refusal import refusal
from vnext.state.state import State

READABLE = int(zmq.POLLIN)
log = logging.getLogger(__name__)


class Clients:
    """All clients of one engine core. `root_seed` keys the requests that bring no seed."""

    def __init__(self, socket: zmq.Socket, ready: EngineReady, root_seed: int) -> None:
        self._socket = socket
        self._ready = ready
        self._root_seed = root_seed
        self._peers: set[bytes] = set()
        self._owner: dict[int, tuple[bytes, str]] = {}
        self._ids: dict[tuple[bytes, str], int] = {}
        self._said: EngineStats | None = None
        self._gone: set[bytes] = set()
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error, and so we hear of it

    def arrived(self, state: State) -> Iterator[AnyEvent]:
        """Events of all messages that have come. `state` is the one before them; ids are counted from its next."""
        next_id = state.next_id
        yield from self._forget_gone()
        while (received := self._receive()) is not None:
            peer, message = received
            self._peers.add(peer)
            match message:
                case Hello():
                    self._send(peer, self._ready)
                    self._said = None
                case SubmitRequest():
                    if (event := self._arrival(state, peer, message, next_id)) is not None:
                        next_id += 1
                        yield event
                case AbortRequests(names=names, reason=reason):
                    yield from self._abort(peer, names, reason)
                case ResetPrefixCache():
                    yield PrefixCacheReset()
                case Goodbye():
                    self._gone.add(peer)
        yield from self._forget_gone()

    def tell(self, news: Iterable[tuple[int, RequestOutput]]) -> None:
        """Outputs to those who asked; a finished request is forgotten."""
        by_peer: dict[bytes, list[RequestOutput]] = defaultdict(list)
        for id_, output in news:
            owner = self._owner.get(id_)
            if owner is None:
                continue
            by_peer[owner[0]].append(output)
            if output.finish:
                del self._ids[owner], self._owner[id_]
        for peer, told in by_peer.items():
            self._send(peer, Outputs(outputs=tuple(told)))

    def tell_stats(self, stats: EngineStats) -> None:
        """To everybody, unless nothing has changed."""
        if stats != self._said:
            self._said = stats
            self.tell_all(stats)

    def tell_all(self, message: EngineMessage) -> None:
        for peer in sorted(self._peers):
            self._send(peer, message)

    def _receive(self) -> tuple[bytes, object] | None:
        while self._socket.get(zmq.EVENTS) & READABLE:  # asking costs half of an exception, mostly there is nothing
            peer, data = self._socket.recv_multipart()
            try:
                return peer, client_decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.warning("a client's message could not be read and was dropped: %s", error)
        return None

    def _send(self, peer: bytes, message: EngineMessage) -> None:
        try:
            self._socket.send(peer, zmq.SNDMORE)
            self._socket.send(encoder.encode(message))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.add(peer)

    def _forget_gone(self) -> Iterator[RequestAborted]:
        """A client that left, with a goodbye or without a word, wants nothing any more."""
        for peer in sorted(self._gone):
            yield from self._abort(peer, [name for owner, name in self._ids if owner == peer], "client")
            self._peers.discard(peer)
        self._gone.clear()

    def _arrival(self, state: State, peer: bytes, wish: SubmitRequest, next_id: int) -> RequestArrived | None:
        sampling = wish.sampling
        if not wish.has_seed:
            sampling = msgspec.structs.replace(sampling, seed=derived_seed(self._root_seed, next_id))
        event = RequestArrived(
            id=RequestId(next_id),
            name=wish.name,
            prompt=wish.prompt,
            sampling=sampling,
            priority=wish.priority,
            arrival_ns=time.time_ns(),
            cache_salt=wish.cache_salt,
        )
        if (why_not := self._refusal(state, peer, event)) is not None:
            self._send(peer, RequestRefused(name=wish.name, message=why_not))
            return None
        self._owner[next_id] = (peer, wish.name)
        self._ids[peer, wish.name] = next_id
        return event

    def _refusal(self, state: State, peer: bytes, event: RequestArrived) -> str | None:
        if (peer, event.name) in self._ids:
            return f"a request named {event.name!r} is live already: give each request a name of its own"
        if (why_not := refusal(state.config, event)) is not None:
            return why_not
        tokens, vocabulary = unpack_tokens(event.prompt), state.config.vocab_size
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            return f"token id {wrong} is outside the model's vocabulary of {vocabulary}"
        return None

    def _abort(self, peer: bytes, names: Iterable[str], reason: AbortReason) -> Iterator[RequestAborted]:
        """A name that is not live has ended meanwhile: nothing is to be done."""
        ids = tuple(RequestId(self._ids[peer, name]) for name in names if (peer, name) in self._ids)
        if ids:
            yield RequestAborted(ids=ids, reason=reason)


def derived_seed(root_seed: int, request_id: int) -> int:
    """The uint64 key of an unseeded request: unrelated for every request, the same in every run of one root."""
    data = root_seed.to_bytes(8, "little") + request_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
