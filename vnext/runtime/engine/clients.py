"""Clients of an engine core: the ROUTER socket, which client asked for which request, and how a message becomes an event.

Owns the numbering of requests, their arrival times and the seeds of unseeded requests: everything that is not a fact yet
becomes one here, once. A client's mistake gets an answer and never becomes an event. A client that does not read delays no
other: the messages it has yet to receive are merged.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import zmq

from vnext.runtime.batch.fed import stop_ids
from vnext.runtime.engine.owners import News, Owners
from vnext.runtime.engine.trials import DEATHS_MIN, Trials
from vnext.runtime.processes.run_dir import PROGRESS, CoreNotes
from vnext.runtime.protocol.merged_output import MergedOutput
from vnext.runtime.protocol.messages import (
    AbortRequests,
    AdapterFiles,
    ClientMessage,
    EngineMessage,
    EngineReady,
    EngineStats,
    Events,
    Goodbye,
    Hello,
    Operate,
    Operated,
    Outputs,
    Ping,
    Pong,
    RequestRefused,
    ResetPrefixCache,
    SubmitRequest,
    Subscribe,
    derived_seed,
    encoder,
)
from vnext.runtime.protocol.reasons import ENCODES, IMAGES, NO_HEAD, SOUNDS
from vnext.runtime.protocol.stats import CacheMiss
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AbortReason,
    AnyEvent,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestId,
    RequestResumed,
    generated_by,
    unpack_tokens,
)
from vnext.state.feasibility import refusal
from vnext.state.params import NO_POOLING, Constraint, Sampling
from vnext.state.state import State
from vnext.state.store.inputs import has_inputs, inputs_in

READABLE = int(zmq.POLLIN)
MORE_AT_ONCE = int(zmq.SNDMORE | zmq.NOBLOCK)  # combining the enums for each message would cost time
MESSAGES_AHEAD_MAX = 1000
"""Messages sent to a client and not yet read; beyond this number they are merged."""
NO_NOTES = CoreNotes("")
client_decoder = msgspec.msgpack.Decoder(ClientMessage)
log = logging.getLogger(__name__)


class Asked(msgspec.Struct):
    """What clients have asked for that is no event, for those who do it: `operations`, and event streams, or none any more
    (`subscribed`). Of the requests that arrived: the files of their adapters, by digest; those whose blocks are to leave, and the
    tickets of those whose prompts, or whose inputs, another engine has computed, each None where the engine hands over, or takes,
    nothing."""

    operations: list[tuple[bytes, Operate]] = []
    subscribed: list[tuple[bytes, bool]] = []
    adapter_files: dict[str, AdapterFiles] = {}
    to_hand_over: set[int] | None = None
    tickets: dict[int, str] | None = None
    inputs_tickets: dict[int, str] | None = None


class Clients:
    """All clients of one engine core. `root_seed` keys the requests that bring no seed. The SNDHWM of `socket` bounds the
    messages in transit to each client. `notes`: for those who start the next engine core. One that `follows` another drops the
    messages of clients that have not said hello: their transport had kept them for the one before.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], ready: EngineReady, root_seed: int, notes: CoreNotes = NO_NOTES, follows: bool = False
    ) -> None:
        self._socket = socket
        self._ready = ready
        self._root_seed = root_seed
        self._peers: set[bytes] = set()
        self._owners = Owners()
        self._sent_stats: EngineStats | None = None
        self._gone: set[bytes] = set()
        self._backlogs: dict[bytes, Backlog] = {}
        self.notes, self._follows = notes, follows
        self._trials = Trials(notes)
        self._has_sent_tokens = False
        self.asked = Asked()
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone raises an error, which tells us that it left

    def arrived(self, state: State, ready: Collection[object] | None = None) -> Iterator[AnyEvent]:
        """Events of all messages that have arrived. `state` precedes them; ids are counted from its next id.

        `ready` is what a poller reported; nothing has arrived unless our socket is in it.
        """
        next_id = state.next_id
        if self._backlogs:
            self._catch_up()
        if self._gone:
            yield from self._forget_gone()
        for peer, message in self._received() if ready is None or self._socket in ready else ():
            if self._follows and peer not in self._peers and not isinstance(message, Hello):
                continue
            self._peers.add(peer)
            match message:
                case Hello():
                    self._send(peer, self._ready)
                    self._sent_stats = None
                case SubmitRequest():
                    if message.deaths >= DEATHS_MIN:
                        self._trials.queue.append((peer, message))
                    elif (event := self._arrival(state, peer, message, next_id)) is not None:
                        next_id += 1
                        yield event
                case AbortRequests(names=names, reason=reason):
                    yield from self._abort(peer, names, reason)
                case Operate():
                    self.asked.operations.append((peer, message))
                case ResetPrefixCache():
                    yield PrefixCacheReset()
                case Subscribe(is_on=is_on):
                    self.asked.subscribed.append((peer, is_on))
                case Ping():
                    self._send(peer, Pong())
                case Goodbye():
                    self._gone.add(peer)
        if self._gone:
            yield from self._forget_gone()
        if self._trials.queue:
            yield from self._suspects(state, next_id)

    def _suspects(self, state: State, next_id: int) -> Iterator[AnyEvent]:
        """Arrivals of requests that may be tried now."""
        while (suspect := self._trials.next()) is not None:
            peer, message = suspect
            if (event := self._arrival(state, peer, message, next_id)) is not None:
                self._trials.admit(next_id, message.name, is_next=not state.waiting and next_id == state.next_id)
                next_id += 1
                yield event

    def tell(self, news: Iterable[News]) -> None:
        """Send each event's outputs to the clients that asked for them; forget finished requests."""
        for each in news:
            for peer, letter in self._owners.letters(each):
                self._send(peer, letter)
            if self._trials.on_trial is not None:
                self._trials.heard(each)
            if not self._has_sent_tokens and each[0] is not None:
                self.notes.write(PROGRESS)
                self._has_sent_tokens = True

    def answer(self, peer: bytes, message: Operated) -> None:
        """Answer an operation, unless its client has left."""
        if peer in self._peers:
            self._send(peer, message)

    def stream(self, peer: bytes, data: bytes) -> bool:
        """Send a part of an event stream. Returns False if the stream ends here: its client has left or does not read."""
        if peer in self._peers and peer not in self._backlogs and self._is_sent(peer, Events(data=data)):
            return peer not in self._gone
        if peer in self._peers:
            self._send(peer, Events(data=b""))
        return False

    def begun(self, ids: Collection[int], missed: Mapping[int, CacheMiss]) -> None:
        """These requests have been planned into their first step; `missed` of some prompts."""
        self._owners.begun(ids, missed)
        if self._trials.on_trial is not None:
            self._trials.begun(ids)

    def tell_stats(self, stats: EngineStats) -> None:
        """Send statistics to every client, unless nothing has changed."""
        if stats != self._sent_stats:
            self._sent_stats = stats
            self.tell_all(stats)

    @property
    def is_behind(self) -> bool:
        """Whether there is work that no event reports: a client has not read its messages yet, or a suspect may be tried."""
        return bool(self._backlogs or (self._trials.queue and self._trials.are_due))

    def tell_all(self, message: EngineMessage) -> None:
        for peer in sorted(self._peers):
            self._send(peer, message)

    def _received(self) -> Iterator[tuple[bytes, ClientMessage]]:
        while int(self._socket.get(zmq.EVENTS)) & READABLE:  # mostly nothing is there, and asking costs half of an exception
            yield from read_messages(self._socket.recv_multipart())

    def _send(self, peer: bytes, message: EngineMessage) -> None:
        if (backlog := self._backlogs.get(peer)) is not None:
            backlog.add(message)
        elif not self._is_sent(peer, message):
            self._backlogs[peer] = backlog = Backlog()
            backlog.add(message)

    def _is_sent(self, peer: bytes, message: EngineMessage) -> bool:
        """Whether the message was sent. False, with nothing sent, if the client does not read."""
        try:
            self._socket.send(peer, MORE_AT_ONCE)
            self._socket.send(encoder.encode(message))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.add(peer)
        return True

    def _catch_up(self) -> None:
        """Send merged messages to clients that read again."""
        backlogs, self._backlogs = self._backlogs, {}
        for peer, backlog in backlogs.items():
            for message in backlog.messages():
                self._send(peer, message)

    def _forget_gone(self) -> Iterator[RequestAborted]:
        """Abort the requests of clients that have left, with a goodbye or without."""
        for peer in sorted(self._gone):
            yield from self._abort(peer, self._owners.names_of(peer), "client")
            self._trials.forget(peer)
            self._peers.discard(peer)
        self._gone.clear()

    def _arrival(self, state: State, peer: bytes, wish: SubmitRequest, next_id: int) -> RequestArrived | None:
        adapter, sampling = wish.adapter.digest if wish.adapter else "", wish.sampling
        if sampling.adapter != adapter:
            sampling = msgspec.structs.replace(sampling, adapter=adapter)
        if not wish.has_seed:
            sampling = msgspec.structs.replace(sampling, seed=derived_seed(self._root_seed, next_id))
        kind = partial(RequestResumed, generated=wish.generated) if wish.deaths else RequestArrived
        event = kind(
            id=RequestId(next_id),
            name=wish.name,
            prompt=wish.prompt,
            sampling=sampling,
            priority=wish.priority if state.clients is None else max(wish.priority, 0),
            arrival_ns=time.time_ns(),
            cache_salt=wish.cache_salt,
            client=wish.client,
            weight=wish.weight,
        )
        if (ENCODES in self._ready.environment) != wish.encodes:
            why_not: str | None = "this engine only encodes images and sounds for others: ask one of another role"
        else:
            why_not = self._refusal(state, peer, event)
        if why_not is not None:
            self._send(peer, RequestRefused(name=wish.name, message=why_not))
            return None
        self._owners.add(peer, wish.name, next_id)
        if wish.adapter is not None:
            self.asked.adapter_files[adapter] = wish.adapter
        if wish.hands_over and self.asked.to_hand_over is not None:
            self.asked.to_hand_over.add(next_id)
        if wish.ticket and self.asked.tickets is not None:
            self.asked.tickets[next_id] = wish.ticket
        if wish.inputs_ticket and self.asked.inputs_tickets is not None:
            self.asked.inputs_tickets[next_id] = wish.inputs_ticket
        return event

    def _refusal(self, state: State, peer: bytes, event: RequestArrived) -> str | None:
        if self._owners.id_of(peer, event.name) is not None:
            return f"a request named {event.name!r} is live already: give each request a name of its own"
        if (why_not := refusal(state.config, event)) is not None:
            return why_not
        if event.sampling.pooling == NO_POOLING and self._ready.environment.get("head") == NO_HEAD:
            return "this model's checkpoint has no output head: it makes embeddings and scores of them, and writes nothing"
        if (sounds := self._ready.environment.get(SOUNDS)) and (why_not := sound_refusal(event.prompt, int(sounds.split()[0]))):
            return why_not
        reads_images = IMAGES in self._ready.environment or bool(sounds)  # which are tokens below 0 of a prompt
        guidance, vocabulary = event.sampling.guidance, state.config.vocab_size
        beside = b"" if guidance is None else guidance.beside
        negative = event.prompt if guidance is not None and guidance.is_prompt else beside
        tokens = event.prompt + generated_by(event) + beside
        texts, highest = generated_by(event) + negative if reads_images else tokens, int(unpack_tokens(tokens).max())
        if has_inputs(texts) or highest >= vocabulary:
            wrong = unpack_tokens(texts).min() if has_inputs(texts) else highest
            return f"token id {wrong} is outside the model's vocabulary of {vocabulary}"
        if negative and not marks_of(self._ready.environment.get(IMAGES, "")).isdisjoint(unpack_tokens(negative).tolist()):
            return "the negative prompt, or without one the end of the prompt, marks an image: guidance leaves a text, give one"
        if event.sampling.constraint is None:
            return None
        return constraint_refusal(state.config, event.sampling, event.sampling.constraint)

    def _abort(self, peer: bytes, names: Iterable[str], reason: AbortReason) -> Iterator[RequestAborted]:
        """Abort the named requests. A name that is not live has already ended and is skipped."""
        self._trials.forget(peer, names := tuple(names))
        found = (self._owners.id_of(peer, name) for name in names)
        ids = tuple(RequestId(id_) for id_ in found if id_ is not None)
        if ids:
            yield RequestAborted(ids=ids, reason=reason)


