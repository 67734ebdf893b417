"""Weights: which version the ranks compute with, and who goes on while they change.

A pause is an event because decisions follow from it, and a log shows who waited and why. Which requests go on is the caller's
choice; a change of the weights is folded here. No page of old weights is ever a hit, because the version is part of the root of
every block hash, and a request that lives across a change computes all its tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from vnext.state import pool as pools
from vnext.state.block_hash import block_hashes
from vnext.state.errors import require
from vnext.state.events import AnyEvent, EnginePaused, WeightsChanged
from vnext.state.preempt import preempt
from vnext.state.state import State, Waiting, Weights, root_of

replace = msgspec.structs.replace


def has_begun(state: State, entry: Waiting) -> bool:
    """Whether a waiting request has computed or received a token."""
    return entry.preemption_count > 0 or entry.known > state.requests[entry.id].prompt_length


def is_drained(state: State) -> bool:
    """Whether the weights may change as the pause has it: no step and no transfer is in flight, and with "wait" no request has
    begun."""
    if state.in_flight or (state.tier is not None and state.tier.transfers):
        return False
    return state.paused != "wait" or (len(state.rows) == 0 and not any(has_begun(state, entry) for entry in state.waiting))


def fold_paused(state: State, event: EnginePaused) -> State:
    """The state with another mode. Asleep, nothing keeps its pages."""
    require(event.mode != "abort" or not state.requests, 'requests live where mode "abort" ends them first')
    if event.mode == "sleep":
        require(not state.in_flight, "an engine sleeps with no step in flight")
        require(state.tier is None or not state.tier.transfers, "an engine sleeps with no transfer in flight")
        state = preempt(state, tuple(range(len(state.rows))))
        state = replace(state, pool=pools.clear_prefix_index(state.pool))
    return replace(state, paused=event.mode)


def fold_weights_changed(state: State, event: WeightsChanged) -> State:
    """The state with other names for all blocks, in which running requests wait again."""
    version = state.weights.version if state.weights else 0
    require(state.paused != "" and is_drained(state), "the weights change while requests are computed with the old ones")
    require(event.version > version, f"version {event.version} of the weights follows version {version}")
    require(bool(event.digest), "weights without a digest")
    state = preempt(state, tuple(range(len(state.rows))))
    state = replace(state, pool=pools.without_pins(state.pool))
    state = replace(state, weights=Weights(event.version, event.digest, event.path))
    return replace(state, waiting=tuple(_named(state, entry) for entry in state.waiting)) if state.config.prefix_caching else state


def _named(state: State, entry: Waiting) -> Waiting:
    """A waiting request with the names that its blocks have under the new weights."""
    root = root_of(state, state.requests[entry.id])
    return replace(entry, block_hashes=block_hashes(root, entry.tokens, state.config.block_size))


def illegal(state: State) -> Iterator[AnyEvent]:
    """No version comes twice, none without a digest, and no engine changes its weights or sleeps over a step in flight."""
    version = state.weights.version if state.weights else 0
    yield WeightsChanged(version=version, digest="another")
    yield WeightsChanged(version=version + 1, digest="")
    if state.in_flight:
        yield WeightsChanged(version=version + 1, digest="another")
        yield EnginePaused(mode="sleep")
    if state.requests:
        yield EnginePaused(mode="abort")


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {EnginePaused: fold_paused, WeightsChanged: fold_weights_changed}
