"""Shape: events without their text, from which every decision still replays exactly.

Owns what is kept of each event when a log may not hold texts. Token ids become pseudonyms (pseudonym.py); only a token
that ends its request stays where it does so, and no block that holds it there is ever named, so prompts may repeat it
under a pseudonym. Names become numbers, biases keep their count only, seeds go. Lengths, priorities, salts' equality,
sampling bounds and stop ids stay. What a commit costs is in tails.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from vnext.state import pseudonym, tails
from vnext.state.committing import Settled, settle
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
)
from vnext.state.log import pseudonym_base
from vnext.state.params import Sampling
from vnext.state.state import State

SWEEP_MIN = 32


class Shaper:
    """Turns each event of one engine into its shape. Mutable: give it every event once, in order."""

    def __init__(self, started: EngineStarted, key: bytes) -> None:
        """`key` is 16 secret bytes that are never written and forgotten with the engine."""
        self._key = key
        self._base = pseudonym_base(started.config)
        self._tails = tails.Tails(key, started.config.block_size, self._base)

    def shape(self, before: State, event: AnyEvent, settled: Settled | None = None) -> AnyEvent:
        """The event's shape. `before` is the state in which it is about to be folded, `settled` as in `reduce`."""
        match event:
            case StepCommitted():
                return self._committed(before, event, settled or settle(before, event))
            case StepPlanned() | RequestAborted() | PrefixCacheReset() | EngineStarted():
                return event
            case RequestArrived():
                self._sweep(before)
                return self._arrived(event)
            case _:
                assert_never(event)

    def put_steady(
        self, frame: bytearray, first_event: int, before: State, events: Sequence[AnyEvent], settled: Settled, width: int
    ) -> bool:
        """Make `frame` that of the shapes of two steady events (log.is_steady), all in one.

        False, nothing done, where tokens are dropped or end a request: give the events to `shape` then.
        """
        committed, planned = events
        ids, rows, stopped = before.rows.id, settled.rows, settled.stopped
        return self._tails.put_steady(
            frame, first_event, committed.step, planned.step, width, ids, rows, committed.tokens, stopped
        )

    def _sweep(self, state: State) -> None:
        """Forget requests that have ended, now and then: the cost is spread over as many arrivals."""
        if len(self._tails) >= 2 * len(state.requests) + SWEEP_MIN:
            self._tails.forget([id_ for id_ in self._tails.ids() if id_ not in state.requests])

    def _arrived(self, event: RequestArrived) -> RequestArrived:
        secret = pseudonym.root_secret(self._key, event.cache_salt)
        return msgspec.structs.replace(
            event,
            name=str(event.id),
            prompt=self._tails.arrive(event.id, secret, event.prompt),
            sampling=shape_sampling(event.sampling, self._base),
            cache_salt=pseudonym.salt_label(self._key, event.cache_salt),
        )

    def _committed(self, before: State, event: StepCommitted, settled: Settled) -> StepCommitted:
        """Results that the reducer drops become the first pseudonym: nobody will read them."""
        samples = settled.samples if len(settled.samples) * 4 < len(event.tokens) else None
        tokens = self._tails.commit(before.rows.id, settled.rows, event.tokens, samples, settled.stopped)
        return StepCommitted(step=event.step, tokens=tokens)


def shape_sampling(sampling: Sampling, base: int) -> Sampling:
    """The parameters without the seed and with neutral biases in their number.

    A stop id that no token can have becomes -1, because a pseudonym could have it.
    """
    bias = tuple((place, 0.0) for place in range(len(sampling.logit_bias)))
    stops = tuple(token if token < base else -1 for token in sampling.stop_token_ids)
    return msgspec.structs.replace(sampling, seed=0, logit_bias=bias, stop_token_ids=stops)
