"""Encoding: which input ranks compute next, and how many units of it. Pure.

The one that is begun goes on while a request still waits for it, then comes the first that a running request has reached, then the
one that holds up the best waiting request. Beside requests that decode it is one unit a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vnext.sched.admission import Wait, admissible, admissions, admitted_max, in_flight_max, verdicts
from vnext.state.allocate import hit_tokens_of, prefix_hits
from vnext.state.config import units_of
from vnext.state.events import InputEncoded, InputsSought, RequestId
from vnext.state.expected import Work, begun, decodes, expected_work, is_encoded
from vnext.state.facilities.encoding import tokens_of
from vnext.state.facilities.sought import lacking_places
from vnext.state.preempt import row_tokens
from vnext.state.state import State
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.inputs import length_at


def next_encoding(state: State) -> InputEncoded | None:
    """The units that ranks compute with the next step; None while no request waits for any, or no step can be planned."""
    now = state.encoding
    if not state.config.input_units or state.paused not in ("", "wait") or len(state.in_flight) >= in_flight_max(state):
        return None
    beside = decodes(state)
    if beside and now is not None and now.step == state.planned:
        return None
    work = expected_work(state)
    wanted = list(_wanted(state, work)) if work.pages_sum <= state.pool.free else []
    if not wanted or (now is not None and now.done == now.units and _goes_on(state, work)):
        return None
    begun_one = next((each for each in wanted if now is not None and each == (now.id, now.place)), None)
    id_, place = begun_one or wanted[0]
    tokens = tokens_of(state, id_)
    assert tokens is not None
    left = now.units - now.done if begun_one and now is not None else units_of(state.config, length_at(tokens, place))
    return InputEncoded(id=RequestId(id_), place=place, units=1 if beside else left)


def next_search(state: State, ids: Iterable[int]) -> InputsSought | None:
    """The first of these requests for whose inputs ranks look now; None where none waits that computes any."""
    return next((InputsSought(id=RequestId(id_)) for id_ in ids if lacking_places(state, id_)), None)


def _wanted(state: State, work: Work) -> Iterator[tuple[int, int]]:
    """(request, place) of the inputs that are not encoded and at which chunks of the next step end."""
    rows = state.rows
    ends = rows.computed + work.tokens
    for row in np.flatnonzero(ends < rows.prompt).tolist():
        end, id_ = int(ends[row]), int(rows.id[row])
        if row_tokens(state, row)[end] < INPUT_BEGINS and not is_encoded(state, id_, end):
            yield id_, end
    room = admitted_max(state) if state.waiting else 0
    for place, verdict in verdicts(state, admissible(state, room), work) if room > 0 else ():
        id_, (tokens, start) = state.waiting[place].id, _known_from(state, place)
        if not isinstance(verdict, Wait):
            found = begun(tokens, start + verdict, 1)
        else:
            found = begun(tokens, start, 1, is_new=True) if verdict.why == "inputs" else []
        yield from ((id_, at) for at in found if not is_encoded(state, id_, at))
        if isinstance(verdict, Wait):
            return


def _known_from(state: State, place: int) -> tuple[np.ndarray, int]:
    """The tokens of a waiting request (int32), and the first of them that it would compute."""
    entry = state.waiting[place]
    start = hit_tokens_of(state.config, prefix_hits(state.config, state.pool, entry))
    return np.frombuffer(entry.tokens, np.int32), start


def _goes_on(state: State, work: Work) -> bool:
    """Whether the next step begins the input that is encoded, or was to begin it and computes something else."""
    now, rows = state.encoding, state.rows
    assert now is not None
    if now.step == state.planned:
        return work.tokens_sum > 0 or bool(admissions(state, work))
    mine = np.flatnonzero(rows.id == now.id)
    if len(mine):
        return bool((rows.computed[mine] <= now.place).all() and (now.place < rows.computed[mine] + work.tokens[mine]).all())
    joins = next((each for each in admissions(state, work) if state.waiting[each[0]].id == now.id), None)
    return joins is not None and now.place in begun(*_known_from(state, joins[0]), joins[1], is_new=True)