def marks_of(sizes: str) -> set[int]:
    """The tokens that stand for images, videos and sounds, by what the model says of them, {} where it reads none."""
    forms = [form.split() for form in sizes.split(", ")]
    return {int(word) for words in forms for word in words[1:2] + words[5:6]} - {0}


def sound_refusal(prompt: bytes, length: int) -> str | None:
    """Why a model that listens cannot read a prompt (int32 bytes), in one sentence; None if it can. `length`: a sound's tokens."""
    tokens = unpack_tokens(prompt)
    if [(each.start, each.length) for each in inputs_in(tokens)] == [(0, length)] and len(tokens) > length:
        return None
    return "this model writes what it hears: send a sound to /v1/audio/transcriptions or /v1/audio/translations"


def constraint_refusal(config: SchedulerConfig, sampling: Sampling, constraint: Constraint) -> str | None:
    """Why no answer could keep to a constraint, in one sentence; None if one can."""
    lists = {"reasoning_end": constraint.reasoning_end, "allowed_token_ids": constraint.allowed}
    lists |= {"reasoning_begin": constraint.reasoning_begin, "not_first": constraint.not_first, "times": constraint.times}
    lists["begun"] = constraint.begun
    lists["bad_words"] = tuple(token for sequence in constraint.banned for token in sequence)
    for name, tokens in lists.items():
        if wrong := [token for token in tokens if not 0 <= token < config.vocab_size]:
            return f"token id {wrong[0]} of {name} is outside the model's vocabulary of {config.vocab_size}"
    if constraint.reasoning_begin and not constraint.reasoning_end:
        return "reasoning_begin says how reasoning begins, and reasoning_end not how it ends: give both"
    if constraint.times and not (len(constraint.times) == 2 and 0 < constraint.times[0] <= constraint.times[1]):
        return "times must name the first token that is a time, behind all texts, and the latest that may come first"
    if not all(constraint.banned):
        return "bad_words holds a sequence without tokens: leave it out"
    if constraint.allowed and sampling.min_tokens and set(constraint.allowed) <= set(stop_ids(config, sampling)):
        return "allowed_token_ids names only tokens that end the answer, and min_tokens forbids them: leave one of the two out"
    if constraint.grammar and not config.eos_token_ids:
        return "this model has no end token, and an answer that keeps to a grammar ends with one: leave the grammar out"
    if constraint.grammar and (sampling.ignore_eos or sampling.min_tokens):
        name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
        return f"{name} does not go with a grammar, which says where an answer ends: leave one of them out"
    return None


