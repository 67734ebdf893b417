"""Shapes beside a run: its log without texts, made by the forms that serve and held to log/pseudonyms.py (law X3).

The log is written as the recorder writes it, frame by frame, and read again. What is read must lead a state of its own to the
run's decisions, and each request's history there must be the pseudonyms of its real one by the plain arithmetic.
"""

from __future__ import annotations

import numpy as np

from vnext.log import codec, pseudonyms
from vnext.log.log_plain import FRAME_HEAD
from vnext.log.redaction import Redactor
from vnext.sim.checks.plain_state import Divergence
from vnext.state.block_hash import root_hash
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.fold_commit import MatchedSamples, match_samples
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State

KEY = bytes(range(pseudonyms.KEY_SIZE_BYTES))


class RedactedTape:
    """The shape log of one run. Mutable: hears every event once, in order, and of the end of each iteration."""

    def __init__(self, started: EngineStarted) -> None:
        self._redactor, self._config = Redactor(started, KEY), started.config
        self._base = codec.pseudonym_base(started.config)
        self._width = codec.first_header(started, "shape", "simulated").token_width
        self._before, self._shaped = start(started), start(started)
        self._salts: dict[int, str] = {}
        self._reported: list[tuple[State, AnyEvent]] = []

    def hear(self, event: AnyEvent, after: State) -> None:
        """One more event, and the state that it left."""
        self._reported.append((self._before, event))
        self._before = after
        if isinstance(event, RequestArrived):
            self._salts[event.id] = event.cache_salt

    def write(self) -> None:
        """The events since the last time are one frame. Raises Divergence where it does not say what they were."""
        reported, self._reported = self._reported, []
        for event in self._frame(reported):
            self._shaped = reduce(self._shaped, event)
        if digest(self._shaped) != digest(self._before):
            raise Divergence(f"X3: a log without texts leads to another state behind event {self._before.sequence - 1}")
        self._compare_histories()

    def _frame(self, reported: list[tuple[State, AnyEvent]]) -> tuple[AnyEvent, ...]:
        """The shapes of these events, as they are read in the log."""
        events = [event for _, event in reported]
        matched = [match_samples(before, event) if isinstance(event, StepCommitted) else None for before, event in reported]
        frame, first = bytearray(), self._shaped.sequence
        if not self._put_steady(frame, first, reported[0][0], events, matched[0]):
            shapes = [self._redactor.redact(*each, one) for each, one in zip(reported, matched)]
            codec.put_frame(frame, codec.encode_body(first, shapes, (), 0, self._width))
        body = codec.frame_decoder.decode(bytes(frame[FRAME_HEAD :]))
        read = codec.widen_events(body.events, body.width)
        for shape, one in zip(read, matched):
            if one is None:
                continue
            assert isinstance(shape, StepCommitted)
            if (unpack_tokens(shape.tokens) < self._base).sum() != one.stopped.sum():
                raise Divergence(f"X3: the log without texts shows tokens of step {shape.step} that end no request")
        return read

    def _put_steady(
        self, frame: bytearray, first: int, before: State, events: list[AnyEvent], matched: MatchedSamples | None
    ) -> bool:
        both = codec.steady_pair(events)
        if both is None or matched is None:
            return False
        return self._redactor.put_steady(frame, first, before, both, matched, self._width)

    def _compare_histories(self) -> None:
        real, shaped = self._before, self._shaped
        for row, id_ in enumerate(real.rows.id.tolist()):
            if row_tokens(shaped, row).tobytes() != self._pseudonyms(id_, row_tokens(real, row)):
                raise Divergence(f"X3: request {id_} has other pseudonyms in a log without texts")

    def _pseudonyms(self, id_: int, tokens: np.ndarray) -> bytes:
        size, salt = self._config.block_size, self._salts[id_]
        adapter = self._before.requests[id_].sampling.adapter
        root = pseudonyms.root_secret(KEY, root_hash(salt, size, adapter).hex() if salt or adapter else "")

        def plain(data: bytes) -> bytes:
            secrets = pseudonyms.words(pseudonyms.block_secrets(KEY, root, data, size))
            return pack_tokens(pseudonyms.pseudonyms(secrets, unpack_tokens(data), size, self._base)[0])

        return pseudonyms.around_inputs(KEY, self._base, pack_tokens(tokens), plain)
