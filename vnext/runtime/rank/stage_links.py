"""The links of a pipeline's stages: hidden states to the stage behind, and sampled tokens from rank 0 to all stages before.

Owns which rank has which stage, and the rings between ranks of one host; hosts/host_links.py has the links between hosts, each of
which has whole stages. A message arrives whole or not at all, a full ring blocks its writer, and a rank that waits for another
notices its end. Ranks of one host meet by files beside their rendezvous. Knows bytes, no tensors.

    ranks      0 .. t-1    t .. 2t-1   ...    each stage has t ranks that share its layers
    stage      last        before      ...    rank 0 samples and reports, so it is of the last one
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.runtime.hosts.host_links import HostLinks, HostReader, HostWriter
from vnext.runtime.hosts.wire import WireBroken
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.ring.common import RingClosed
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter

MEETING_S = 300.0
LOOK_S = 2e-3
Writer = RingWriter | HostWriter
Reader = RingReader | HostReader
LOST = "a stage before or behind this one has ended or left the pipeline"


class StagePlace(NamedTuple):
    """A rank's stage, and its number among the `size` ranks that share the stage's layers."""

    stage: int
    rank: int
    size: int


def stage_place(settings: RankSettings) -> StagePlace:
    size = settings.world_size // settings.pipeline_parallel_size
    return StagePlace(settings.pipeline_parallel_size - 1 - settings.rank // size, settings.rank % size, size)


class StageLinks:
    """One rank's ends. Makes its own rings first, so that ranks may come in any order. One thread uses it."""

    def __init__(self, settings: RankSettings) -> None:
        """Meets the other ranks. Raises RankLost for one that does not come, OSError without room for a ring."""
        rank, size, here = settings.rank, stage_place(settings).size, settings.local_world_size
        self._settings, self._hosts = settings, HostLinks(settings) if settings.nnodes > 1 else None
        self._tokens_out: list[Writer] = []
        self._to_next: Writer | None = None
        self._from_previous: Reader | None = None
        self._tokens_in: Reader | None = None
        if rank == 0:
            counts = (here - size, True), (settings.world_size - here, False)
            self._tokens_out = [self._writer("tokens", count, is_here) for count, is_here in counts if count]
        elif rank >= size:
            self._to_next = self._writer(f"states-{rank}", 1, self._is_here(rank - size))
        if rank + size < settings.world_size:
            self._from_previous = self._reader(f"states-{rank + size}", 0, rank + size)
        if rank >= size:
            self._tokens_in = self._reader("tokens", rank - size, 0)

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
        for each in self._tokens_out:
            _write(each, tokens.astype(np.int32).tobytes())

    def tokens(self) -> np.ndarray:
        """What the oldest step that was not asked for has sampled, int64 [S]; waits for it. Raises RankLost."""
        assert self._tokens_in is not None, "the last stage samples by itself"
        return np.frombuffer(_read(self._tokens_in), np.int32).astype(np.int64)

    def close(self) -> None:
        """Leave: ranks that wait for this one get RankLost. Idempotent."""
        for each in (self._to_next, *self._tokens_out, self._from_previous, self._tokens_in):
            if each is not None:
                each.close()

    def _is_here(self, rank: int) -> bool:
        return rank // self._settings.local_world_size == self._settings.rank // self._settings.local_world_size

    def _writer(self, topic: str, reader_count: int, is_here: bool) -> Writer:
        if is_here or self._hosts is None:
            return _publish(f"{self._settings.rendezvous}-{topic}", reader_count)
        return self._hosts.writer(topic, reader_count)

    def _reader(self, topic: str, number: int, writer: int) -> Reader:
        """Of what the rank `writer` makes; `number` among the readers of this host."""
        if self._is_here(writer) or self._hosts is None:
            return RingReader.attach(_found(f"{self._settings.rendezvous}-{topic}"), number)
        return self._hosts.reader(topic)


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


def _write(link: Writer, message: bytes) -> None:
    try:
        link.write(message)
    except (RingClosed, WireBroken) as error:
        raise RankLost(LOST) from error


def _read(link: Reader) -> bytes:
    try:
        message = link.read()
    except (RingClosed, WireBroken) as error:
        raise RankLost(LOST) from error
    assert message is not None, "without a limit of time there is a message"
    return message
