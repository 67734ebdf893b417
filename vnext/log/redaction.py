"""Redaction: events without their text, from which every decision still replays exactly.

Owns the parts of each event that remain when a log may not hold texts. Token ids become pseudonyms (pseudonyms.py),
except a token that ends its request. No block that holds such a token there is ever hashed, so prompts may repeat the
token under a pseudonym. Names become keyed hashes or numbers, of biases only the count remains, and seeds are removed.
Lengths, priorities, equality of salts, digests of adapters, sampling bounds and stop ids remain. open_blocks_plain.py
has the cost of a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vnext.base.compiled import load
from vnext.log import open_blocks_plain, pseudonyms
from vnext.log.codec import SteadyPair, pseudonym_base
from vnext.log.redacted_blocks import RedactedBlocks, Roots, hash_after
from vnext.log.snapshot import LiveRequest, Snapshot, StoredTier, snapshot, with_block_hashes
from vnext.log.stored_pages import StoredStates, renumbered
from vnext.state.block_hash import root_hash, versioned_root
from vnext.state.events import (
    AnyEvent,
    BlocksPromoted,
    BlocksReceived,
    EngineStarted,
    PromotionEnded,
    RequestArrived,
    StepCommitted,
    generated_by,
    pack_tokens,
    plan_of,
    unpack_tokens,
)
from vnext.state.facilities.tier import names_in
from vnext.state.fold_commit import MatchedSamples, match_samples
from vnext.state.fold_drafts import rounds
from vnext.state.params import Sampling
from vnext.state.preempt import row_tokens
from vnext.state.state import State, label_of
from vnext.state.traits import leaving, loses_steps

# the live requests' tails, compiled where that was built, else the plain form: both give the same pseudonyms
_open_blocks = load("vnext.log._open_blocks", {"SECRET_SIZE": pseudonyms.SECRET_SIZE_BYTES})
OpenBlocks = open_blocks_plain.OpenBlocks
if not TYPE_CHECKING and _open_blocks is not None:  # the compiled form has the plain one's signatures
    OpenBlocks = _open_blocks.OpenBlocks
SWEEP_MIN = 32


class Redactor:
    """Redacts each event of one engine. Mutable: give it every event once, in order."""

    def __init__(self, started: EngineStarted, key: bytes, name_key: bytes = b"") -> None:
        """`key` is 16 secret bytes that are never written and forgotten with the engine. Under `name_key`, which the operator
        keeps, names can be found again; without one they are numbers."""
        config = started.config
        self._key, self._name_key = key, name_key
        self._base = pseudonym_base(config)
        self._open_blocks = OpenBlocks(key, config.block_size, self._base)
        self._redacted_blocks = RedactedBlocks(config, self._history)
        self._block_size = config.block_size
        self._no_salt, self._no_salt_root = self._roots("", ""), root_hash("", config.block_size)
        self._salted: dict[int, Roots] = {}
        self._promoted: dict[int, tuple[bytes, ...]] = {}

    def redact(self, before: State, event: AnyEvent, matched: MatchedSamples | None = None) -> AnyEvent:
        """The redacted event. `before` is the state in which it is folded; `matched` comes from `fold`, if it was kept."""
        if (plan := plan_of(event)) is not None and not plan.preempted:
            return event
        match event:
            case StepCommitted():
                return self._committed(before, event, matched or match_samples(before, event))
            case RequestArrived():
                return self._arrived(before, event)
            case PromotionEnded():
                return self._end_promotion(before, event)
            case BlocksPromoted():
                self._begin_promotion(before, event)
        traits = event.traits
        if traits.leave.who != "nobody" and (
            rows := range(len(before.rows)) if loses_steps(event) else leaving(event, before.rows.id)
        ):
            self._leave(before, rows)
        if traits.transfer == "loses":
            self._promoted.clear()
        if not (traits.hashes or traits.private or traits.folders):
            return event
        changed: dict[str, object] = {field: self._labels(getattr(event, field)) for field in traits.hashes}
        changed |= {field: "" for field in traits.private}
        changed |= {field: getattr(event, field).rpartition("/")[2] for field in traits.folders}
        return msgspec.structs.replace(event, **changed)

    def _labels(self, names: bytes) -> bytes:
        """What is on disk, under names that tell nothing and match no request."""
        return b"".join(pseudonyms.block_label(self._key, name) for name in names_in(names))

    def _begin_promotion(self, before: State, event: BlocksPromoted) -> None:
        """Remember the names that the blocks of a transfer have in the log."""
        entry = next(entry for entry in before.waiting if entry.id == event.id)
        _, keys = self._redacted_blocks.chain(self._roots_of(event.id), entry.tokens, label_of(before.weights))
        self._promoted[event.transfer] = keys

    def _end_promotion(self, before: State, event: PromotionEnded) -> PromotionEnded:
        keys = self._promoted.pop(event.transfer, ())
        for transfer in before.tier.transfers if before.tier else ():
            if transfer.number == event.transfer and transfer.keys:
                keys = (keys or tuple(pseudonyms.block_label(self._key, key) for key in transfer.keys))[: len(transfer.keys)]
                self._redacted_blocks.promoted(transfer.pages, keys)
                if isinstance(event, BlocksReceived):
                    names = b"".join(keys[transfer.hits : transfer.hits + event.count])
                    return msgspec.structs.replace(event, names=names, checksums=self._labels(event.checksums))
        return event

    def _tier(self, tier: StoredTier) -> StoredTier:
        """A snapshot's disk tier as the log has it."""
        transfers = [
            msgspec.structs.replace(
                each,
                keys=self._promoted.get(each.number, tuple(pseudonyms.block_label(self._key, key) for key in each.keys))[
                    : len(each.keys)
                ],
            )
            for each in tier.transfers
        ]
        snapshots = tier.snapshots and self._tier(tier.snapshots)
        return msgspec.structs.replace(tier, blocks=self._labels(tier.blocks), transfers=tuple(transfers), snapshots=snapshots)

    def _states(
        self, state: State, states: StoredStates, hash_chains: Sequence[tuple[bytes, tuple[bytes, ...]]]
    ) -> StoredStates:
        """The snapshots of recurrent layers, each under the name that the log has for its block."""
        index, names = state.pool.prefix_index, names_in(states.keys)
        known = {name: page for name in names if (page := index.block_of(name)) is not None}
        chains = [keys for _, keys in hash_chains[: len(state.rows)]]
        labels = names_in(self._redacted_blocks.of(state, np.array(list(known.values()), dtype=np.int32), chains))
        label_of_name = dict(zip(known, labels))
        keys = (label_of_name.get(name) or pseudonyms.block_label(self._key, name) for name in names)
        return msgspec.structs.replace(states, keys=b"".join(keys))

    def put_steady(
        self,
        frame: bytearray,
        first_event: int,
        before: State,
        events: SteadyPair,
        matched: MatchedSamples,
        width: int,
    ) -> bool:
        """Make `frame` that of the shapes of two steady events (codec.steady_pair), all in one.

        False, nothing done, where tokens are dropped or a request ends: give the events to `shape` then.
        """
        if matched.ended:
            return False
        committed, planned = events
        samples = before.rows.id, matched.rows, committed.tokens, matched.stopped
        return self._open_blocks.put_steady(frame, first_event, committed.step, planned.step, width, samples)

    def resume(self, state: State, histories: Iterable[tuple[bytes, str, bytes]]) -> None:
        """Begin in a state that earlier events led to, before any event is shaped.

        `histories` are root key, adapter and known tokens (int32 bytes) of all requests that live in `state` or come later: they
        say what kept blocks hold. No later request shares a block of which none of them tells, so that one's name says nothing.
        """
        for id_, request in state.requests.items():
            roots = self._roots_at(request.root, request.sampling.adapter)
            if roots is not self._no_salt:
                self._salted[id_] = roots
        known = [(id_, row_tokens(state, row).tobytes()) for row, id_ in enumerate(state.rows.id.tolist())]
        for id_, tokens in (*known, *((entry.id, entry.tokens) for entry in state.waiting)):
            self._pseudonyms_of_arrival(id_, self._roots_of(id_).secret, tokens)
        known_roots = ((root, self._roots_at(root, adapter), tokens) for root, adapter, tokens in histories)
        self._redacted_blocks.resume(state, known_roots, self._key)

    def snapshot(self, state: State) -> Snapshot:
        """The state that the log's events lead to where the engine's own lead to `state`.

        Its chain of committed tokens starts anew. No event that comes after `state` may have been shaped yet.
        """
        real, count, weights = snapshot(state), len(state.rows), label_of(state.weights)
        lives, hash_chains = zip(*(self._life(life, weights) for life in real.lives)) if real.lives else ((), ())
        return msgspec.structs.replace(
            real,
            token_digest=0,
            weights=real.weights and msgspec.structs.replace(real.weights, path=""),
            lives=lives,
            tier=real.tier and self._tier(real.tier),
            states=real.states and self._states(state, real.states, hash_chains),
            clients=real.clients and renumbered(real.clients, partial(pseudonyms.client_label, self._key)),
            slots=tuple(slot and msgspec.structs.replace(slot, name="") for slot in real.slots),
            cells=with_block_hashes(
                real.cells, [hash_after(*each) for each in zip(hash_chains, state.rows.hashed_blocks.tolist())]
            ),
            keys=self._redacted_blocks.of(
                state, np.frombuffer(real.named, dtype=np.int32), [keys for _, keys in hash_chains[:count]]
            ),
        )

    def _life(self, life: LiveRequest, weights: str) -> tuple[LiveRequest, tuple[bytes, tuple[bytes, ...]]]:
        """A request as the log has it, and its root key and the names of its full blocks there."""
        roots = self._roots_of(life.id)
        tokens, keys = self._redacted_blocks.chain(roots, life.tokens, weights)
        name, sampling = self._name(life.id, life.name), redact_sampling(life.sampling, self._base)
        client = pseudonyms.client_label(self._key, life.client)
        shaped = msgspec.structs.replace(life, name=name, sampling=sampling, root=roots.key, tokens=tokens, client=client)
        return shaped, (versioned_root(roots.key, weights), keys)

    def _history(self, secret: bytes, tokens: bytes) -> bytes:
        """The pseudonyms of a history (int32 bytes)."""
        return pseudonyms.around_inputs(self._key, self._base, tokens, partial(self._open_blocks.history, secret))

    def _pseudonyms_of_arrival(self, request_id: int, secret: bytes, tokens: bytes) -> bytes:
        arrive = partial(self._open_blocks.arrive, request_id, secret)
        return pseudonyms.around_inputs(self._key, self._base, tokens, arrive)

    def _name(self, request_id: int, name: str) -> str:
        return pseudonyms.name_label(self._name_key, name) if self._name_key else str(request_id)

    def _roots(self, salt: str, adapter: str) -> Roots:
        label = pseudonyms.salt_label(self._key, salt)
        return Roots(pseudonyms.root_secret(self._key, salt), root_hash(label, self._block_size, adapter))

    def _roots_at(self, root: bytes, adapter: str) -> Roots:
        """Those of a real root key, which is all that a snapshot tells of a salt."""
        return self._no_salt if root == self._no_salt_root else self._roots(root.hex(), adapter)

    def _roots_of(self, request_id: int) -> Roots:
        return self._salted.get(request_id, self._no_salt)

    def _leave(self, state: State, rows: Sequence[int]) -> None:
        """These rows are about to end or to be preempted."""
        for row in rows:
            if 0 <= row < len(state.rows):
                self._redacted_blocks.leave(state, row, self._roots_of(int(state.rows.id[row])))

    def _arrived(self, before: State, event: RequestArrived) -> RequestArrived:
        """Occasionally forgets requests that have ended, so that as many arrivals share the cost."""
        if len(self._open_blocks) >= 2 * len(before.requests) + SWEEP_MIN:
            gone = [id_ for id_ in self._open_blocks.ids() if id_ not in before.requests]
            self._open_blocks.forget(gone)
            for id_ in gone:
                self._salted.pop(id_, None)
        roots, label, adapter = self._no_salt, "", event.sampling.adapter
        if event.cache_salt or adapter:
            salt = root_hash(event.cache_salt, self._block_size, adapter).hex()
            roots, label = self._roots(salt, adapter), pseudonyms.salt_label(self._key, salt)
            self._salted[event.id] = roots
        tokens = self._pseudonyms_of_arrival(event.id, roots.secret, event.prompt + generated_by(event))
        end = len(event.prompt)
        return msgspec.structs.replace(
            event,
            name=self._name(event.id, event.name),
            prompt=tokens[:end],
            generated=tokens[end:],
            sampling=redact_sampling(event.sampling, self._base),
            cache_salt=label,
            client=pseudonyms.client_label(self._key, event.client),
        )

    def _committed(self, before: State, event: StepCommitted, matched: MatchedSamples) -> StepCommitted:
        """Samples that the reducer drops become the first pseudonym, because they are never read."""
        if matched.ended:
            self._leave(before, matched.rows[matched.stopped | matched.at_limit].tolist())
        if matched.runs is not None:
            return msgspec.structs.replace(event, tokens=self._runs(before, event.tokens, matched))
        samples = matched.samples if len(matched.samples) * 4 < len(event.tokens) else None
        tokens = self._open_blocks.commit(before.rows.id, matched.rows, event.tokens, samples, matched.stopped)
        return StepCommitted(step=event.step, tokens=tokens)

    def _runs(self, before: State, tokens: bytes, matched: MatchedSamples) -> bytes:
        """The pseudonyms of a step in which a row may take several tokens, one token of each row at a time."""
        shaped = np.full(len(tokens) // 4, self._base, dtype=np.int32)
        for here in rounds(matched.rows):
            rows, samples, stopped = matched.rows[here], matched.samples[here], matched.stopped[here]
            part = unpack_tokens(self._open_blocks.commit(before.rows.id, rows, tokens, samples, stopped))
            shaped[samples] = part[samples]
        return pack_tokens(shaped)


def redact_sampling(sampling: Sampling, base: int) -> Sampling:
    """The parameters without seed and constraint, with neutral biases in their number and guidance beside tokens 0.

    A stop id that no token can have becomes -1, because a pseudonym could have it.
    """
    bias = tuple((place, 0.0) for place in range(len(sampling.logit_bias)))
    stops = tuple(token if token < base else -1 for token in sampling.stop_token_ids)
    guidance = sampling.guidance and msgspec.structs.replace(sampling.guidance, beside=bytes(len(sampling.guidance.beside)))
    changed = {"seed": 0, "logit_bias": bias, "stop_token_ids": stops, "constraint": None, "guidance": guidance}
    return msgspec.structs.replace(sampling, **changed)
