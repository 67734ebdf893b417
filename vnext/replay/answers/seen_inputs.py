"""A request's images, sounds and videos: where they lie in its prompt, and what became of each in which steps.

Owns what events and plans say of them. Ranks may still have the vectors of an input that came before; no log says so, and such an
input counts as encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from vnext.state.config import SchedulerConfig
from vnext.state.events import AnyEvent, InputEncoded, InputsFound, plan_of, unpack_tokens
from vnext.state.expected import is_encoded, unfound
from vnext.state.state import State
from vnext.state.store.inputs import has_inputs, inputs_in, rows_of, step_of

DIGEST_SHOWN = 4
LISTENS, FORM = "sounds", "images"
"""Members of the environment: a model whose prompts begin with a sound has the first; the second begins with it where sounds stand
among tokens."""

How = Literal["computed", "hit", "found", "encoded"]
"""A step computes tokens of it, the cache has its blocks, ranks read its vectors from files, ranks encode it or a part of it."""
WORDS: dict[How, str] = {"computed": "computed", "hit": "in the cache", "found": "found in files", "encoded": "encoded"}


class SeenInput(msgspec.Struct, kw_only=True):
    """Tokens `first` to `last` of a prompt. `digest`: its first bytes, hexadecimal. `runs`: (first step, last step, how), oldest
    first."""

    first: int
    last: int
    kind: Literal["image", "sound", "video"]
    digest: str
    runs: list[tuple[int, int, How]]


def inputs_of(prompt: bytes, config: SchedulerConfig, environment: Mapping[str, str]) -> list[SeenInput]:
    """The inputs of a prompt (int32 bytes), of which nothing has become yet. Where images do not lie in rows, a video is images."""
    found = inputs_in(unpack_tokens(prompt)) if has_inputs(prompt) else []
    listens = LISTENS in environment or environment.get(FORM, "").split(" ")[0] == LISTENS
    heard = [listens or (config.grids and not rows_of(each.digest)) for each in found]
    goes_on = [config.grids and step_of(each.digest) is not None for each in found]
    return [
        SeenInput(
            first=each.start, last=each.start + each.length - 1, digest=each.digest[:DIGEST_SHOWN].hex(), runs=[],
            kind="sound" if heard[place] else "video" if any(goes_on[place : place + 2]) else "image",
        )
        for place, each in enumerate(found)
    ]  # fmt: skip


def hear(inputs: list[SeenInput], id_: int, event: AnyEvent, before: State, after: State) -> None:
    """Add what became of a request's inputs by an event between two states."""
    step = before.planned
    match event:
        case InputEncoded() if event.id == id_:
            _extend(inputs, step, {event.place: "encoded"})
        case InputsFound() if event.id == id_:
            _extend(inputs, step, dict.fromkeys(event.places, "found"))
        case _ if inputs and plan_of(event):
            _extend(inputs, step, _planned(inputs, id_, before, after))


def _planned(inputs: list[SeenInput], id_: int, before: State, after: State) -> dict[int, How]:
    """What a step does with inputs, by where they begin."""
    scheduled, hows = after.in_flight[-1], dict[int, How]()
    for place in (scheduled.ids == id_).nonzero()[0].tolist():
        start, end = int(scheduled.starts[place]), int(scheduled.starts[place] + scheduled.counts[place])
        is_new = id_ not in before.rows.id
        for each in inputs:
            if is_new and each.last < start:
                hows[each.first] = "hit"
            elif start <= each.last and each.first < end:
                begins = is_new or start <= each.first
                hows[each.first] = "encoded" if begins and _lacks(before, id_, each.first) else "computed"
    return hows


def _lacks(state: State, id_: int, place: int) -> bool:
    """Whether ranks have no vectors of an input when a step begins it."""
    is_whole = not state.config.input_units or not is_encoded(state, id_, place)
    return is_whole and bool(unfound(state, id_, [place]))


def _extend(inputs: list[SeenInput], step: int, hows: dict[int, How]) -> None:
    for each in inputs:
        if (how := hows.get(each.first)) is None:
            continue
        last = next((place for place in reversed(range(len(each.runs))) if each.runs[place][2] == how), -1)
        if last >= 0 and each.runs[last][1] >= step - 1:
            each.runs[last] = each.runs[last][0], step, how
        else:
            each.runs.append((step, step, how))


def in_a_line(each: SeenInput) -> str:
    """An input in one line."""
    where = [f"{WORDS[how]} in step{f' {first}' if first == last else f's {first} to {last}'}" for first, last, how in each.runs]
    return f"{each.kind} {each.digest}, tokens {each.first} to {each.last}: {', '.join(where) or 'no step has reached it'}"
