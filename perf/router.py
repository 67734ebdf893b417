"""Routing over four engines' schedulers on a multi-turn trace: `python -m perf.router [--json FILE]`.

Owns the trace (from a seed), the engines (the product's reducer and scheduler; a round is one step of each) and the routers that are
compared: vnext's on views whose streams are some rounds late; the same policy with every engine's state at hand, which is the oracle;
round robin; least loaded; a tree of texts as SGLang's gateway has it; four routers beside each other; and one that is started again. Hits and waits are counts, the same on any machine. Times
are those of this process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vnext.log.stream import EventStreams
from vnext.machine import machine
from vnext.router.approximate import PrefixTree, piece_hashes
from vnext.router.prompts import Prompt
from vnext.router.router import Router
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepCommitted, pack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import fold, start
from vnext.version import __version__

ENGINES = 4
VOCABULARY = 30_000
TREE_THRESHOLD, TREE_LOAD_ABS, TREE_LOAD_REL = 0.3, 64, 1.5
"""cache_threshold, balance_abs_threshold and balance_rel_threshold of sglang's sgl-model-gateway."""
PAGES = {"the caches have room": 3_500, "the caches are full": 1_500}
"""Pages of each engine's cache, where the conversations in progress need about 3,800."""
CONFIG = SchedulerConfig(
    block_size=16, page_count=3_500, max_num_batched_tokens=512, max_num_seqs=32, max_model_len=8_192, pipeline_depth=2,
    eos_token_ids=(0,), vocab_size=VOCABULARY,
)  # fmt: skip


class Shape(msgspec.Struct, frozen=True):
    """A trace: conversations with one of `systems` system prompts each; sizes in tokens, times in rounds. Every one ends after some
    turns, and another begins in its place."""

    seed: int = 1
    page_count: int = 3_500
    conversations: int = 200
    requests: int = 1_500
    systems: int = 8
    system_tokens: int = 400
    turn_tokens: tuple[int, int] = (20, 200)
    answer_tokens: tuple[int, int] = (20, 150)
    turns: tuple[int, int] = (2, 10)
    think_rounds: tuple[int, int] = (20, 300)


class Conversation:
    """Mutable. `tokens` are all so far; `answer` is that of the request in progress."""

    def __init__(self, shape: Shape, rng: random.Random, systems: list[list[int]]) -> None:
        self._shape, self._rng = shape, rng
        self.tokens = list(rng.choice(systems))
        self.turns_left = rng.randint(*shape.turns)
        self.answer: list[int] = []
        self.due = rng.randint(0, shape.think_rounds[1])

    def ask(self) -> list[int]:
        self.tokens += _text(self._rng, self._rng.randint(*self._shape.turn_tokens))
        self.answer = _text(self._rng, self._rng.randint(*self._shape.answer_tokens))
        return self.tokens

    def answered(self, now: int) -> None:
        self.tokens = self.tokens + self.answer
        self.turns_left -= 1
        self.due = now + self._rng.randint(*self._shape.think_rounds)


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCABULARY) for _ in range(count)]


Frames = dict[Hashable, bytes]
"""A round's frame of one engine, by its readers."""


