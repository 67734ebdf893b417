"""Outputs: what must be told to whom because of one event. Effects as values; the runtime only carries them out."""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.state import rows as columns
from vnext.state.committing import Settled, settle
from vnext.state.events import AnyEvent, RequestAborted, RequestId, StepCommitted
from vnext.state.state import State

Finish = Literal["", "stop", "length", "abort"]


class Output(msgspec.Struct, frozen=True):
    """One request's news. `token` is -1 where none came; `sample` is its place among the step's samples.

    `stop_token` is the token that ended the request, -1 if none did. `cached_tokens` is its prompt's prefix hit.
    """

    id: RequestId
    name: str
    token: int
    sample: int
    finish: Finish
    stop_token: int
    cached_tokens: int


def outputs(before: State, event: AnyEvent, after: State, settled: Settled | None = None) -> tuple[Output, ...]:
    """News of a commit, in the step's order, or of an abort. `settled` as in `reduce`."""
    if isinstance(event, StepCommitted):
        return _of_commit(before, settled or settle(before, event))
    if isinstance(event, RequestAborted):
        named_once = dict.fromkeys(event.ids)
        gone = [before.requests[id_] for id_ in named_once if id_ in before.requests and id_ not in after.requests]
        return tuple(Output(request.id, request.name, -1, -1, "abort", -1, 0) for request in gone)
    return ()


def _of_commit(before: State, settled: Settled) -> tuple[Output, ...]:
    ids = before.rows.id[settled.rows].tolist()
    cached = before.rows.cells[columns.CACHED, settled.rows].tolist()
    told, requests = [], before.requests.mapping()
    for id_, token, sample, stopped, at_limit, hit in zip(
        ids, settled.tokens.tolist(), settled.samples.tolist(), settled.stopped.tolist(), settled.at_limit.tolist(), cached
    ):
        finish: Finish = "stop" if stopped else "length" if at_limit else ""
        told.append(Output(id_, requests[id_].name, token, sample, finish, token if stopped else -1, hit))
    return tuple(told)
