"""The agent: `vnext serve MODEL --nnodes N --node-rank R` on every host but the first. It starts ranks when the master asks.

Owns the connection to the master and the ranks of this host, which it runs as an engine core would (MpExecutor): ranks read its
ring and send it their results, and it passes both on. When the master is lost it ends its ranks and connects again, for ever: ranks
of a set that was given up never meet another.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from msgspec.structs import replace

from vnext.base.spelling import reason
from vnext.runtime.hosts.frames import (
    BEAT_S,
    SILENCE_S,
    AnyFrame,
    Beat,
    EndRanks,
    FromRank,
    HostHere,
    LocalRanks,
    RanksEnded,
    RingMessage,
    StartRanks,
    decoder,
    encode,
)
from vnext.runtime.hosts.wire import Wire, WireBroken, connected, link_key, shown
from vnext.runtime.processes.rank_processes import start_ranks
from vnext.runtime.processes.subprocesses import Child, ChildDied, RankStartFailed
from vnext.runtime.protocol.messages import encoder
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.transport.ring.common import RingClosed

log = logging.getLogger(__name__)
MakeRanks = Callable[[Sequence[Child], Path, Callable[[int, str, str, str], RankSettings], int], LocalRanks]
LOST = (ChildDied, RankStartFailed, RingClosed, OSError)
STARTING_POLL_MS = 50


class Agent:
    """One host's agent. One thread. `model_path` is the checkpoint's folder on this host, `run_dir` for sockets. `make_ranks` is
    MpExecutor."""

    def __init__(self, node: int, model_path: str, run_dir: Path, make_ranks: MakeRanks) -> None:
        self._node, self._model_path, self._run_dir, self._make_ranks = node, model_path, run_dir, make_ranks
        self._secret = b""
        self._ranks: LocalRanks | None = None
        self._generation = -1
        self._set_count = 0
        self._are_ready = False
        self._beat_due_s = self._heard_s = 0.0

    def run(self, address: tuple[str, int], secret: bytes, should_go_on: Callable[[], bool]) -> None:
        """Serve one master after another while `should_go_on`. Raises WireRefused."""
        is_told, self._secret = False, secret
        while should_go_on():
            try:
                wire = connected(socket.create_connection(address, timeout=SILENCE_S), secret, "host")
            except (OSError, WireBroken) as error:
                if not is_told:
                    log.warning("The master at %s:%d does not answer (%s); it is tried every second.", *address, reason(error))
                is_told = True
                time.sleep(BEAT_S)
                continue
            is_told = False
            log.warning("This host is node %d of the engine at %s:%d.", self._node, *address)
            try:
                self.serve(wire, should_go_on)
            except WireBroken as error:
                log.warning("The master is lost: %s.", error)
            finally:
                wire.close()
                self._end_ranks()

    def serve(self, wire: Wire, should_go_on: Callable[[], bool]) -> None:
        """Do what the master asks until it is lost. Raises WireBroken."""
        wire.send(encode(HostHere(node=self._node, address=wire.own_address)))
        self._wire, self._heard_s = wire, time.monotonic()
        self._poller = zmq.Poller()
        self._poller.register(wire.fileno(), zmq.POLLIN)
        while should_go_on():
            starting = self._ranks is not None and not self._are_ready
            self._poller.poll(int(STARTING_POLL_MS if starting else BEAT_S * 1000 / 2))
            for payload in wire.receive():
                self._heard_s = time.monotonic()
                self._obey(_frame_of(payload))
            self._watch_ranks()
            self._beat()
            if time.monotonic() - self._heard_s > SILENCE_S:
                raise WireBroken(f"it has been silent for {SILENCE_S:.0f} s")

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_due_s:
            self._beat_due_s = time.monotonic() + BEAT_S
            self._wire.send(encode(Beat()))

    def _obey(self, frame: AnyFrame) -> None:
        match frame:
            case StartRanks():
                self._start(frame)
            case RingMessage() if frame.generation == self._generation and self._ranks is not None:
                self._pass_on(self._ranks, frame.data)
            case EndRanks() if frame.generation == self._generation:
                self._end_ranks()

    def _start(self, frame: StartRanks) -> None:
        self._end_ranks()
        self._generation, self._set_count = frame.generation, self._set_count + 1

        def settings_of(place: int, ring: str, results: str, rendezvous: str) -> RankSettings:
            here = {"ring": ring, "results_address": results, "rendezvous": rendezvous, "model_path": self._model_path}
            key = link_key(self._secret, frame.ranks[place].store)
            return replace(frame.ranks[place], link_key=key, **here)

        children = start_ranks(frame.engine, [settings.rank for settings in frame.ranks])
        self._ranks = self._make_ranks(children, self._run_dir, settings_of, self._set_count)
        self._ranks.while_full = self._beat
        self._ranks.begin()

    def _pass_on(self, ranks: LocalRanks, data: bytes) -> None:
        try:
            ranks.send(data)
        except LOST as error:
            self._lose(error)

    def _watch_ranks(self) -> None:
        ranks = self._ranks
        if ranks is None:
            return
        try:
            if not self._are_ready:
                self._look_whether_ready(ranks)
                return
            for message in ranks.receive():
                self._wire.send(encode(FromRank(generation=self._generation, data=encoder.encode(message))))
            ranks.check()
        except LOST as error:
            self._lose(error)

    def _look_whether_ready(self, ranks: LocalRanks) -> None:
        ready = ranks.started()
        for message in ready or ():
            self._wire.send(encode(FromRank(generation=self._generation, data=encoder.encode(message))))
        if ready is not None:
            self._are_ready = True
            ranks.watch(self._poller)

    def _lose(self, error: Exception) -> None:
        why = error.how if isinstance(error, ChildDied) else str(error)
        log.warning("The ranks of this host are lost: %s.", why)
        self._wire.send(encode(RanksEnded(generation=self._generation, why=why, refused=isinstance(error, RankStartFailed))))
        self._end_ranks()

    def _end_ranks(self) -> None:
        ranks, self._ranks, self._are_ready = self._ranks, None, False
        if ranks is not None:
            ranks.kill()
            ranks.stop(0.0)


def _frame_of(payload: bytes) -> AnyFrame:
    """Raises WireBroken."""
    try:
        frame: AnyFrame = decoder.decode(payload)
        return frame
    except (ValueError, RecursionError) as error:
        raise WireBroken(f"it sends what this version cannot read ({shown(str(error))})") from error
