"""Routing over four engines' schedulers on a multi-turn trace: `python -m perf.router [--json FILE]`.

Owns the trace (from a seed), the engines (the product's reducer and scheduler; a round is one step of each) and the routers that are
compared: vnext's on views whose streams are some rounds late; the same policy with every engine's state at hand, which is the oracle;
round robin; least loaded; a tree of texts as SGLang's gateway has it; four routers beside each other; and one that is started again.
Then the policy with other weights of hits, and the tree with other bounds of its balance: what either pays in waits for its hits. Hits
and waits are counts, the same on any machine. router_load.py has the times.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import msgspec
import numpy as np

from perf.record import parser_of, record_of, write_record
from vnext.base.version import __version__
from vnext.commands.machine import machine
from vnext.log.stream import EventStreams
from vnext.routing.approximate import PrefixTree, piece_hashes
from vnext.routing.policies import HIT_WEIGHT
from vnext.routing.prompts import Prompt
from vnext.routing.router import Router
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestArrived, RequestId, StepCommitted, pack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import fold, start

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
        self.tokens += words(self._rng, self._rng.randint(*self._shape.turn_tokens))
        self.answer = words(self._rng, self._rng.randint(*self._shape.answer_tokens))
        return self.tokens

    def answered(self, now: int) -> None:
        self.tokens = self.tokens + self.answer
        self.turns_left -= 1
        self.due = now + self._rng.randint(*self._shape.think_rounds)


def words(rng: random.Random, count: int) -> list[int]:
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
            news = self.commit()
        while self.plan():
            pass
        return news, self.frames()

    def frames(self) -> Frames:
        """What was folded since the last call."""
        events, self._frame = self._frame, []
        return dict(self.streams.frames(events, self.state, digest(self.state)))

    def plan(self) -> bool:
        """Plan another step, where there is one."""
        if (plan := schedule(self.state)) is not None:
            self._fold(plan)
        return plan is not None

    def commit(self) -> list[tuple[str, bool]]:
        """Commit the oldest step: (name, has ended) of every request that got a token."""
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

    def __init__(self, pieces: int, load_abs: int = TREE_LOAD_ABS) -> None:
        """`pieces`: as many as a cache has blocks, which is more than a gateway knows."""
        self._load_abs = load_abs
        self._trees = [PrefixTree(pieces) for _ in range(ENGINES)]
        self._loads = [0] * ENGINES
        self._places: dict[str, int] = {}

    def choose(self, name: str, prompt: list[int]) -> int:
        hashes = piece_hashes(np.array(prompt, "<i4").tobytes(), b"")
        matched = [tree.matched(hashes) for tree in self._trees]
        best = max(range(ENGINES), key=matched.__getitem__)
        least, most = min(self._loads), max(self._loads)
        if most - least > self._load_abs and most > TREE_LOAD_REL * least:
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

    def __init__(self, engines: list[Engine], policy: str, late: int, hit_weight: float = HIT_WEIGHT) -> None:
        self.router, self._late = Router(ENGINES, policy, hit_weight=hit_weight), late
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
    systems = [words(rng, shape.system_tokens) for _ in range(shape.systems)]
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


Make = Callable[[list[Engine]], Any]
RESTARTS = 450
ROUTERS: dict[str, Make] = {
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
WEIGHTS = (0.5, 1.0, 1.5, 2.0, 3.0, 8.0)
TREE_BOUNDS = (8, 16)
FRONTIER: dict[str, Make] = {
    f"prefix, weight {weight:g}": lambda engines, weight=weight: Views(engines, "prefix", 1, weight) for weight in WEIGHTS
} | {
    f"text tree, balanced by {bound}": lambda engines, bound=bound: TextTree(engines[0].state.config.page_count, bound)
    for bound in TREE_BOUNDS
}  # fmt: skip
"""What each pays for its hits: the weight of `prefix`, and the loads that the tree lets differ."""



def mean_of(runs: list[Run]) -> Run:
    """Each figure's mean over seeds; counts are added."""
    means = {name: float(np.mean([getattr(each, name) for each in runs])) for name in ("hit_rate", "wait_mean", "wait_p99")}
    return Run(**means, **{name: sum(getattr(each, name) for each in runs) for name in ("rounds", "requests", "mismatches")})


def compared(shape: Shape, seeds: int, routers: Mapping[str, Make]) -> dict[str, Run]:
    """Every router on the traces of these seeds."""
    found: dict[str, Run] = {}
    for name, make in routers.items():
        mean = found[name] = mean_of([run(msgspec.structs.replace(shape, seed=seed), make)[0] for seed in range(1, seeds + 1)])
        print(f"{name:26} hit rate {mean.hit_rate:.4f}   wait {mean.wait_mean:5.2f} rounds, p99 {mean.wait_p99:5.1f}", flush=True)
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=Shape().requests)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frontier", action="store_true", help="other weights and bounds instead of other routers")
    options = parser.parse_args()
    before, runs = machine(), {}
    for name, page_count in PAGES.items():
        print(f"{name} ({page_count:,} pages)")
        shape = Shape(requests=options.requests, page_count=page_count)
        runs[name] = compared(shape, options.seeds, FRONTIER if options.frontier else ROUTERS)
    measured = {"shape": msgspec.to_builtins(shape), "hit_weight": HIT_WEIGHT, "runs": msgspec.to_builtins(runs)}
    if not options.frontier:
        measured["shares_of_oracle"] = {
            name: {router: each.hit_rate / found["oracle"].hit_rate for router, each in found.items()} for name, found in runs.items()
        }
    command = f"python -m perf.router --requests {options.requests} --seeds {options.seeds}{' --frontier' * options.frontier}"
    write_record(options.json, record_of(command, before, measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
