"""The expected plan: every running request advances by what it needs, in order, under the step's token budget.

Plans are recorded and sent as differences from this one, so a steady step costs a few bytes whatever the batch size.

With microbatches, a step takes its part of the requests that decode, and none whose token is in flight. The stages of a pipeline
then compute several steps at once: the next step needs no token of the one before. Prompts are computed in every step.

A rank encodes an input, a tile of an image or a sound, at the latest in the first step that computes a part of it, and everybody
waits for that. So with `inputs_a_step` a chunk ends where one more input would begin: rows are served in order, then admitted
requests. With `input_units` it ends at one whose units are not all computed, and `input_tokens` bound what is computed of inputs
beside requests that decode. A step that lacks pages begins any number, since those who are left must go on. Source: vLLM's encoder
budget.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from vnext.state.drafting import expected_drafts
from vnext.state.preempt import row_tokens
from vnext.state.recurrent import cut
from vnext.state.state import State, Waiting
from vnext.state.store import columns, columns_numpy
from vnext.state.store.fields import INPUT_BEGINS
from vnext.state.store.rows import wants


class InputRoom(NamedTuple):
    """How many `inputs` a step may still begin, and how many `tokens` of inputs it may still compute."""

    inputs: int
    tokens: int


ANY_INPUTS = InputRoom(0, 0)
"""Of an engine without bounds."""
NO_BOUND = 2**62


class Work(msgspec.Struct, frozen=True):
    """The work of one step: new tokens of each row and the blocks it lacks for them (int64[R] each, never written again).

    `tokens_sum` is the sum of the tokens, `pages_sum` the number of pages that all these blocks take. `drafts` int64[R]: how
    many of the tokens are drafts; None without speculation. `room` is what is left of inputs for admitted requests.
    """

    tokens: np.ndarray
    blocks: np.ndarray
    tokens_sum: int
    pages_sum: int
    drafts: np.ndarray | None = None
    room: InputRoom = ANY_INPUTS


def expected_work(state: State, drafts: bool = True) -> Work:
    """The work of the expected plan: 0 tokens for a row that has nothing to compute, whose turn it is not, or that the budget does
    not reach.

    Drafts are part of it while the free pages suffice for all of them, unless `drafts` is false.
    """
    config, cells = state.config, state.rows.cells
    if config.inputs_a_step or (config.state_pages and config.takes_snapshots):
        work = _up_to_edges(state)
    else:
        both = np.empty((2, cells.shape[1]), dtype=np.int64)
        tokens_sum, blocks_sum = columns.impl.expected(
            cells, both, config.max_num_batched_tokens, config.long_prefill_token_threshold, config.block_size,
            microbatches(state), state.planned,
        )  # fmt: skip
        work = Work(both[0], both[1], tokens_sum, blocks_sum * (len(config.windows) or 1))
    if config.speculation is None:
        return work
    if drafts and len(state.rows):
        drafted, total = expected_drafts(config, state.rows, work.tokens)
        if not total:
            return msgspec.structs.replace(work, drafts=drafted)
        drafting = work_of(state, work.tokens + drafted, drafted, work.room)
        if drafting.pages_sum <= state.pool.free:
            return drafting
    return msgspec.structs.replace(work, drafts=np.zeros_like(work.tokens))


def in_turn(state: State) -> np.ndarray:
    """Which rows the next step takes (bool[R]): all, or those of its microbatch."""
    return columns_numpy.in_turn(state.rows.cells, microbatches(state), state.planned)


def microbatches(state: State) -> int:
    """The parts into which the next steps divide the requests that decode. Cautious steps follow one another and take all."""
    return 1 if state.cautious else state.config.microbatches


def _up_to_edges(state: State) -> Work:
    """As `columns.expected`, cut where snapshots of recurrent layers are taken and where more inputs would begin than may."""
    config, rows = state.config, state.rows
    most = wants(rows) * in_turn(state)
    if config.long_prefill_token_threshold:
        most = np.minimum(most, config.long_prefill_token_threshold)
    most, room = up_to_inputs(state, cut(config, rows, most))
    before = np.cumsum(most) - most
    return work_of(state, np.minimum(np.maximum(config.max_num_batched_tokens - before, 0), most), room=room)


def work_of(state: State, tokens: np.ndarray, drafts: np.ndarray | None = None, room: InputRoom = ANY_INPUTS) -> Work:
    """The work of computing the given number of tokens in each row, of which `drafts` are drafts (int64[R] each), with so much
    room left of inputs."""
    config, rows = state.config, state.rows
    need = np.empty(len(rows), dtype=np.int64)
    blocks = columns.impl.needed(rows.cells, tokens, need, config.block_size)
    return Work(tokens, need, int(tokens.sum()), blocks * config.group_count, drafts, room)


# ---- inputs --------------------------------------------------------------------------------------------------------


def room_of(state: State) -> InputRoom:
    """What a step may begin and compute of inputs."""
    config = state.config
    return InputRoom(config.inputs_a_step, config.input_tokens if config.input_tokens and decodes(state) else NO_BOUND)


def decodes(state: State) -> bool:
    """Whether a running request has computed its prompt: its client waits for the next token."""
    return bool((state.rows.computed >= state.rows.prompt).any())


def up_to_inputs(state: State, tokens: np.ndarray) -> tuple[np.ndarray, InputRoom]:
    """`tokens` of the rows (int64[R]), cut where they would go further into inputs than a step may, and what is left for others."""
    if not state.config.inputs_a_step:
        return tokens, ANY_INPUTS
    found, rows, room = tokens.copy(), state.rows, room_of(state)
    for row in np.flatnonzero((rows.computed < rows.prompt) & (tokens > 0)).tolist():
        known, start, id_ = row_tokens(state, row), int(rows.computed[row]), int(rows.id[row])
        begins = unfound(state, id_, begun(known, start, int(tokens[row])))
        ready = [place for place in begins if is_encoded(state, id_, place)]
        found[row], room = _cut(known[start:], int(tokens[row]), [(place - start, place in ready) for place in begins], room)
    return found, room


def first_up_to_inputs(state: State, waiting: Waiting, start: int, tokens: int, room: InputRoom) -> tuple[int, InputRoom]:
    """`tokens` of a waiting request from `start` on, cut as those of a row, and what others may still begin, where the model takes
    inputs. It begins the input in which it starts, too."""
    known = np.frombuffer(waiting.tokens, np.int32)
    lacking = unfound(state, waiting.id, begun(known, start, tokens, is_new=True))
    begins = [(max(place - start, 0), is_encoded(state, waiting.id, place)) for place in lacking]
    return _cut(known[start:], tokens, begins, room)


def begun(tokens: np.ndarray, start: int, count: int, is_new: bool = False) -> list[int]:
    """Where the inputs begin that `count` of these tokens (int32) from `start` on begin. Who `is_new` begins the input in which it
    starts, too."""
    found: list[int] = (np.flatnonzero(tokens[start : start + count] < INPUT_BEGINS) + start).tolist()
    if is_new and count and INPUT_BEGINS <= tokens[start] < 0:
        found.insert(0, int(np.flatnonzero(tokens[:start] < INPUT_BEGINS)[-1]))
    return found


def is_encoded(state: State, id_: int, place: int) -> bool:
    """Whether the input that begins at this place of a request may begin: all its units are computed, or it has none."""
    now = state.encoding
    is_whole = not state.config.input_units or (now is not None and (now.id, now.place, now.done) == (id_, place, now.units))
    return is_whole or not unfound(state, id_, [place])


def unfound(state: State, id_: int, places: list[int]) -> list[int]:
    """Those of a request's inputs whose vectors ranks have not found in files: no others cost a step anything."""
    found = next((found for id_found, found in state.sought.found if id_found == id_), ()) if state.sought is not None else ()
    return [place for place in places if place not in found] if found else places


def _cut(known: np.ndarray, count: int, begins: list[tuple[int, bool]], room: InputRoom) -> tuple[int, InputRoom]:
    """How many of `count` tokens (int32), among which inputs begin at places, each encoded or not, a step with this room computes,
    and the room that is left."""
    of_inputs = np.flatnonzero(known[:count] < 0)
    if len(of_inputs) > room.tokens:
        count = int(of_inputs[room.tokens])
    inputs = room.inputs
    for place, ready in begins:
        if place >= count:
            break
        if not inputs or not ready:
            count = place
            break
        inputs -= 1
    return count, InputRoom(inputs, room.tokens - int((of_inputs < count).sum()))
