"""Incidents made on purpose: logs whose one trouble is known, by the real scheduler and recorder on a simulated device.

Each has the cause that `explain` must name first. Own no checks. What happens beside requests is an act: at its time it gives the
engine an event or holds it up.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import story_logs  # noqa: E402  (needs the path above)
from story_logs import CLIENTS, Coming, Story, config, fraction, talks, text  # noqa: E402

from vnext.sched.residency import next_load  # noqa: E402
from vnext.sched.shortage import raised, ran_short  # noqa: E402
from vnext.sched.tiering import next_promotion  # noqa: E402
from vnext.state.config import Speculation  # noqa: E402
from vnext.state.events import (  # noqa: E402
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    MemoryRanShort,
    PrefixCacheReset,
    PromotionEnded,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    TierChanged,
    TierOpened,
    WeightsChanged,
    pack_tokens,
)
from vnext.state.state import State, StepInFlight  # noqa: E402

Pace = Callable[[int, int], float]
"""How many times longer than usual a step takes, by when it begins (us) and its number."""
Acts = list[tuple[int, Callable[[State], list[AnyEvent]]]]


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A story with a trouble. `held_us`: (from, to) in which the engine core does nothing. `kept`: the share of drafts that are
    right, until `kept_until_us`. `wall_step_us`: the wall clock goes on so much further behind the first half of the requests."""

    cause: str
    story: Story
    acts: Acts = []
    pace: Pace = lambda us, step: 1.0
    held_us: tuple[int, int] = (0, 0)
    kept: float = 0.0
    kept_until_us: int = sys.maxsize
    wall_step_us: int = 0


class IncidentRun(story_logs.Run):
    """An engine with trouble. Mutable."""

    def __init__(self, log_dir: Path, incident: Incident) -> None:
        super().__init__(log_dir, incident.story)
        self.incident, self._acts = incident, deque(sorted(incident.acts, key=lambda act: act[0]))

    def _turns(self, clients: deque[Coming]) -> None:
        while clients or self._busy_us or self._acts:
            ends_us = [self._busy_us[0][0]] if self._busy_us else []
            now_us = min([*ends_us, *(coming.at_us for coming in list(clients)[:1]), *(act[0] for act in list(self._acts)[:1])])
            begin_us, end_us = self.incident.held_us
            self.clock.us = end_us if begin_us <= now_us < end_us else max(now_us, self.clock.us)
            while clients and clients[0].at_us <= self.clock.us:
                self._fold(self._arrival(clients.popleft()))
            while self._acts and self._acts[0][0] <= self.clock.us:
                self._act(self._acts.popleft()[1])
            if self._busy_us and self._busy_us[0][0] <= self.clock.us:
                self._commit()
            self._plan()

    def _arrival(self, coming: Coming) -> RequestArrived:
        event = super()._arrival(coming)
        is_later = 2 * event.id > len(self.story.clients)
        return msgspec.structs.replace(event, arrival_ns=event.arrival_ns + 1000 * self.incident.wall_step_us * is_later)

    def _act(self, act: Callable[[State], list[AnyEvent]]) -> None:
        for event in act(self.state):
            while isinstance(event, EnginePaused | WeightsChanged) and self._busy_us:
                self.clock.us = max(self.clock.us, self._busy_us[0][0])
                self._commit()
            if isinstance(event, EngineRecovered | MemoryRanShort):
                self._busy_us.clear()
                self._device_us = self.clock.us
            self._fold(event)
        if self._frame:
            self._write()

    def _took_us(self, scheduled: StepInFlight) -> int:
        begin_us = max(self.clock.us, self._device_us)
        return round(story_logs.step_us(scheduled) * self.incident.pace(begin_us, scheduled.step))

    def _commit(self) -> None:
        scheduled, kept_share = self.state.in_flight[0], self.incident.kept if self.clock.us < self.incident.kept_until_us else 0.0
        if scheduled.drafts is None:
            super()._commit()
            return
        _, took_us = self._busy_us.popleft()
        self.recorder.took(scheduled.step, took_us / 1e6)
        tokens, counts, drafted = [], [], []
        for place in scheduled.samples.nonzero()[0].tolist():
            id_, drafts = int(scheduled.ids[place]), int(scheduled.drafts[place])
            kept = sum(fraction("draft", id_, scheduled.step, each) < kept_share for each in range(drafts))
            row = int((self.state.rows.id == id_).nonzero()[0][0])
            end = int(self.state.rows.known[row])
            tokens += [story_logs.sampled(id_, end + each) for each in range(kept + 1)]
            counts.append(kept + 1)
            drafted.append(drafts)
        has = any(drafted)
        columns = (bytes(counts), bytes(drafted)) if has else (b"", b"")
        self._fold(StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens), counts=columns[0], drafted=columns[1]))


