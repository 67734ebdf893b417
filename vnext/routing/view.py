"""A view: the state of one engine, folded from its event stream (vnext/log/stream.py) by the engine's own reducer.

Owns what a router knows of a replica, and whether it still knows it: each frame's digest covers the engine's state, so a view
that has drifted, or has lost a byte, notices it in that frame, stops being exact and asks for another snapshot. It reads no
socket: its caller feeds it bytes, cut anywhere.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from vnext.log import codec, log_bytes
from vnext.log.codec import MAGIC, Frame, SegmentHeader
from vnext.log.reading import BadRecord, Reading
from vnext.log.snapshot import BadSnapshot, decode, load
from vnext.routing.policies import Candidate
from vnext.routing.prompts import Prompt, Routed, waiting_hits
from vnext.state.allocate import hit_tokens_of
from vnext.state.digest import DIGEST_VERSION, digest
from vnext.state.errors import IllegalEvent
from vnext.state.events import AnyEvent, RequestArrived, plan_of
from vnext.state.pool import head_after
from vnext.state.reduce import reduce
from vnext.state.state import State, Waiting

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

        All is as this prompt will find it (above): the blocks of prompts that come before it are there, those that they
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


# ---- what a replica owes -----------------------------------------------------------------------------------------
# What a replica owes, as a request that is routed now will find it: prompts that wait, are half computed, or are on their way.
#
# Owns the sums over them: the tokens still to be computed, the blocks that these prompts will have put into the cache before a
# later prompt's turn, and the kept pages that they will have taken. All follow from the folded state and from the router's own
# decisions; nothing is counted twice, because a routed request leaves when its arrival is folded.
#
# A view is late, and a request takes a while to arrive. Together that is `lag`, in steps: how many the view saw planned between a
# decision and the arrival that followed from it. Whatever the two parts are, a request that is routed now arrives `lag` steps from
# the state that the view shows, and each step until then computes what the budget allows.


LAGS = 8
"""Arrivals of whose lags the median counts: one that was held up says nothing about the next, nor one that met an idle engine."""


class Promised:
    """Of one replica. Mutable; what it says holds for the last state that it followed. `lag`: steps from the state that is known
    to the arrival of a request that is routed now; 0 before any was seen."""

    def __init__(self) -> None:
        self._routed: dict[str, Routed] = {}
        self._unmeasured: dict[str, Prompt] = {}  # routed while no state was known
        self._arrived: dict[int, Routed] = {}
        self._blocks: Counter[bytes] = Counter()
        self._followed: State | None = None
        self._tokens = 0
        self._lags: deque[int] = deque(maxlen=LAGS)
        self.lag = 0

    @property
    def routed(self) -> int:
        """Requests that were routed and have not arrived."""
        return len(self._routed)

    def tokens(self, state: State) -> int:
        """Known tokens that are not computed when a request that is routed now arrives, without those that decoding requests
        have just sampled. Each step until then computes its budget, but for the decoding requests' own tokens."""
        rows, lag, now = len(state.rows), self.lag, state.planned
        capacity = max(state.config.max_num_batched_tokens - rows, 0) if rows < state.config.max_num_seqs else 0
        owed, at = self._tokens, now
        for each in self._routed.values():
            arrives = max(each.step + lag, at)
            owed, at = max(owed - capacity * (arrives - at), 0) + each.tokens, arrives
        return max(owed - capacity * (now + lag - at), 0)

    def add(self, name: str, state: State | None, prompt: Prompt) -> None:
        """This request was routed, maybe while no state is known."""
        self.remove(name)
        if state is None:
            self._unmeasured[name] = prompt
            return
        self.follow(state)
        hashes = prompt.hashes(state)
        self._routed[name] = Routed(len(prompt) - self.hit_tokens(state, prompt), hashes, state.planned)
        self._blocks.update(hashes)

    def remove(self, name: str) -> None:
        """It does not count as routed any more. Idempotent."""
        self._unmeasured.pop(name, None)
        if (gone := self._routed.pop(name, None)) is not None:
            self._drop(gone)

    def seen(self, state: State, events: Sequence[AnyEvent]) -> None:
        """These events were folded; `state` is the one behind them."""
        if not self._routed:
            return
        for place, event in enumerate(events):
            if isinstance(event, RequestArrived):
                self.arrived(event.name, state.planned - sum(plan_of(each) is not None for each in events[place:]))

    def begin(self, state: State) -> None:
        """Another stream begins with this state, which has the arrivals of some that were routed."""
        for gone in self._arrived.values():
            self._drop(gone)
        self._arrived, self._followed = {}, None
        for request in state.requests.mapping().values():
            self.arrived(request.name)
        for name, prompt in tuple(self._unmeasured.items()):
            self.add(name, state, prompt)

    def arrived(self, name: str, planned: int | None = None) -> None:
        """It is in the state, since that had so many `planned` steps, where this is known; or in another engine's. An API server
        adds two parts to the id of a request that came to it: digits, and the choice."""
        for each in (name, name.rsplit("-", 2)[0]):
            if planned is not None and each in self._routed:
                self._lags.append(max(planned - self._routed[each].step, 0))
                self.lag = sorted(self._lags)[len(self._lags) // 2]
            self.remove(each)

    def follow(self, state: State) -> None:
        """The replica's newest state."""
        if state is self._followed:
            return
        before = None if self._followed is None else self._followed.waiting
        owed = np.maximum(state.rows.known - state.rows.computed - 1, 0)
        prefilling = set(state.rows.id[owed > 0].tolist())
        if state.waiting is not before or self._arrived:
            self._follow_queue(state, prefilling)
        waiting = sum(self._arrived[entry.id].tokens for entry in state.waiting)
        self._tokens, self._followed = waiting + int(owed.sum()), state

    def hit_tokens(self, state: State, prompt: Prompt) -> int:
        """Leading tokens of a prompt that need no computation at its turn: those in the cache, but for pages that will have been
        taken, and those of promised blocks. At least one token is left."""
        cached = hit_tokens_of(state.config, prompt.hit_pages(state)) if state.config.windows else self._lasting(state, prompt)
        if not self._blocks:
            return cached
        size, hashes = state.config.block_size, prompt.hashes(state)
        most, count = min(len(prompt) - 1, prompt.hits_max) // size, cached // size
        while count < most and self._blocks.get(hashes[count], 0):
            count += 1
        return count * size

    def _lasting(self, state: State, prompt: Prompt) -> int:
        """Tokens of a prompt's leading cached blocks up to the first whose page will have been taken."""
        pages = prompt.hit_pages(state)
        if len(pages) and (due := self._pages_due(state)):
            places = state.pool.status.at(pages)
            taken = (places >= 0) & (places < head_after(state.pool, due))
            if taken.any():
                hashes = prompt.hashes(state)
                for count in taken.nonzero()[0].tolist():
                    if not self._blocks.get(hashes[count], 0):  # a prompt that comes before will hold it
                        pages = pages[:count]
                        break
        return hit_tokens_of(state.config, pages)

    def _pages_due(self, state: State) -> int:
        """Pages that will have been taken by then: for prompts that wait or are on their way, and for the tokens that running
        requests sample until a request arrives."""
        requests, size = len(state.waiting) + len(self._routed), state.config.block_size
        tokens = self._tokens + sum(each.tokens for each in self._routed.values()) + len(state.rows) * self.lag
        return min((tokens // size + requests) * state.config.group_count, state.pool.free)

    def _follow_queue(self, state: State, prefilling: set[int]) -> None:
        """Keep what is promised by those that wait, and by those that have begun and have not computed their prompts."""
        arrived, here = self._arrived, prefilling.copy()
        for entry in state.waiting:
            here.add(entry.id)
            if entry.id not in arrived:
                arrived[entry.id] = promise(state, entry)
                self._blocks.update(arrived[entry.id].hashes)
        for id_ in [id_ for id_ in arrived if id_ not in here]:
            self._drop(arrived.pop(id_))

    def _drop(self, gone: Routed) -> None:
        for each in gone.hashes:
            if self._blocks[each] == 1:
                del self._blocks[each]
            else:
                self._blocks[each] -= 1


def promise(state: State, entry: Waiting) -> Routed:
    """What a waiting request leaves to compute, and its blocks."""
    return Routed(entry.known - waiting_hits(state, entry), entry.block_hashes)