class Engine:
    """The product's reducer and scheduler, whose steps sample what the conversations say."""

    def __init__(self, page_count: int) -> None:
        config = msgspec.structs.replace(CONFIG, page_count=page_count)
        started = EngineStarted(config=config, model="none", model_digest="", world_size=1, environment={}, started_ns=0)
        self.state, self.streams = start(started), EventStreams(started, __version__)
        self.answers: dict[int, tuple[int, list[int]]] = {}
        self._frame: list[AnyEvent] = []

    def arrive(self, name: str, prompt: list[int], answer: list[int]) -> None:
        id_ = RequestId(self.state.next_id)
        self.answers[id_] = len(prompt), answer
        sampling = Sampling(seed=1, max_tokens=len(answer), ignore_eos=True)
        self._fold(RequestArrived(id=id_, name=name, prompt=pack_tokens(prompt), sampling=sampling, priority=0, arrival_ns=0))

    def step(self) -> tuple[list[tuple[str, bool]], Frames]:
        """One round: (name, has ended) of every request that got a token, and each reader's frame."""
        news = []
        if len(self.state.in_flight) == CONFIG.pipeline_depth or (self.state.in_flight and schedule(self.state) is None):
            news = self._commit()
        while (plan := schedule(self.state)) is not None:
            self._fold(plan)
        events, self._frame = self._frame, []
        return news, dict(self.streams.frames(events, self.state, digest(self.state)))

    def _commit(self) -> list[tuple[str, bool]]:
        scheduled, before = self.state.in_flight[0], self.state
        ends = (scheduled.starts + scheduled.counts)[scheduled.samples].tolist()
        ids = scheduled.ids[scheduled.samples].tolist()
        tokens = [self.answers[id_][1][min(end - self.answers[id_][0], len(self.answers[id_][1]) - 1)] for id_, end in zip(ids, ends)]
        event = StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens))
        effects = self._fold(event)
        return [(each.name, bool(each.finish)) for each in outputs(before, event, self.state, effects)]

    def _fold(self, event: AnyEvent) -> Any:
        self._frame.append(event)
        self.state, effects = fold(self.state, event)
        return effects


class TextTree:
    """SGLang's gateway: the server whose tree has most of the text, if that is enough of it, else the one with the smallest tree;
    the least loaded one if loads differ too much. It sees neither caches nor queues, only what it has sent and what has ended."""

    def __init__(self, pieces: int) -> None:
        """`pieces`: as many as a cache has blocks, which is more than a gateway knows."""
        self._trees = [PrefixTree(pieces) for _ in range(ENGINES)]
        self._loads = [0] * ENGINES
        self._places: dict[str, int] = {}

    def choose(self, name: str, prompt: list[int]) -> int:
        hashes = piece_hashes(np.array(prompt, "<i4").tobytes(), b"")
        matched = [tree.matched(hashes) for tree in self._trees]
        best = max(range(ENGINES), key=matched.__getitem__)
        least, most = min(self._loads), max(self._loads)
        if most - least > TREE_LOAD_ABS and most > TREE_LOAD_REL * least:
            best = self._loads.index(least)
        elif matched[best] <= TREE_THRESHOLD * max(len(hashes), 1):
            best = min(range(ENGINES), key=lambda place: len(self._trees[place]))
        self._trees[best].insert(hashes)
        self._loads[best] += 1
        self._places[name] = best
        return best

    def done(self, name: str) -> None:
        self._loads[self._places.pop(name)] -= 1


class Views:
    """vnext's router, whose streams arrive `late` rounds after they were sent."""

    def __init__(self, engines: list[Engine], policy: str, late: int) -> None:
        self.router, self._late = Router(ENGINES, policy), late
        self._transit: deque[list[Frames]] = deque()
        for view, engine in zip(self.router.views, engines):
            view.feed(engine.streams.begin(self, engine.state))

    def choose(self, name: str, prompt: list[int]) -> int:
        place = self.router.choose(name, Prompt(pack_tokens(prompt)), [True] * ENGINES, key=pack_tokens(prompt[:64]))
        assert place is not None
        return place

    def done(self, name: str) -> None:
        self.router.done(name)

    def feed(self, frames: list[Frames]) -> None:
        self._transit.append(frames)
        while len(self._transit) > self._late:
            for view, own in zip(self.router.views, self._transit.popleft()):
                if self in own:
                    view.feed(own[self])


class Several:
    """Routers side by side, as API processes are: each gets its share of the requests. `restarts`: the first request for which all are
    new ones, which know what their kind knows then."""

    def __init__(self, make: Callable[[], Any], count: int, restarts: int = 10**9) -> None:
        self._make, self._count, self._restarts = make, count, restarts
        self._routers = [make() for _ in range(count)]
        self._places: dict[str, Any] = {}
        self._requests = 0

    def choose(self, name: str, prompt: list[int]) -> int:
        if self._requests == self._restarts:
            self._routers = [self._make() for _ in range(self._count)]
        router = self._places[name] = self._routers[self._requests % self._count]
        self._requests += 1
        return router.choose(name, prompt)

    def done(self, name: str) -> None:
        router = self._places.pop(name)
        if router in self._routers:
            router.done(name)

    def feed(self, frames: list[Frames]) -> None:
        for router in self._routers:
            if isinstance(router, Views):
                router.feed(frames)


