"""Vectors of inputs that were computed before, here or by an engine that only encodes, and are in files under the inputs' digests.

Ranks look for those of a waiting request, and read them beside the running steps. Meanwhile the request waits alone, as one whose
blocks are read does. An input that was found needs no unit and no room among those that a step begins. Each request is looked for
once, until ranks lose their memory; what they have read they may lose, and the step that begins the input then computes it, with
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from vnext.state.allocate import hit_tokens_of, prefix_hits
from vnext.state.errors import LawBroken, require
from vnext.state.events import AnyEvent, InputsFound, InputsSought, RequestId, unpack_tokens
from vnext.state.expected import begun
from vnext.state.state import Sought, State, Waiting
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.inputs import digest_at, has_inputs

replace = msgspec.structs.replace
NOTHING = Sought()


def fold_inputs_sought(state: State, event: InputsSought) -> State:
    """The state in which ranks look for a waiting request's inputs."""
    sought, entry = _of_living(state), waiting_entry(state, event.id)
    require(entry is not None, f"request {event.id} does not wait")
    assert entry is not None, "required above"
    require(has_inputs(entry.tokens), f"request {event.id} has no inputs")
    is_new = event.id not in sought.searches and all(id_ != event.id for id_, _ in sought.found)
    require(is_new, f"inputs of request {event.id} are looked for again")
    return replace(state, sought=replace(sought, searches=(*sought.searches, event.id)))


def fold_inputs_found(state: State, event: InputsFound) -> State:
    """The state in which a request goes on with the vectors that ranks have read."""
    sought, now = _of_living(state), state.encoding
    require(event.id in sought.searches, f"inputs of request {event.id} are found that nobody looks for")
    known, rising = unpack_tokens(state.requests[event.id].prompt), sorted(set(event.places))
    are_inputs = all(0 <= place < len(known) and known[place] < INPUT_BEGINS for place in rising)
    require(are_inputs and list(event.places) == rising, f"no inputs of request {event.id} begin at {event.places}")
    searches = tuple(id_ for id_ in sought.searches if id_ != event.id)
    if now is not None and now.id == event.id and now.place in event.places:
        state = replace(state, encoding=None)
    return replace(state, sought=Sought(searches, (*sought.found, (event.id, event.places))))


def waiting_entry(state: State, id_: int) -> Waiting | None:
    """The request's place in the queue, None if it does not wait."""
    return next((entry for entry in state.waiting if entry.id == id_), None)


def lacking_places(state: State, id_: int) -> list[int]:
    """Where the inputs of a waiting request begin of which it computes a part, behind what it takes from the cache."""
    if (entry := waiting_entry(state, id_)) is None:
        return []
    known = unpack_tokens(entry.tokens)
    start = hit_tokens_of(state.config, prefix_hits(state.config, state.pool, entry))
    return begun(known, start, len(known) - start, is_new=True)


def lacking_digests(state: State, id_: int) -> dict[int, bytes]:
    """Those inputs by where they begin."""
    known = unpack_tokens(state.requests[id_].prompt)
    return {place: digest_at(known, place) for place in lacking_places(state, id_)}


def who_lacks(state: State, digest: bytes) -> list[int]:
    """The requests that are to compute the input of this digest, or a part of it."""
    found: list[int] = [entry.id for entry in state.waiting if digest in lacking_digests(state, entry.id).values()]
    for id_, computed in zip(state.rows.id.tolist(), state.rows.computed.tolist()):
        known = unpack_tokens(state.requests[id_].prompt)
        places = begun(known, computed, len(known) - computed, is_new=True) if computed < len(known) else []
        found += [id_] if digest in (digest_at(known, place) for place in places) else []
    return found


def _of_living(state: State) -> Sought:
    """What is known of requests that live."""
    sought = state.sought or NOTHING
    found = tuple(each for each in sought.found if each[0] in state.requests)
    return Sought(tuple(id_ for id_ in sought.searches if id_ in state.requests), found)


def searches_wait(state: State) -> None:
    """E5: a request waits while its inputs are looked for, which happens once."""
    sought = state.sought or NOTHING
    ids = [*sought.searches, *(id_ for id_, _ in sought.found)]
    running = set(state.rows.id.tolist()).intersection(sought.searches) if sought.searches else ()
    if running or len(set(ids)) < len(ids) or not all(0 <= id_ < state.next_id for id_ in ids):
        raise LawBroken("E5", f"{sought}, and the requests {sorted(running)} run")


def illegal(state: State) -> Iterator[AnyEvent]:
    """Nobody is looked for who does not wait, has no inputs or was looked for, and nothing is found that nobody looks for or that
    is no input."""
    sought = state.sought or NOTHING
    yield InputsSought(id=RequestId(state.next_id))
    yield InputsFound(id=RequestId(state.next_id))
    for id_ in state.rows.id.tolist()[:1]:
        yield InputsSought(id=RequestId(id_))
        yield InputsFound(id=RequestId(id_))
    for id_ in (*sought.searches[:1], *(id_ for id_, _ in sought.found[:1])):
        yield InputsSought(id=RequestId(id_))
    for entry in state.waiting[:2]:
        if not has_inputs(entry.tokens):
            yield InputsSought(id=RequestId(entry.id))
    for id_ in [id_ for id_ in sought.searches if id_ in state.requests][:1]:
        known = unpack_tokens(state.requests[id_].prompt)
        for place in (-1, len(known), *(known >= INPUT_BEGINS).nonzero()[0].tolist()[:1]):
            yield InputsFound(id=RequestId(id_), places=(place,))
        for place in (known < INPUT_BEGINS).nonzero()[0].tolist()[:1]:
            yield InputsFound(id=RequestId(id_), places=(place, place))


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {InputsSought: fold_inputs_sought, InputsFound: fold_inputs_found}
