"""Turning: where a step's tokens stand for a rope that turns by time, rows and columns (M-RoPE, arXiv 2409.12191, section 2.1).

For texts and sounds the three are one number. An image's tokens lie in rows (store/inputs.py), from its first token's place on, and
what follows goes on behind the longest of its sides, as which time counts: parts of a video begin where it begins, each so much
later than the one before it as its digest tells. So a token's places follow from the prompt before it, and those of an answer are
places in the sequence, moved by a number that a row keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vnext.state.events import unpack_tokens
from vnext.state.store.inputs import has_inputs, inputs_in, rows_of, step_of


class Grid(NamedTuple):
    """An image: tokens `start` to `end` of a prompt, so many a row, which stand from the place `begin` on, and at `time` behind it.
    `behind` is added to the places of what follows."""

    start: int
    end: int
    columns: int
    begin: int
    time: int
    behind: int


def grids_of(prompt: bytes) -> list[Grid]:
    """The images of a prompt (int32 bytes), in order."""
    found, moved = list[Grid](), 0
    for start, length, digest in inputs_in(unpack_tokens(prompt)) if has_inputs(prompt) else ():
        if not rows_of(digest):
            continue  # a sound
        rows, step, end, next_ = rows_of(digest), step_of(digest), start + length, start + moved
        begin, time = next_, 0
        if step is not None and found and found[-1].end == start:
            begin, time = found[-1].begin, found[-1].time + step
        moved = max(next_, begin + max(rows, length // rows, time + 1)) - end
        found.append(Grid(start, end, length // rows, begin, time, moved))
    return found


class Turning:
    """The images of a batch's rows. Mutable."""

    def __init__(self, row_count: int) -> None:
        self._grids: dict[int, list[Grid]] = {}
        self._moved = np.zeros(row_count, dtype=np.int64)
        self._ends = np.zeros(row_count, dtype=np.int64)  # of the last image

    def join(self, place: int, prompt: bytes) -> None:
        """A request has this row from now on."""
        self._grids.pop(place, None)
        self._moved[place] = self._ends[place] = 0
        if grids := grids_of(prompt):
            self._grids[place] = grids
            self._moved[place], self._ends[place] = grids[-1].behind, grids[-1].end

    def of(self, places: np.ndarray, starts: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Of a step with `counts` tokens from `starts` on in the rows at `places`, at `positions` in all: one number for each token
        (int64 [T]), or three (int64 [3, T]) where an image is among them; None for a step of rows without images."""
        if not self._grids or not self._ends[places].any():
            return None
        found: np.ndarray = positions + np.repeat(self._moved[places], counts)
        begun = np.flatnonzero(starts < self._ends[places])
        if not len(begun):
            return found
        found, firsts = np.tile(found, (3, 1)), np.cumsum(counts) - counts
        for at in begun.tolist():
            own = slice(int(firsts[at]), int(firsts[at] + counts[at]))
            found[:, own] = turned(self._grids[int(places[at])], positions[own])
        return found[0] if (found == found[0]).all() else found


def turned(grids: list[Grid], positions: np.ndarray) -> np.ndarray:
    """Where these tokens of a prompt stand, int64 [3, n]."""
    found = np.tile(positions, (3, 1))
    for start, end, columns, begin, time, behind in grids:
        inside, after = (positions >= start) & (positions < end), positions >= end
        rows, places = np.divmod(positions[inside] - start, columns)
        found[:, inside] = begin + np.stack((0 * rows + time, rows, places))
        found[:, after] = positions[after] + behind
    return found