def record(folder: Path, name: str, incident: Incident | None = None) -> Incident:
    """Write the log of an incident, of INCIDENTS if it is not given."""
    incident = incident or INCIDENTS[name]()
    IncidentRun(folder / name, incident).run()
    return incident


# ---- the incidents -----------------------------------------------------------------------------------------------


def asked(count: int, every_us: int, **more: int) -> list[Coming]:
    """Short questions of several clients."""
    return [msgspec.structs.replace(each, client=CLIENTS[place % 3]) for place, each in enumerate(talks(count, every_us, **more))]


def documents(count: int, length: int, at_us: int = 2_000_000, answer: int = 40, every_us: int = 1000) -> list[Coming]:
    return [
        Coming(at_us=at_us + every_us * each, prompt=text(f"document {each}", length), answer=answer, client=CLIENTS[each % 3])
        for each in range(count)
    ]  # fmt: skip


def bot(count: int, every_us: int, instruction: int = 900) -> list[Coming]:
    """Questions behind one instruction."""
    return [
        Coming(at_us=each * every_us, prompt=[*text("instruction", instruction), *text(f"q {each}", 40)], answer=30, client=CLIENTS[each % 3])
        for each in range(count)
    ]  # fmt: skip


def pause(mode: str, begin_us: int, end_us: int) -> Acts:
    return [(begin_us, lambda state: [EnginePaused(mode=mode)]), (end_us, lambda state: [EnginePaused(mode="")])]


def noisy() -> Incident:
    return Incident(cause="client", story=story_logs.noisy())


def tenants(policy: str = "fair", weights: tuple[int, ...] = (1, 2, 5)) -> Incident:
    """Three tenants with long queues, of requests of other lengths and with weights."""
    asked = [
        Coming(
            at_us=1000 * place, prompt=text(f"page {place} {each}", 100 + 100 * each), answer=40 + 20 * each,
            client=CLIENTS[each], weight=weight,
        )
        for place in range(80) for each, weight in enumerate(weights)
    ]  # fmt: skip
    return Incident(cause="client", story=Story(config=config(policy=policy, max_num_seqs=16), clients=asked))


def guest() -> Incident:
    """Two tenants fill an engine that takes turns; a third one asks little and often, and more than a third of the tokens."""
    bulk = [
        Coming(at_us=1000 * each, prompt=text(f"page {each}", 900), answer=150, client=CLIENTS[each % 2]) for each in range(60)
    ]
    little = [
        Coming(at_us=500_000 + 150_000 * each, prompt=text(f"talk {each}", 300), answer=60, client=CLIENTS[2]) for each in range(75)
    ]
    clients = sorted([*bulk, *little], key=lambda each: each.at_us)
    return Incident(cause="client", story=Story(config=config(policy="fair", max_num_seqs=16), clients=clients))