class Run(msgspec.Struct, frozen=True):
    """What one router made of the trace. Waits are rounds from a request's arrival to its first token."""

    hit_rate: float
    wait_mean: float
    wait_p99: float
    rounds: int
    requests: int
    mismatches: int = 0


def run(shape: Shape, make: Callable[[list[Engine]], Any]) -> tuple[Run, list[Engine], Any]:
    """Ask every turn when it is due, wherever the router says, until enough requests have ended."""
    rng = random.Random(shape.seed)
    systems = [_text(rng, shape.system_tokens) for _ in range(shape.systems)]
    engines = [Engine(shape.page_count) for _ in range(ENGINES)]
    router = make(engines)
    seeds = iter(range(10**9))
    new = lambda: Conversation(shape, random.Random(shape.seed * 10**9 + next(seeds)), systems)  # noqa: E731
    idle, busy, begun, waits, now = [new() for _ in range(shape.conversations)], {}, {}, [], 0
    while len(waits) < shape.requests:
        for conversation in [each for each in idle if each.due <= now]:
            idle.remove(conversation)
            name, prompt = f"r{len(begun)}", conversation.ask()
            begun[name], busy[name] = now, conversation
            engines[router.choose(name, prompt)].arrive(name, prompt, conversation.answer)
        stepped = [engine.step() for engine in engines]
        now += 1
        for name, has_ended in (each for news, _ in stepped for each in news):
            if begun[name] is not None:
                waits.append(now - begun[name])
                begun[name] = None
            if has_ended:
                router.done(name)
                conversation = busy.pop(name)
                conversation.answered(now)
                idle.append(conversation if conversation.turns_left and len(conversation.tokens) < 6_000 else new())
        if hasattr(router, "feed"):
            router.feed([frame for _, frame in stepped])
    return _run(engines, waits, now, router), engines, router


def _run(engines: list[Engine], waits: list[int], now: int, router: Any) -> Run:
    counters = [engine.state.counters for engine in engines]
    hits, asked = sum(each.prefix_hit_tokens for each in counters), sum(each.prefix_queried_tokens for each in counters)
    mismatches = sum(view.mismatches for view in router.router.views) if isinstance(router, Views) else 0
    return Run(
        hit_rate=hits / asked, wait_mean=float(np.mean(waits)), wait_p99=float(np.percentile(waits, 99)), rounds=now,
        requests=len(waits), mismatches=mismatches,
    )  # fmt: skip


ROUTERS: dict[str, Callable[[list[Engine]], Any]] = {
    "oracle": lambda engines: Views(engines, "prefix", 0),
    "prefix, 1 round late": lambda engines: Views(engines, "prefix", 1),
    "prefix, 4 rounds late": lambda engines: Views(engines, "prefix", 4),
    "consistent_hash": lambda engines: Views(engines, "consistent_hash", 1),
    "least_loaded": lambda engines: Views(engines, "least_loaded", 1),
    "round_robin": lambda engines: Views(engines, "round_robin", 1),
    "text tree": lambda engines: TextTree(engines[0].state.config.page_count),
    "4 routers, prefix": lambda engines: Several(lambda: Views(engines, "prefix", 1), 4),
    "4 routers, text tree": lambda engines: Several(lambda: TextTree(engines[0].state.config.page_count), 4),
    "restarted, prefix": lambda engines: Several(lambda: Views(engines, "prefix", 1), 1, RESTARTS),
    "restarted, text tree": lambda engines: Several(lambda: TextTree(engines[0].state.config.page_count), 1, RESTARTS),
}
RESTARTS = 450


