"""Encoding: how far ranks have computed the vectors of an input, an image's tile or a sound, before a step begins it.

A whole input costs as much as many steps of requests that decode, so it is computed in units, one with each step beside those, all
that are left where nobody decodes. Chunks end at an input until its last unit is computed (vnext/state/expected.py). One input at a
time: who asks for another gives up the one before. What ranks keep of it they may lose: the step that begins an input computes
what lacks, with the same bits. So it is forgotten where ranks lose their memory, and nowhere else; towers keep their weights.
Which input is next is a decision (vnext/sched/encoding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.state.config import units_of
from vnext.state.errors import LawBroken, require
from vnext.state.events import AnyEvent, InputEncoded, RequestId
from vnext.state.expected import begun, decodes, is_encoded, unfound
from vnext.state.preempt import row_tokens
from vnext.state.state import Encoding, State
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.inputs import digest_at, length_at

replace = msgspec.structs.replace


class Due(NamedTuple):
    """An input of which ranks have computed `done` of `units` behind the newest step."""

    digest: bytes
    done: int
    units: int


def due(state: State) -> Due | None:
    """What ranks compute of inputs with the newest step, before it."""
    now = state.encoding
    if now is None or now.step != state.in_flight[-1].step:
        return None
    tokens = tokens_of(state, now.id)
    return None if tokens is None else Due(digest_at(tokens, now.place), now.done, now.units)


def fold_input_encoded(state: State, event: InputEncoded) -> State:
    """The state in which ranks compute some units more with the next step."""
    now, tokens = state.encoding, tokens_of(state, event.id)
    require(state.config.input_units > 0, "an engine that encodes inputs whole computes units of one")
    require(tokens is not None, f"units of an input of request {event.id}, which does not live")
    assert tokens is not None
    is_one = 0 <= event.place < len(tokens) and bool(tokens[event.place] < INPUT_BEGINS)
    require(is_one, f"no input of request {event.id} begins at {event.place}")
    done = now.done if now is not None and (now.id, now.place) == (event.id, event.place) else 0
    units = units_of(state.config, length_at(tokens, event.place))
    most = units - done
    if decodes(state):
        most = min(most, 1 if now is None or now.step < state.planned else 0)
    require(1 <= event.units <= most, f"{event.units} units of an input where at most {most} may be computed")
    return replace(state, encoding=Encoding(event.id, event.place, done + event.units, units, state.planned))


def tokens_of(state: State, id_: int) -> np.ndarray | None:
    """The known tokens of a live request (int32); None of any other."""
    if id_ not in state.requests:
        return None
    rows = np.flatnonzero(state.rows.id == id_)
    if len(rows):
        return row_tokens(state, int(rows[0]))
    return next(np.frombuffer(entry.tokens, np.int32) for entry in state.waiting if entry.id == id_)


def with_begun(state: State, starts: np.ndarray, tokens: np.ndarray, running: int, strictly: bool) -> State:
    """The state behind a plan whose rows, the first of which were `running`, compute so many `tokens` from `starts` on (int64[R]
    each): an input that begins is not waited for any more. `strictly`: each that begins is encoded,
    as in every step that does not lack pages."""
    rows = state.rows
    for row in np.flatnonzero((starts < rows.prompt) & (tokens > 0)).tolist():
        id_ = int(rows.id[row])
        begins = begun(row_tokens(state, row), int(starts[row]), int(tokens[row]), is_new=row >= running)
        for place in unfound(state, id_, begins):
            ready = is_encoded(state, id_, place)
            require(ready or not strictly, f"request {id_} begins the input at {place}, of which units lack")
            if ready:
                state = replace(state, encoding=None)
    return state


def encoding_is_bounded(state: State) -> None:
    """E1: an input has some of its units, of steps that are planned."""
    now = state.encoding
    if now is not None and not (1 <= now.done <= now.units and 0 <= now.step <= state.planned and 0 <= now.id < state.next_id):
        raise LawBroken("E1", f"{now} before step {state.planned}")


def illegal(state: State) -> Iterator[AnyEvent]:
    """No units of nobody's input or of text, none twice, none in an engine that has none, and no more than are left."""
    now, nobody = state.encoding, RequestId(state.next_id)
    yield InputEncoded(id=nobody, place=0, units=1)
    for id_ in (*state.rows.id.tolist()[:1], *(entry.id for entry in state.waiting[:1])):
        tokens = tokens_of(state, id_)
        assert tokens is not None
        yield InputEncoded(id=RequestId(id_), place=len(tokens), units=1)
        yield InputEncoded(id=RequestId(id_), place=-1, units=1)
        for place in np.flatnonzero(tokens >= INPUT_BEGINS)[:1].tolist():
            yield InputEncoded(id=RequestId(id_), place=place, units=1)
        for place in np.flatnonzero(tokens < INPUT_BEGINS)[:1].tolist():
            units = units_of(state.config, length_at(tokens, place))
            yield InputEncoded(id=RequestId(id_), place=place, units=0)
            yield InputEncoded(id=RequestId(id_), place=place, units=2 if decodes(state) else units + 1)
    if now is not None and now.done == now.units:
        yield InputEncoded(id=RequestId(now.id), place=now.place, units=1)


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {InputEncoded: fold_input_encoded}