def noisy_tokens() -> Incident:
    """One client sends many middling prompts; the budget of a step holds the others up."""
    others = [msgspec.structs.replace(each, client=CLIENTS[place % 2]) for place, each in enumerate(talks(60, 80_000))]
    flood = [
        Coming(at_us=1_500_000 + 30_000 * each, prompt=text(f"flood {each}", 1500), answer=20, client=CLIENTS[2]) for each in range(60)
    ]
    return Incident(cause="client", story=Story(config=config(max_num_batched_tokens=512), clients=[*others, *flood]))


def paused() -> Incident:
    return Incident(cause="pause", story=Story(config=config(), clients=asked(60, 80_000)), acts=pause("keep", 1_500_000, 4_000_000))


def paused_wait() -> Incident:
    return Incident(cause="pause", story=Story(config=config(), clients=asked(60, 80_000)), acts=pause("wait", 1_500_000, 4_000_000))


def slept() -> Incident:
    return Incident(cause="pause", story=Story(config=config(), clients=asked(60, 80_000)), acts=pause("sleep", 1_500_000, 5_000_000))


def weights() -> Incident:
    acts = [
        (1_500_000, lambda state: [EnginePaused(mode="keep")]),
        (3_500_000, lambda state: [WeightsChanged(version=1, digest="b" * 16), EnginePaused(mode="")]),
    ]
    return Incident(cause="weights", story=Story(config=config(), clients=asked(60, 80_000)), acts=acts)


def crash() -> Incident:
    recovered = EngineRecovered(cause="rank 1 was killed (signal 9)")
    story = Story(config=config(), clients=asked(60, 80_000))
    return Incident(cause="crash", story=story, acts=[(4_500_000, lambda state: [recovered])], held_us=(1_500_000, 4_500_000))


def crashes() -> Incident:
    """Ranks that die again and again."""
    recovered = EngineRecovered(cause="rank 0 has ended (exit status 1)")
    acts = [(at_us, lambda state: [recovered]) for at_us in range(500_000, 4_500_000, 400_000)]
    return Incident(cause="crash", story=Story(config=config(), clients=asked(60, 80_000)), acts=acts)


def short_memory() -> Incident:
    """Another program takes the memory for three seconds."""
    def lack(state: State) -> list[AnyEvent]:
        return [ran_short(state, "rank 0 lacks memory (Unable to allocate 2.0 GiB)")] if state.in_flight else []

    def suffice(state: State) -> list[AnyEvent]:
        return [raised(state)] if state.lowered_from else []

    acts = [(at_us, lack) for at_us in range(1_000_000, 4_000_000, 150_000)]
    acts += [(at_us, suffice) for at_us in range(4_100_000, 6_500_000, 200_000)]
    return Incident(cause="memory", story=Story(config=config(), clients=asked(80, 60_000)), acts=acts)


def flush() -> Incident:
    """Someone empties the prefix cache again and again."""
    acts = [(at_us, lambda state: [PrefixCacheReset()]) for at_us in range(300_000, 4_000_000, 60_000)]
    return Incident(cause="flush", story=Story(config=config(), clients=bot(70, 60_000)), acts=acts)


def evicted() -> Incident:
    """Twenty instructions in turns, and a cache for four of them."""
    clients = [
        Coming(at_us=each * 60_000, prompt=[*text(f"instruction {each % 20}", 960), *text(f"q {each}", 30)], answer=20)
        for each in range(100)
    ]
    return Incident(cause="evicted", story=Story(config=config(page_count=300), clients=clients))


def prefix() -> Incident:
    return Incident(cause="prefix", story=story_logs.cache(True))


def tiny_cache() -> Incident:
    """Pages for four requests."""
    clients = documents(40, 900, at_us=0, answer=60, every_us=90_000)
    return Incident(cause="blocks", story=Story(config=config(page_count=250, prefix_caching=False), clients=clients))


def thrash() -> Incident:
    """Short prompts, long answers: requests join and are preempted as they grow."""
    clients = [Coming(at_us=each * 30_000, prompt=text(f"t {each}", 60), answer=420, client=CLIENTS[each % 3]) for each in range(60)]
    return Incident(cause="preemption", story=Story(config=config(page_count=260, prefix_caching=False), clients=clients))