def read_messages(parts: Sequence[bytes]) -> Iterator[tuple[bytes, ClientMessage]]:
    """Yield (client, message) for each frame that a ROUTER received together; bytes that no client of ours sends are dropped,
    with a log line."""
    peer, *frames = parts
    for frame in frames:
        try:
            message = client_decoder.decode(frame)
        except (ValueError, RecursionError) as error:
            log.warning("a client's message could not be read and was dropped: %s", error)
        else:
            yield peer, message


# ---- a client that does not read -----------------------------------------------------------------------------------
# Backlog: messages for a client that does not read at present, merged to take no more room than necessary.
# Owns the merging: one entry for each of the client's live requests, and the latest statistics. A client that is stopped for an
# hour loses nothing, delays no other client and costs four bytes a token.

TOKEN_BYTES = 4


class Backlog:
    """Messages of one client, merged. Mutable."""

    def __init__(self) -> None:
        self._outputs: defaultdict[int, MergedOutput] = defaultdict(MergedOutput)  # by request number
        self._names: dict[int, str] = {}  # of requests in this backlog; the client knows the others by number
        self._others: list[EngineMessage] = []
        self._stats: EngineStats | None = None

    def add(self, message: EngineMessage) -> None:
        match message:
            case Outputs():
                for place, number in enumerate(memoryview(message.numbers).cast("q")):
                    self._outputs[number].tokens += message.tokens[TOKEN_BYTES * place :][:TOKEN_BYTES]
                for output in message.outputs:
                    self._names[output.number] = output.name
                    self._outputs[output.number].add(output)
            case EngineStats():
                self._stats = message
            case _:
                self._others.append(message)

    def messages(self) -> list[EngineMessage]:
        """The messages for a client that reads again: each request's outputs in order, and EngineDied last."""
        reported = [self._merged()] if self._outputs else []
        return [*reported, *([] if self._stats is None else [self._stats]), *self._others]

    def _merged(self) -> Outputs:
        named = tuple(self._outputs[number].merged(name, number) for number, name in self._names.items())
        going = {number: output.tokens for number, output in self._outputs.items() if number not in self._names}
        counts = [len(tokens) // TOKEN_BYTES for tokens in going.values()]
        numbers = np.repeat(np.array(list(going), dtype=np.int64), counts)
        return Outputs(outputs=named, numbers=numbers.tobytes(), tokens=b"".join(going.values()))
