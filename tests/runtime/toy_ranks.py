"""Ranks whose model is computable by hand: for tests of the engine core without weights, processes or sockets."""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.log import snapshot
from vnext.runtime.protocol.messages import RankMessage, RankReady, StepResult
from vnext.runtime.transport.ring.broadcast import BeginFrom, decode_events
from vnext.state.digest import details, digest, histories
from vnext.state.events import EngineStarted, StepCommitted, StepPlanned, pack_tokens
from vnext.state.reduce import reduce, start
from vnext.state.state import State


def toy_tokens(state: State) -> np.ndarray:
    """Each sampled row of the newest step gives 1 + (position + request id) modulo 7."""
    scheduled = state.in_flight[-1]
    positions = (scheduled.starts + scheduled.counts)[scheduled.samples]
    return 1 + (positions + scheduled.ids[scheduled.samples]) % 7


class ToyExecutor:
    """`world_size` replicas; results wait in `results` until the test lets them pass with `release`."""

    def __init__(self, world_size: int = 1, held: bool = False) -> None:
        self.world_size = world_size
        self.held = held
        self.results: list[StepResult] = []
        self.messages: list[bytes] = []
        self.drift: dict[int, int] = {}  # rank -> step from which its digest is wrong
        self.are_ready = True  # what `started` says
        self.has_ended = False  # whether they were killed
        self.wrong_tokens: dict[int, int] = {}  # rank -> step of which the last token is another there
        self._states: list[State | None] = [None] * world_size
        self._own: list[dict[int, bytes]] = [{} for _ in range(world_size)]
        self._ready: list[StepResult] = []

    def start(self) -> tuple[RankReady, ...]:
        return ()

    def begin(self) -> None:
        pass

    def started(self) -> tuple[RankReady, ...] | None:
        return () if self.are_ready else None

    def stacks(self, step: int) -> dict[int, str]:
        return {}

    def kill(self) -> None:
        self.has_ended = True

    def send(self, message: bytes) -> None:
        self.messages.append(message)
        for rank, state in enumerate(self._states):
            for event in decode_events(message, 0 if state is None else state.next_id):
                self._fold(rank, event)
        if not self.held:
            self.release()

    def release(self) -> None:
        self._ready, self.results = self._ready + self.results, []

    def receive(self) -> list[RankMessage]:
        ready, self._ready = self._ready, []
        return ready

    def watch(self, poller: object) -> None:
        pass

    def check(self, ready: object = None) -> None:
        pass

    @property
    def has_results(self) -> bool:
        return bool(self._ready)

    stalls = 0, 0.0

    def stop(self, grace_s: float = 0.0) -> None:
        self.has_ended = True

    def _fold(self, rank: int, event: object) -> None:
        if isinstance(event, EngineStarted):
            self._states[rank] = start(event)
            return
        if isinstance(event, BeginFrom):
            self._states[rank] = snapshot.load(snapshot.decode(event.snapshot), self._states[rank].config)
            return
        if isinstance(event, StepCommitted):
            assert event.tokens == b"", "tokens are not broadcast"
            event = msgspec.structs.replace(event, tokens=self._own[rank].pop(event.step))
        state = self._states[rank] = reduce(self._states[rank], event)
        if isinstance(event, StepPlanned):
            sampled = toy_tokens(state)
            if self.wrong_tokens.get(rank) == event.step:
                sampled[-1] ^= 8
            tokens = self._own[rank][event.step] = pack_tokens(sampled)
            wrong = event.step >= self.drift.get(rank, event.step + 1)
            self.results.append(
                StepResult(
                    rank=rank,
                    step=event.step,
                    digest=digest(state) ^ wrong,
                    token_digest=state.token_digest,
                    seconds=0.0,
                    tokens=tokens if rank == 0 else b"",
                    details=(details(state)[0] ^ wrong, *details(state)[1:]),
                    histories=histories(state),
                )
            )
