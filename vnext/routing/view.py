"""A view: the state of one engine, folded from its event stream (vnext/log/stream.py) by the engine's own reducer.

Owns what a router knows of a replica, and whether it still knows it: each frame's digest covers the engine's state, so a view
that has drifted, or has lost a byte, notices it in that frame, stops being exact and asks for another snapshot. It reads no
socket: its caller feeds it bytes, cut anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from vnext.log import codec, log_bytes
from vnext.log.codec import MAGIC, Frame, SegmentHeader
from vnext.log.reading import BadRecord, Reading
from vnext.log.snapshot import BadSnapshot, decode, load
from vnext.routing.policies import Candidate
from vnext.routing.promised import Promised
from vnext.routing.prompts import Prompt
from vnext.state.digest import DIGEST_VERSION, digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import RequestArrived
from vnext.state.reduce import reduce
from vnext.state.state import State

RECORD_BYTES_MAX = 1 << 30
PAGE_COUNT_MAX = 1 << 24
IMPOSSIBLE = (IllegalEvent, BadSnapshot, ArithmeticError, ValueError, TypeError, LookupError, MemoryError, struct.error)
"""Errors that folding bytes of another process may raise."""
UNKNOWN = Candidate(hit_tokens=0, waiting_tokens=0, running=0, waiting=0, free_pages=0, page_count=0, is_ready=False)


class _Lost(Exception):
    """The stream cannot be followed from here on. One sentence."""


class View:
    """Mutable. `state` is the engine's state at the last whole frame, None before the first snapshot and while the view
    `is_exact` is False. `snapshots`, `events` and `mismatches` count what was taken in, and how often the view was lost;
    `failure` says why it was last. `is_hopeless`: another snapshot would not help, because the engine is of another
    version. `heard` takes the name of every request that arrives, None for nobody.
    """

    def __init__(self) -> None:
        self.state: State | None = None
        self.snapshots = self.events = self.mismatches = 0
        self.failure = ""
        self.is_hopeless = False
        self.heard: Callable[[str], None] | None = None
        self._rest = b""
        self._reading: Reading | None = None
        self._chain = 0
        self._promised = Promised()

    @property
    def is_exact(self) -> bool:
        return self.state is not None

    def begin_again(self) -> None:
        """A new stream follows, from this engine or one that took its place. What was routed is still counted."""
        self.state, self._reading, self._rest = None, None, b""

    def feed(self, data: bytes) -> bool:
        """Take in the stream's next bytes, any number of them; b"" says that it has ended and another one follows. Returns
        whether it was lost in these bytes: the engine must be asked to begin it again, and what arrives until then is
        skipped."""
        if not data:
            self.begin_again()
        self._rest = self._rest + data if self._rest else data
        mismatches = self.mismatches
        while self._rest:
            try:
                if not self._take_record():
                    break
            except _Lost as lost:
                self._lose(str(lost))
        return self._reading is None and self.mismatches > mismatches and not self.is_hopeless

    # ---- what a router asks ----------------------------------------------------------------------------------------

    def hit_tokens(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt whose blocks the engine's cache holds now: what its scheduler would find."""
        return 0 if self.state is None else prompt.hit_tokens(self.state)

    def candidate(self, prompt: Prompt, is_ready: bool = True) -> Candidate:
        """What a policy may know of this replica. It is not ready without a state.

        All is as this prompt will find it (promised.py): the blocks of prompts that come before it are there, those that they
        displace are not, and the steps until it arrives have been computed.
        """
        if (state := self.state) is None:
            return UNKNOWN
        promised = self._promised
        promised.follow(state)
        return Candidate(
            hit_tokens=promised.hit_tokens(state, prompt),
            waiting_tokens=promised.tokens(state),
            running=len(state.rows),
            waiting=len(state.waiting) + promised.routed,
            free_pages=state.pool.free,
            page_count=state.pool.page_count,
            is_ready=is_ready,
        )

    def routed(self, name: str, prompt: Prompt) -> None:
        """A request of this name is on its way to the replica: it counts from now on, and as the engine has it when it
        arrives."""
        self._promised.add(name, self.state, prompt)

    def done(self, name: str) -> None:
        """The request was refused, withdrawn or has ended: if its arrival was never seen it does not count any more.
        Idempotent."""
        self._promised.remove(name)

    def arrived_elsewhere(self, name: str) -> None:
        """Another engine has a request that was on its way to this one, under the name that it has there."""
        self._promised.arrived(name)

    # ---- the stream ------------------------------------------------------------------------------------------------

    def _take_record(self) -> bool:
        """Take in one record; returns False if the rest of it is still to come."""
        if self._reading is None and not self._rest.startswith(MAGIC):
            at = self._rest.find(MAGIC)  # behind what a lost stream still sends
            self._rest = self._rest[at:] if at >= 0 else self._rest[1 - len(MAGIC) :]
            if at < 0:
                return False
        begins = self._rest[: len(MAGIC)]
        if len(begins) < len(MAGIC) and MAGIC.startswith(begins):
            return False
        offset = len(MAGIC) if begins == MAGIC else 0
        end = log_bytes.impl.record_end(self._rest, offset)
        if end == 0:
            if len(self._rest) >= offset + 4 and int.from_bytes(self._rest[offset : offset + 4], "little") > RECORD_BYTES_MAX:
                raise _Lost("a record of the stream is too long")
            return False
        if end < 0:
            raise _Lost("a record's checksum is wrong")
        record = self._rest[:end]
        try:
            self._open(record) if offset else self._fold(record)
        except BadRecord as bad:
            raise _Lost(str(bad)) from bad
        except IMPOSSIBLE as error:
            raise _Lost(f"the stream cannot be folded: {error}") from error
        self._rest = self._rest[end:]
        return True

    def _open(self, record: bytes) -> None:
        """Begin with a segment's snapshot."""
        reading = Reading(record)
        opened = reading.open(None)
        self._require_same_version(opened.header)
        self.state = load(decode(opened.header.snapshot), opened.header.started.config)
        self._reading, self._chain = reading, opened.chain
        self.is_hopeless = False
        self.snapshots += 1
        self._promised.begin(self.state)

    def _require_same_version(self, header: SegmentHeader) -> None:
        if header.digest_version != DIGEST_VERSION:
            self.is_hopeless = True
            raise _Lost(f"the engine is vnext {header.code_version}, whose digests this version cannot compare")
        if header.started.config.page_count > PAGE_COUNT_MAX:
            self.is_hopeless = True
            raise _Lost(f"the engine has {header.started.config.page_count:,} pages: a view has room for {PAGE_COUNT_MAX:,}")

    def _fold(self, record: bytes) -> None:
        """Fold a frame's events and compare digests."""
        reading, state = self._reading, self.state
        assert reading is not None and state is not None
        reading.data, reading.offset = record, 0
        frame: Frame = reading.frame()
        for event in frame.events:
            state = reduce(state, event)
        self._chain = codec.chained(self._chain, digest(state), frame.body)
        if self._chain != frame.digest:
            raise _Lost(f"behind event {state.sequence - 1} the view's state is not the engine's")
        self.state = state
        self.events += len(frame.events)
        self._promised.seen(state, frame.events)
        if self.heard is not None:
            for event in frame.events:
                if isinstance(event, RequestArrived):
                    self.heard(event.name)

    def _lose(self, sentence: str) -> None:
        """Look for the beginning of another stream behind this place."""
        self.state, self._reading, self._rest = None, None, self._rest[1:]
        self.mismatches += 1
        self.failure = sentence


