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
import numpy as np

from vnext.state import pseudonym, tails
from vnext.state.chain import root_key
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
from vnext.state.keyframe import Keyframe, Life, keyframe, with_chains
from vnext.state.log import pseudonym_base
from vnext.state.params import Sampling
from vnext.state.shape_names import Names, Roots, key_after
from vnext.state.state import State

SWEEP_MIN = 32


class Shaper:
    """Turns each event of one engine into its shape. Mutable: give it every event once, in order."""

    def __init__(self, started: EngineStarted, key: bytes) -> None:
        """`key` is 16 secret bytes that are never written and forgotten with the engine."""
        config = started.config
        self._key = key
        self._base = pseudonym_base(config)
        self._tails = tails.Tails(key, config.block_size, self._base)
        self._names = Names(config, self._tails)
        self._no_salt = self._roots("")
        self._salted: dict[int, Roots] = {}

    def shape(self, before: State, event: AnyEvent, settled: Settled | None = None) -> AnyEvent:
        """The event's shape. `before` is the state in which it is about to be folded, `settled` as in `reduce`."""
        match event:
            case StepCommitted():
                return self._committed(before, event, settled or settle(before, event))
            case StepPlanned():
                if event.preempted:
                    self._leave(before, event.preempted)
                return event
            case RequestArrived():
                self._sweep(before)
                return self._arrived(event)
            case RequestAborted():
                gone = set(event.ids)
                self._leave(before, [row for row, id_ in enumerate(before.rows.id.tolist()) if id_ in gone])
                return event
            case PrefixCacheReset() | EngineStarted():
                return event
            case _:
                assert_never(event)

    def put_steady(
        self,
        frame: bytearray,
        first_event: int,
        before: State,
        events: Sequence[AnyEvent],
        settled: Settled,
        width: int,
    ) -> bool:
        """Make `frame` that of the shapes of two steady events (log.is_steady), all in one.

        False, nothing done, where tokens are dropped or a request ends: give the events to `shape` then.
        """
        if settled.ended:
            return False
        committed, planned = events
        ids, rows, stopped = before.rows.id, settled.rows, settled.stopped
        return self._tails.put_steady(
            frame, first_event, committed.step, planned.step, width, ids, rows, committed.tokens, stopped
        )

    def keyframe(self, state: State) -> Keyframe:
        """The state that the log's events lead to where the engine's own lead to `state`.

        Its chain of committed tokens starts anew. No event that comes after `state` may have been shaped yet.
        """
        real, count = keyframe(state), len(state.rows)
        lives, chains = zip(*map(self._life, real.lives)) if real.lives else ((), ())
        return msgspec.structs.replace(
            real,
            token_digest=0,
            lives=lives,
            cells=with_chains(real.cells, [key_after(*each) for each in zip(chains, state.rows.sealed.tolist())]),
            keys=self._names.of(state, np.frombuffer(real.named, dtype=np.int32), [keys for _, keys in chains[:count]]),
        )

    def _life(self, life: Life) -> tuple[Life, tuple[bytes, tuple[bytes, ...]]]:
        """A request as the log has it, and its root key and the names of its full blocks there."""
        roots = self._roots_of(life.id)
        tokens, keys = self._names.chain(roots, life.tokens)
        sampling = shape_sampling(life.sampling, self._base)
        shaped = msgspec.structs.replace(life, name=str(life.id), sampling=sampling, root=roots.key, tokens=tokens)
        return shaped, (roots.key, keys)

    def _roots(self, cache_salt: str) -> Roots:
        return Roots(
            pseudonym.root_secret(self._key, cache_salt), root_key(pseudonym.salt_label(self._key, cache_salt))
        )

    def _roots_of(self, request_id: int) -> Roots:
        return self._salted.get(request_id, self._no_salt)

    def _leave(self, state: State, rows: Sequence[int]) -> None:
        """These rows are about to end or to give way."""
        for row in rows:
            if 0 <= row < len(state.rows):
                self._names.leave(state, row, self._roots_of(int(state.rows.id[row])))

    def _sweep(self, state: State) -> None:
        """Forget requests that have ended, now and then: the cost is spread over as many arrivals."""
        if len(self._tails) >= 2 * len(state.requests) + SWEEP_MIN:
            gone = [id_ for id_ in self._tails.ids() if id_ not in state.requests]
            self._tails.forget(gone)
            for id_ in gone:
                self._salted.pop(id_, None)

    def _arrived(self, event: RequestArrived) -> RequestArrived:
        roots = self._no_salt
        if event.cache_salt:
            roots = self._salted[event.id] = self._roots(event.cache_salt)
        return msgspec.structs.replace(
            event,
            name=str(event.id),
            prompt=self._tails.arrive(event.id, roots.secret, event.prompt),
            sampling=shape_sampling(event.sampling, self._base),
            cache_salt=pseudonym.salt_label(self._key, event.cache_salt),
        )

    def _committed(self, before: State, event: StepCommitted, settled: Settled) -> StepCommitted:
        """Results that the reducer drops become the first pseudonym: nobody will read them."""
        if settled.ended:
            self._leave(before, settled.rows[settled.stopped | settled.at_limit].tolist())
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
