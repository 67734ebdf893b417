"""The links of a pipeline's stages: hidden states to the stage behind, and sampled tokens from rank 0 to all stages before.

Owns which rank has which stage, and the rings between ranks. A message arrives whole or not at all, a full ring blocks its writer,
and a rank that waits for another notices its end. Ranks meet by files beside their rendezvous. Knows bytes, no tensors.

    ranks      0 .. t-1    t .. 2t-1   ...    each stage has t ranks that share its layers
    stage      last        before      ...    rank 0 samples and reports, so it is of the last one
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.runtime.collectives.errors import RankLost
from vnext.runtime.ring.common import RingClosed
from vnext.runtime.ring.reader import RingReader
from vnext.runtime.ring.writer import RingWriter
from vnext.runtime.settings import RankSettings

MEETING_S = 300.0
LOOK_S = 2e-3
LOST = "a stage before or behind this one has ended or left the pipeline"


class StagePlace(NamedTuple):
    """A rank's stage, and its number among the `size` ranks that share the stage's layers."""

    stage: int
    rank: int
    size: int


def stage_place(settings: RankSettings) -> StagePlace:
    """Where a rank stands."""
    size = settings.world_size // settings.pipeline_parallel_size
    return StagePlace(settings.pipeline_parallel_size - 1 - settings.rank // size, settings.rank % size, size)


class StageLinks:
    """One rank's ends. Makes its own rings first, so that ranks may come in any order. One thread uses it."""

    def __init__(self, settings: RankSettings) -> None:
        """Meets the other ranks. Raises RankLost for one that does not come, OSError without room for a ring."""
        place, meeting = stage_place(settings), settings.rendezvous
        self._to_next = self._tokens_out = self._from_previous = self._tokens_in = None
        if settings.rank == 0:
            self._tokens_out = _publish(f"{meeting}-tokens", settings.world_size - place.size)
        elif settings.rank >= place.size:
            self._to_next = _publish(f"{meeting}-states-{settings.rank}", 1)
        if place.stage > 0:
            self._from_previous = RingReader.attach(_found(f"{meeting}-states-{settings.rank + place.size}"), 0)
        if settings.rank >= place.size:
            self._tokens_in = RingReader.attach(_found(f"{meeting}-tokens"), settings.rank - place.size)

    def send_states(self, states: np.ndarray) -> None:
        """Give the stage behind a step's hidden states, as bytes; blocks while that stage is several steps behind."""
        assert self._to_next is not None, "the last stage has none behind"
        _write(self._to_next, states.tobytes())

    def states(self) -> bytearray:
        """What the stage before has made of the next step; waits for it. Raises RankLost."""
        assert self._from_previous is not None, "the first stage has none before"
        return bytearray(_read(self._from_previous))

    def send_tokens(self, tokens: np.ndarray) -> None:
        """Tell the stages before what a step has sampled (any int [S]). Does nothing on the last stage's other ranks."""
        if self._tokens_out is not None:
            _write(self._tokens_out, tokens.astype(np.int32).tobytes())

    def tokens(self) -> np.ndarray:
        """What the oldest step that was not asked for has sampled, int64 [S]; waits for it. Raises RankLost."""
        assert self._tokens_in is not None, "the last stage samples by itself"
        return np.frombuffer(_read(self._tokens_in), np.int32).astype(np.int64)

    def close(self) -> None:
        """Leave: ranks that wait for this one get RankLost. Idempotent."""
        for each in (self._to_next, self._tokens_out, self._from_previous, self._tokens_in):
            if each is not None:
                each.close()


def _publish(path: str, reader_count: int) -> RingWriter:
    """A new ring whose name others find at `path`."""
    ring = RingWriter.create(reader_count=reader_count)
    Path(f"{path}.new").write_text(ring.name)
    os.replace(f"{path}.new", path)
    return ring


def _found(path: str) -> str:
    """The ring's name once there is one."""
    for _ in range(int(MEETING_S / LOOK_S)):
        try:
            return Path(path).read_text()
        except FileNotFoundError:
            time.sleep(LOOK_S)
    raise RankLost(f"a stage did not come to {path} within {MEETING_S:.0f} s; is it stuck?")


def _write(ring: RingWriter, message: bytes) -> None:
    try:
        ring.write(message)
    except RingClosed as error:
        raise RankLost(LOST) from error


def _read(ring: RingReader) -> bytes:
    try:
        message = ring.read()
    except RingClosed as error:
        raise RankLost(LOST) from error
    assert message is not None, "without a limit of time there is a message"
    return message
