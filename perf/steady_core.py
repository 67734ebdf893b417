"""A steady engine core in one process, driven by `count_instructions` and the benchmark of its parts.

Owns a substitute for the ranks and one for the API server. Everything else is real: the core, its clients, its executor with
ring and sockets, its log. The substitute rank answers each plan at once with arbitrary tokens, at almost no cost.
"""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import zmq

from vnext.runtime.engine.clients import Clients
from vnext.runtime.engine.engine_core import EngineCore
from vnext.runtime.engine.executor import MpExecutor
from vnext.runtime.engine.sizing import scheduler_config
from vnext.runtime.protocol.messages import EngineReady, Hello, ModelFacts, RankReady, StepResult, SubmitRequest, encoder
from vnext.runtime.protocol.settings import EngineSettings, RankSettings
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.runtime.transport.ring.broadcast import decode_events
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.results import ResultsSender
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, StepPlanned, pack_tokens
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

VOCABULARY = 3000
PROMPT_LENGTH = 16
LENGTH_MAX = 1 << 14


class Rank:
    """One rank's process, as the engine core sees it."""

    name, exit_fd = "rank 0", None

    def __init__(self) -> None:
        self._planned: deque[tuple[int, int]] = deque()
        self._state: State | None = None

    def send_config(self, config: bytes) -> None:
        settings = msgspec.msgpack.decode(config, type=RankSettings)
        self._ring = RingReader.attach(settings.ring, 0, spin_us=0)
        self._results = ResultsSender(settings.results_address)
        model = ModelFacts(vocab_size=VOCABULARY, position_count_max=LENGTH_MAX, eos_token_ids=(0,))
        ready = RankReady(model=model, rank=0, page_count_max=1 << 20, block_bytes=1, model_digest="", environment={})
        self._results.send(encoder.encode(ready))

    def answer(self, core: EngineCore) -> bool:
        """Read the ring and answer the oldest plan. Returns False if there is none."""
        while (message := self._ring.read(0)) is not None:
            for event in decode_events(message):
                structure = self._first_digest(event)
                if isinstance(event, StepPlanned):
                    self._planned.append((event.step, structure))
        if not self._planned:
            return False
        step, structure = self._planned.popleft()
        scheduled = next(scheduled for scheduled in core.engine.state.in_flight if scheduled.step == step)
        tokens = pack_tokens(np.full(int(scheduled.samples.sum()), 7 + step % 100))
        result = StepResult(rank=0, step=step, digest=structure, token_digest=0, seconds=0.001, tokens=tokens)
        self._results.send(encoder.encode(result))
        return True

    def _first_digest(self, event: AnyEvent) -> int:
        """Return the digest of the state before step 0, which is always due; keep no state afterwards."""
        if isinstance(event, EngineStarted):
            self._state = start(event)
        elif self._state is not None:
            self._state = reduce(self._state, event)
        if self._state is None or not isinstance(event, StepPlanned):
            return 0
        state, self._state = self._state, None
        return digest(state)

    def check_alive(self) -> None:
        """Do nothing: the rank is this process."""

    def close(self) -> None:
        self._results.close()


class SteadyCore:
    """A context manager: an engine core with a log, and its client. Digests of ranks are never due."""

    def __enter__(self) -> SteadyCore:
        self._folder = tempfile.TemporaryDirectory(prefix="vnext-core-")
        self._context = zmq.Context()
        front, self._client = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        front.bind(f"ipc://{self._folder.name}/engine")
        self._client.connect(f"ipc://{self._folder.name}/engine")
        self._rank = Rank()
        self._executor = MpExecutor([self._rank], Path(self._folder.name), _settings_of)
        settings = EngineSettings(digest_interval=1 << 30)
        ranks = self._executor.start()
        started = EngineStarted(
            config=scheduler_config(settings, ranks[0].model, ranks), model="none", model_digest="", world_size=1,
            environment={}, started_ns=0,
        )  # fmt: skip
        recorder = Recorder.open(f"{self._folder.name}/log", started, settings.log, Bounds(timestamped=True))
        ready = EngineReady(config=started.config, model="none", world_size=1, log_dir="")
        self.clients = Clients(front, ready, 0)
        self.core = EngineCore(started, self._executor, recorder, self.clients, settings)
        self._poller = zmq.Poller()
        self._poller.register(front, zmq.POLLIN)
        self._executor.watch(self._poller)
        self._client.send(encoder.encode(Hello()))
        self._turn()
        self._front = front
        self._asked = 0
        return self

    def ask(self, count: int, answer_length: int) -> None:
        """Send `count` requests and run until they are admitted."""
        for _ in range(count):
            prompt = pack_tokens(np.arange(PROMPT_LENGTH) + 1 + (self._asked + 1) % 1000)
            self.ask_one(prompt, answer_length)

    def ask_one(self, prompt: bytes, answer_length: int, client: int = 0) -> None:
        """Send a request of this prompt."""
        self._asked += 1
        sampling = Sampling(seed=self._asked, max_tokens=answer_length, ignore_eos=True)
        name = f"cmpl-{self._asked:032x}-0"  # as long as the API server's names
        self._client.send(encoder.encode(SubmitRequest(name=name, prompt=prompt, sampling=sampling, client=client)))
        self._front.poll()  # wait until it has arrived, so that the next turn takes it regardless of ZMQ's thread

    def run(self, steps: int) -> None:
        """Run until `steps` more steps are committed."""
        engine = self.core.engine
        end = engine.state.committed + steps
        while engine.state.committed < end:
            self._rank.answer(self.core)
            self._turn()

    def _turn(self) -> None:
        self.core.step(dict(self._poller.poll(None)))
        while self._client.poll(0):
            self._client.recv()

    def __exit__(self, *_: object) -> None:
        self.core.shut_down()
        self._executor._ring.close()
        self._executor._results.close()
        for socket in (self._client, self._front):
            socket.close(linger=0)
        self._rank.close()
        self._context.term()
        self._folder.cleanup()


def _settings_of(rank: int, ring: str, results_address: str, rendezvous: str) -> RankSettings:
    return RankSettings(
        rank=rank, world_size=1, ring=ring, results_address=results_address, rendezvous=rendezvous, model_path="", dtype="auto",
        quantization="none", deterministic=None, device="cpu", threads=1, block_size=16, kv_cache_bytes=0,
    )  # fmt: skip