def long_prompts() -> Incident:
    return Incident(cause="long", story=story_logs.spike())


def long_prompts_small_budget() -> Incident:
    clients = [*asked(60, 80_000), *documents(2, 14_000)]
    return Incident(cause="long", story=Story(config=config(max_num_batched_tokens=512), clients=clients))


def few_sequences() -> Incident:
    return Incident(cause="sequences", story=Story(config=config(max_num_seqs=4), clients=asked(120, 40_000)))


def small_budget() -> Incident:
    """Steps of 64 tokens, for prompts of hundreds."""
    clients = [
        Coming(at_us=each * 60_000, prompt=text(f"b {each}", 380 + each % 40), answer=20, client=CLIENTS[each % 3]) for each in range(80)
    ]
    return Incident(cause="budget", story=Story(config=config(max_num_batched_tokens=64), clients=clients))


def abort_storm() -> Incident:
    """Impatient clients: they leave after half a second, and ask again."""
    clients = [
        *asked(40, 80_000),
        *(Coming(at_us=1_000_000 + each * 15_000, prompt=text(f"s {each}", 700), answer=400, client=each) for each in range(1, 160)),
    ]

    def leave(state: State) -> list[AnyEvent]:
        ids = tuple(id_ for id_, each in state.requests.items() if each.client < 1000 and each.prompt_length == 700)
        return [RequestAborted(ids=ids, reason="client")] if ids else []

    acts = [(at_us, leave) for at_us in range(1_300_000, 4_300_000, 300_000)]
    return Incident(cause="aborts", story=Story(config=config(), clients=clients), acts=acts)


def grammar_failures() -> Incident:
    """A third of the requests end with an error."""
    def fail(state: State) -> list[AnyEvent]:
        ids = tuple(id_ for id_, _ in state.requests.items() if id_ % 3 == 0)
        return [RequestAborted(ids=ids, reason="error")] if ids else []

    acts = [(at_us, fail) for at_us in range(300_000, 5_000_000, 150_000)]
    return Incident(cause="errors", story=Story(config=config(), clients=asked(60, 80_000)), acts=acts)


def drift() -> Incident:
    """The machine gets slower: a neighbour, heat."""
    return Incident(
        cause="slow", story=Story(config=config(), clients=asked(80, 80_000)),
        pace=lambda us, step: 1.0 + max(0.0, (us - 2_000_000) / 1_500_000),
    )  # fmt: skip


def slow_stretch() -> Incident:
    return Incident(
        cause="slow", story=Story(config=config(), clients=asked(80, 80_000)),
        pace=lambda us, step: 4.0 if 2_000_000 < us < 3_500_000 else 1.0,
    )  # fmt: skip


def disk_stall() -> Incident:
    """The engine core waits for two seconds, for a disk or a processor."""
    return Incident(cause="stall", story=Story(config=config(), clients=asked(60, 80_000)), held_us=(2_000_000, 4_000_000))


def device_stall() -> Incident:
    """One step hangs on the device."""
    return Incident(
        cause="stall", story=Story(config=config(), clients=asked(60, 80_000)), pace=lambda us, step: 300.0 if step == 200 else 1.0
    )


def unlucky_drafts() -> Incident:
    """Eight drafts a token, hardly one of which is right."""
    speculation = Speculation(method="ngram", num_speculative_tokens=8)
    return Incident(cause="drafts", story=Story(config=config(speculation=speculation), clients=asked(80, 60_000)), kept=0.02)


def starved() -> Incident:
    """Important requests never end; the others wait behind them."""
    return Incident(cause="priority", story=Story(config=config(policy="priority", max_num_seqs=8), clients=[
        *(Coming(at_us=each * 70_000, prompt=text(f"p {each}", 100), answer=60, client=CLIENTS[each % 3], priority=-1) for each in range(120)),
        *(msgspec.structs.replace(each, client=CLIENTS[place % 3]) for place, each in enumerate(talks(20, 200_000))),
    ]))  # fmt: skip


