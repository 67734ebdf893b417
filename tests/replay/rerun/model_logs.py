"""Logs of real engines with real models, made in this process: the core, its recorder and one rank, requests by a story."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from vnext.log import codec
from vnext.log.codec import SegmentHeader
from vnext.log.reading import read
from vnext.runtime.engine.clients import Asked
from vnext.runtime.engine.engine_core import EngineCore
from vnext.runtime.engine.executor import InprocExecutor
from vnext.runtime.processes.run_dir import CoreNotes
from vnext.runtime.protocol.messages import Operate, Operated
from vnext.runtime.protocol.operations import Mode, UpdateWeights
from vnext.runtime.protocol.settings import EngineSettings, RankSettings
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.record.segments import Bounds
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.params import Sampling
from vnext.state.state import State

TURNS_MAX = 2000

KEPT = 8
"""So many requests come after an operation that is under way, however long it takes."""


class Story:
    """Clients as the core sees them: requests come a few a turn, prefixes are shared, some requests are aborted."""

    def __init__(self, seed: int, requests: int, tokens: int, vocabulary: int) -> None:
        self.left = requests
        self.notes, self.asked, self.updating = CoreNotes(""), Asked(), 0
        self._rng = random.Random(seed)
        self._tokens, self._vocabulary = tokens, vocabulary
        self._shared = [self._rng.randrange(vocabulary) for _ in range(24)]

    def arrived(self, state: State, ready: object = None) -> Iterator[AnyEvent]:
        next_id, kept = state.next_id, KEPT if self.updating else 0
        for id_ in range(next_id, next_id + min(max(self.left - kept, 0), self._rng.randint(0, 2))):
            self.left -= 1
            yield self._arrival(id_)
        if state.requests and self._rng.random() < 0.02:
            yield RequestAborted(ids=(min(id_ for id_, _ in state.requests.items()),), reason="client")

    def _arrival(self, id_: int) -> RequestArrived:
        rng = self._rng
        own = [rng.randrange(self._vocabulary) for _ in range(rng.randint(1, 20))]
        prompt = self._shared[: rng.choice((0, 0, 8, 24))] + own
        more = rng.choice(({}, {}, {"top_p": 0.9}, {"top_k": 9}, {"repetition_penalty": 1.2, "frequency_penalty": 0.3}))
        sampling = Sampling(
            seed=rng.getrandbits(60), max_tokens=rng.randint(2, self._tokens), temperature=rng.choice((0.0, 0.8, 1.3)),
            min_tokens=rng.choice((0, 2)), logit_bias=rng.choice(((), ((4, 1.5),))), ignore_eos=True, **more,
        )  # fmt: skip
        return RequestArrived(id=id_, name=f"r{id_}", prompt=pack_tokens(prompt), sampling=sampling, priority=0, arrival_ns=0)

    is_behind = False

    def begun(self, ids: list[int], missed: object) -> None:
        """Nobody waits."""

    def tell(self, news) -> None:
        """Nobody listens."""

    def tell_stats(self, stats) -> None:
        """Nobody asks."""

    def answer(self, peer: bytes, message: Operated) -> None:
        """An operation is done."""
        assert not message.error, message.error
        self.updating -= 1

    def update(self, path: Path, mode: Mode) -> None:
        self.updating += 1
        self.asked.operations.append((b"", Operate(name=str(path), operation=UpdateWeights(paths=(str(path),), mode=mode))))


def settings_of(path: Path, config: SchedulerConfig, **changes: object) -> RankSettings:
    plain = dict(
        rank=0, world_size=1, ring="", results_address="", rendezvous="", model_path=str(path), dtype="auto",
        quantization="none", deterministic=None, device="cpu", threads=1, block_size=config.block_size, kv_cache_bytes=2**20,
    )  # fmt: skip
    return RankSettings(**{**plain, **changes})


def record(
    path: Path, log_dir: Path, *, seed: int = 1, requests: int = 12, tokens: int = 14, privacy: str = "full",
    segment_bytes: int = 10**7, after: Callable[[State], None] = lambda state: None,
    settings: dict[str, object] | None = None, updates: dict[int, tuple[Path, Mode]] | None = None, **config: object,
) -> Path:  # fmt: skip
    """The log of an engine that served a story with the checkpoint in `path`; blocks are scarce, so that requests give way. `updates`: by
    the turn, the files of other weights, and what becomes of requests that have begun."""
    fields = dict(
        block_size=4, page_count=40, max_num_batched_tokens=24, max_num_seqs=6, max_model_len=96, eos_token_ids=(0,),
        digest_interval=3,
    )  # fmt: skip
    made = SchedulerConfig(**(fields | config))
    executor = InprocExecutor(settings_of(path, made, **(settings or {})))
    (ready,) = executor.start()
    windows = ready.model.windows if any(ready.model.windows) else ()
    made = msgspec.structs.replace(made, windows=windows, vocab_size=ready.model.vocab_size)
    started = EngineStarted(
        config=made, model=str(path), model_digest=ready.model_digest, world_size=1, environment=ready.environment, started_ns=0
    )
    story = Story(seed, requests, tokens, made.vocab_size)
    recorder = Recorder.open(log_dir, started, privacy, Bounds(segment_bytes=segment_bytes))
    core = EngineCore(started, executor, recorder, story, EngineSettings())
    turns, updates = 0, dict(updates or {})
    while turns < TURNS_MAX:
        if not story.updating:
            turns += 1
        if turns in updates:
            story.update(*updates.pop(turns))
        core.step()
        after(core.state)
        if not (story.left or story.updating or core.state.requests or core.state.in_flight):
            break
    core.shut_down()
    return log_dir


def rewritten(
    log_dir: Path,
    target: Path,
    header: Callable[[SegmentHeader], SegmentHeader] = lambda header: header,
    event: Callable[[AnyEvent], AnyEvent] = lambda event: event,
) -> Path:
    """The log with other headers and events; checksums fit, the digests of states do not."""
    target.mkdir()
    for path in sorted(log_dir.glob("*.vnextlog")):
        first, *frames = read([path.read_bytes()])
        data = codec.open_segment(header(first.header))[0]
        for frame in frames[:-1]:
            events = [event(each) for each in frame.events]
            body = codec.encode_body(frame.first_event, events, frame.rank_digests, frame.lost, first.header.token_width)
            data += codec.encode_frame(frame.digest, body)
        (target / path.name).write_bytes(data)
    return target


def with_other_token(log_dir: Path, target: Path, step: int, place: int, token: int) -> Path:
    """The log in which sample `place` of `step` is another token."""
    return rewritten(log_dir, target, event=lambda event: _altered(event, step, place, token))


def _altered(event: AnyEvent, step: int, place: int, token: int) -> AnyEvent:
    if not isinstance(event, StepCommitted) or event.step != step:
        return event
    tokens = unpack_tokens(event.tokens).copy()
    tokens[place] = token
    return StepCommitted(step=step, tokens=pack_tokens(tokens))