def times(engines: list[Engine], count: int = 400) -> dict[str, float]:
    """Routed requests a second of processor time, by prompt length; microseconds for a frame to be folded; milliseconds until a router
    that has just started is exact again (its four snapshots made, read and folded)."""
    found: dict[str, float] = {}
    began, spent = time.perf_counter(), time.process_time()
    router = Router(ENGINES)
    for view, engine in zip(router.views, engines):
        view.feed(engine.streams.begin("again", engine.state))
    found["exact_again_ms"] = (time.perf_counter() - began) * 1e3
    found["exact_again_cpu_ms"] = (time.process_time() - spent) * 1e3
    assert all(view.is_exact for view in router.views)
    rng = random.Random(1)
    for length in (256, 1_024, 4_096):
        prompts = [pack_tokens(_text(rng, length)) for _ in range(count)]
        spent = time.process_time()
        for number, prompt in enumerate(prompts):
            router.choose(f"r{number}", Prompt(prompt), [True] * ENGINES)
            router.done(f"r{number}")
        found[f"routed_per_cpu_s_{length}"] = count / (time.process_time() - spent)
    return found


def folding(shape: Shape) -> dict[str, float]:
    """Processor time of folding the frames of a run, beside all bytes."""
    frames: list[list[bytes]] = []
    heads: list[bytes] = []

    class Recording(Views):
        def feed(self, parts: list[Frames]) -> None:
            frames.append([own.get("recorded", b"") for own in parts])
            super().feed(parts)

    def make(engines: list[Engine]) -> Recording:
        heads.extend(engine.streams.begin("recorded", engine.state) for engine in engines)
        return Recording(engines, "prefix", 0)

    run(msgspec.structs.replace(shape, requests=shape.requests // 3), make)
    router = Router(ENGINES)
    for view, head in zip(router.views, heads):
        view.feed(head)
    count = sum(bool(frame) for parts in frames for frame in parts)
    spent = time.process_time()
    for parts in frames:
        for view, frame in zip(router.views, parts):
            if frame:
                view.feed(frame)
    spent = time.process_time() - spent
    assert not any(view.mismatches for view in router.views)
    size = sum(len(frame) for parts in frames for frame in parts)
    return {"fold_us_per_frame": spent / count * 1e6, "bytes_per_frame": size / count, "frames": count}


def mean_of(runs: list[Run]) -> Run:
    """Each figure's mean over seeds; counts are added."""
    means = {name: float(np.mean([getattr(each, name) for each in runs])) for name in ("hit_rate", "wait_mean", "wait_p99")}
    return Run(**means, **{name: sum(getattr(each, name) for each in runs) for name in ("rounds", "requests", "mismatches")})


def compared(shape: Shape, seeds: int) -> tuple[dict[str, Run], list[Engine]]:
    """Every router on the traces of these seeds, and the engines that the last of them had."""
    found: dict[str, Run] = {}
    for name, make in ROUTERS.items():
        runs, engines = [], []
        for seed in range(1, seeds + 1):
            each, engines, _ = run(msgspec.structs.replace(shape, seed=seed), make)
            runs.append(each)
        mean = found[name] = mean_of(runs)
        print(f"{name:22} hit rate {mean.hit_rate:.4f}   wait {mean.wait_mean:5.1f} rounds, p99 {mean.wait_p99:5.1f}", flush=True)
    return found, engines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write a record to this file")
    parser.add_argument("--requests", type=int, default=Shape().requests)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    before, runs, shares = machine(), {}, {}
    for words, page_count in PAGES.items():
        print(f"{words} ({page_count:,} pages)")
        shape = Shape(requests=options.requests, page_count=page_count)
        runs[words], engines = compared(shape, options.seeds)
        shares[words] = {name: each.hit_rate / runs[words]["oracle"].hit_rate for name, each in runs[words].items()}
    measured = times(engines) | folding(shape)
    for name, value in measured.items():
        print(f"{name:26} {value:,.1f}")
    if options.json:
        record = {
            "command": f"python -m perf.router --requests {options.requests} --seeds {options.seeds}",
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "vnext": __version__,
            "machine": msgspec.to_builtins(before), "load_after": machine().load, "shape": msgspec.to_builtins(shape),
            "runs": msgspec.to_builtins(runs), "shares_of_oracle": shares, "times": measured,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