def adapters() -> Incident:
    """Six adapters in turns and one slot, which takes 0.4 s to load."""
    clients = [Coming(at_us=each * 150_000, prompt=text(f"a {each}", 90), answer=10, client=CLIENTS[each % 3], adapter=str(each % 6) * 16)
               for each in range(60)]  # fmt: skip

    def load(state: State) -> list[AnyEvent]:
        found = next_load(state)
        return [] if found is None else list(found.events(f"adapter {found.digest[0]}"))

    acts = [(at_us, load) for at_us in range(0, 30_000_000, 400_000)]
    return Incident(cause="adapter", story=Story(config=config(max_loras=1), clients=clients), acts=acts)


def with_tier(empty_us: Iterable[int], promote_us: Iterable[int], read_us: Iterable[int]) -> Acts:
    """A disk tier: when the cache is emptied, whose blocks the tier has then, when blocks are asked for, and when they have come."""
    def empty(state: State) -> list[AnyEvent]:
        return [PrefixCacheReset(), TierChanged(stored=b"".join(state.pool.prefix_index.blocks()))]

    def promote(state: State) -> list[AnyEvent]:
        found = next_promotion(state)
        return [] if found is None else [found]

    def read(state: State) -> list[AnyEvent]:
        return [PromotionEnded(transfer=each.number, count=len(each.pages) - each.hits) for each in state.tier.transfers]

    acts: Acts = [(0, lambda state: [TierOpened(capacity=4096)])]
    return acts + [(at_us, act) for act, times in ((empty, empty_us), (promote, promote_us), (read, read_us)) for at_us in times]


def slow_tier() -> Incident:
    """Prompts come back from a disk that takes up to a second for each."""
    acts = with_tier([2_480_000], range(2_500_000, 12_000_000, 10_000), range(3_305_000, 13_000_000, 1_000_000))
    first = bot(40, 50_000, 300)
    again = [msgspec.structs.replace(each, at_us=each.at_us + 2_500_000) for each in first]
    return Incident(cause="disk", story=Story(config=config(), clients=[*first, *again]), acts=acts)


def deadlines() -> Incident:
    """Long answers, to clients whose time is over after 1.5 s."""
    clients = [Coming(at_us=each * 50_000, prompt=text(f"d {each}", 200), answer=500, client=CLIENTS[each % 3]) for each in range(60)]

    def leave(id_: int) -> Callable[[State], list[AnyEvent]]:
        return lambda state: [RequestAborted(ids=(id_,), reason="client")] if id_ in state.requests else []

    acts = [(coming.at_us + 1_500_000, leave(id_)) for id_, coming in enumerate(clients)]
    return Incident(cause="deadline", story=Story(config=config(), clients=clients), acts=acts)


def overload() -> Incident:
    """More comes than any setting can serve."""
    clients = [
        Coming(at_us=each * 20_000, prompt=text(f"o {each}", 1400), answer=40, client=CLIENTS[each % 3]) for each in range(120)
    ]
    return Incident(cause="load", story=Story(config=config(), clients=clients))


def slow_client() -> Incident:
    """Nothing is wrong with the engine."""
    return Incident(cause="none", story=Story(config=config(), clients=asked(40, 200_000)))


INCIDENTS: dict[str, Callable[[], Incident]] = {
    each.__name__: each
    for each in (
        noisy, noisy_tokens, paused, paused_wait, slept, weights, crash, crashes, short_memory, flush, evicted, prefix, tiny_cache, thrash,
        long_prompts, long_prompts_small_budget, few_sequences, small_budget, abort_storm, grammar_failures, drift, slow_stretch,
        disk_stall, device_stall, unlucky_drafts, starved, adapters, slow_tier, deadlines, overload, slow_client,
    )
}  # fmt: skip
