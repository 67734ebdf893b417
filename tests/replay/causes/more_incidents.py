"""More incidents made on purpose, of kinds that incidents.py does not have: what `explain` says of trouble that it was not made with.

Own no checks; each is made as those of incidents.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from incidents import (
    CLIENTS,
    Acts,
    Coming,
    Incident,
    Story,
    asked,
    bot,
    config,
    documents,
    next_load,
    talks,
    text,
    with_tier,
)

from vnext.state.config import Speculation
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    RequestAborted,
    RequestResumed,
    WeightsChanged,
)
from vnext.state.state import State
from vnext.state.store.inputs import DIGEST_SIZE, input_tokens


def core_killed() -> Incident:
    """Another engine core had the requests; clients submit them again, with a third of each answer."""
    older = documents(30, 1200, at_us=0, answer=60, every_us=0)

    def come_back(state: State) -> list[AnyEvent]:
        recovered = EngineRecovered(cause="the engine core was killed (signal 9)", log="before", frames=40)
        return [recovered, *(resumed(id_, coming) for id_, coming in enumerate(older))]

    clients = [msgspec.structs.replace(each, at_us=each.at_us + 3_000_000) for each in asked(20, 80_000)]
    return Incident(cause="crash", story=Story(config=config(), clients=clients), acts=[(10_000, come_back)])


def resumed(id_: int, coming: Coming) -> RequestResumed:
    from vnext.state.events import pack_tokens
    from vnext.state.params import Sampling

    sampling = Sampling(seed=id_, max_tokens=coming.answer, ignore_eos=True)
    return RequestResumed(
        id=id_, name=f"cmpl-{id_}", prompt=pack_tokens(coming.prompt), sampling=sampling, priority=0, arrival_ns=0,
        client=coming.client, generated=pack_tokens(text(f"answer {id_}", coming.answer // 3)),
    )  # fmt: skip


def draft_collapse() -> Incident:
    """Drafts are right for two seconds; then the texts change."""
    speculation = Speculation(method="ngram", num_speculative_tokens=8)
    story = Story(config=config(speculation=speculation), clients=asked(140, 50_000))
    return Incident(cause="drafts", story=story, kept=0.9, kept_until_us=2_000_000)


def periodic_stalls() -> Incident:
    """The process collects garbage, or its disk syncs: a third of a second in every second."""
    return Incident(
        cause="stall", story=Story(config=config(), clients=asked(80, 80_000)), pace=lambda us, step: 45.0 if step % 60 == 59 else 1.0
    )


def cold_start() -> Incident:
    """The first forty steps compile kernels."""
    return Incident(
        cause="slow", story=Story(config=config(), clients=asked(60, 80_000)), pace=lambda us, step: 8.0 if step < 40 else 1.0
    )


def throttled() -> Incident:
    """A processor that gets hot: half of the time at a third of its pace."""
    return Incident(
        cause="slow", story=Story(config=config(), clients=asked(80, 80_000)),
        pace=lambda us, step: 3.0 if us // 400_000 % 2 else 1.0,
    )  # fmt: skip


def weights_again() -> Incident:
    """A trainer changes the weights every second, and stops the engine for a third of it."""
    acts: Acts = []
    for version in range(1, 6):
        def change(state: State, version: int = version) -> list[AnyEvent]:
            return [WeightsChanged(version=version, digest=f"{version:016x}"), EnginePaused(mode="")]

        at_us = 1_000_000 * version
        acts += [(at_us, lambda state: [EnginePaused(mode="keep")]), (at_us + 350_000, change)]
    return Incident(cause="weights", story=Story(config=config(), clients=asked(70, 80_000)), acts=acts)


def breaker_of_one() -> Incident:
    """One client writes a clock before its instruction; the others ask as usual."""
    broken = [
        Coming(at_us=90_000 * each, prompt=[*text(f"clock {each}", 8), *text("long instruction", 2400)], answer=10, client=CLIENTS[2])
        for each in range(60)
    ]
    others = [msgspec.structs.replace(each, client=CLIENTS[place % 2]) for place, each in enumerate(talks(40, 120_000))]
    return Incident(cause="prefix", story=Story(config=config(), clients=[*others, *broken]))


def two_slots() -> Incident:
    """Eight adapters in turns, two slots, and half a second to load one."""
    clients = [
        Coming(at_us=each * 120_000, prompt=text(f"a {each}", 90), answer=12, client=CLIENTS[each % 3], adapter=f"{each % 8:016x}")
        for each in range(60)
    ]

    def load(state: State) -> list[AnyEvent]:
        found = next_load(state)
        return [] if found is None else list(found.events(f"adapter {found.digest[-1]}"))

    acts = [(at_us, load) for at_us in range(0, 60_000_000, 500_000)]
    return Incident(cause="adapter", story=Story(config=config(max_loras=2), clients=clients), acts=acts)


def dead_replica() -> Incident:
    """From the third second on all requests of two engines come to one, which could serve its own."""
    before, after = documents(30, 1100, at_us=0, every_us=100_000), documents(90, 1101, at_us=3_000_000, every_us=25_000)
    return Incident(cause="load", story=Story(config=config(), clients=[*before, *after]))


def retries() -> Incident:
    """Clients give up after 0.8 s and ask again, which keeps the engine busy with answers that nobody reads."""
    first = documents(25, 900, at_us=0, answer=120, every_us=20_000)
    clients = [msgspec.structs.replace(each, at_us=each.at_us + 800_000 * turn) for turn in range(6) for each in first]

    def leave(id_: int) -> Callable[[State], list[AnyEvent]]:
        return lambda state: [RequestAborted(ids=(id_,), reason="client")] if id_ in state.requests else []

    ordered = sorted(clients, key=lambda coming: coming.at_us)
    acts = [(coming.at_us + 800_000, leave(id_)) for id_, coming in enumerate(ordered)]
    return Incident(cause="deadline", story=Story(config=config(), clients=clients), acts=acts)


def preemption_storm() -> Incident:
    """As thrash, with a prefix cache and common instructions."""
    clients = [
        Coming(at_us=each * 25_000, prompt=[*text("short instruction", 64), *text(f"t {each}", 40)], answer=500, client=CLIENTS[each % 3])
        for each in range(60)
    ]
    return Incident(cause="preemption", story=Story(config=config(page_count=240), clients=clients))


def tier_thrash() -> Incident:
    """Every instruction comes from disk for each question, because something empties the cache behind it."""
    acts = with_tier(
        range(2_090_000, 9_000_000, 700_000), range(2_100_000, 14_000_000, 10_000), range(2_405_000, 14_500_000, 600_000)
    )
    return Incident(cause="disk", story=Story(config=config(), clients=bot(110, 60_000, 700)), acts=acts)


def clock_step() -> Incident:
    """The wall clock goes an hour back; the engine does not notice."""
    clients = [msgspec.structs.replace(each, client=CLIENTS[place % 3]) for place, each in enumerate(talks(30, 200_000))]
    return Incident(cause="none", story=Story(config=config(), clients=clients), wall_step_us=-3_600_000_000)


def late_grammars() -> Incident:
    """The API server compiles a grammar for two seconds before each request comes: the engine is idle meanwhile."""
    return Incident(cause="none", story=Story(config=config(), clients=asked(12, 2_000_000)))


def albums() -> Incident:
    """Ten images in each of most prompts, and steps that encode one: who comes waits for the images of those before."""
    clients = []
    for number in range(40):
        rng = random.Random(number)
        images = [token for _ in range(10) for token in input_tokens(rng.randbytes(DIGEST_SIZE), 64).tolist()]
        clients.append(Coming(at_us=60_000 * number, prompt=[*images, 7], answer=20, client=CLIENTS[number % 3]))
    return Incident(cause="inputs", story=Story(config=config(inputs_a_step=1), clients=[*clients, *asked(30, 80_000)]))


def salted() -> Incident:
    """Each question has a salt of its own, so each instruction is computed again."""
    clients = [msgspec.structs.replace(each, salt=f"salt {place}") for place, each in enumerate(bot(60, 60_000, 2000))]
    return Incident(cause="salt", story=Story(config=config(), clients=clients))


def long_answers() -> Incident:
    """Ten answers that hardly end hold most places of the batch."""
    endless = [Coming(at_us=300_000, prompt=text(f"e {each}", 50), answer=4000, client=CLIENTS[each % 3]) for each in range(10)]
    return Incident(cause="sequences", story=Story(config=config(max_num_seqs=12), clients=[*asked(60, 80_000), *endless]))


def cancels() -> Incident:
    """One client asks and hangs up at once, over and over."""
    flood = [Coming(at_us=500_000 + 12_000 * each, prompt=text(f"c {each}", 600), answer=300, client=CLIENTS[2]) for each in range(250)]
    others = [msgspec.structs.replace(each, client=CLIENTS[place % 2]) for place, each in enumerate(talks(50, 80_000))]

    def leave(state: State) -> list[AnyEvent]:
        ids = tuple(id_ for id_, each in state.requests.items() if each.client == CLIENTS[2])
        return [RequestAborted(ids=ids, reason="client")] if ids else []

    acts = [(at_us, leave) for at_us in range(560_000, 4_000_000, 60_000)]
    return Incident(cause="aborts", story=Story(config=config(), clients=[*others, *flood]), acts=acts)


def herd() -> Incident:
    """Everybody comes in the same moment."""
    crowd = [Coming(at_us=10_000_000, prompt=text(f"h {each}", 500), answer=60, client=1000 + each) for each in range(150)]
    return Incident(cause="load", story=Story(config=config(), clients=[*asked(10, 300_000), *crowd]))


def two_troubles() -> Incident:
    """A pause of half a second, and a machine that is five times slower for three."""
    return Incident(
        cause="slow", story=Story(config=config(), clients=asked(90, 80_000)), acts=[
            (1_000_000, lambda state: [EnginePaused(mode="keep")]), (1_500_000, lambda state: [EnginePaused(mode="")]),
        ], pace=lambda us, step: 5.0 if 3_000_000 < us < 6_000_000 else 1.0,
    )  # fmt: skip


def growing() -> Incident:
    """Each second more come than in the one before, until they are too many."""
    clients, at_us = [], 0
    for each in range(220):
        at_us += max(4_000, 90_000 - 400 * each)
        clients.append(Coming(at_us=at_us, prompt=text(f"g {each}", 900), answer=50, client=CLIENTS[each % 3]))
    return Incident(cause="load", story=Story(config=config(), clients=clients))


def holder() -> Incident:
    """One long conversation holds most of a small cache, for a long answer."""
    held = Coming(at_us=0, prompt=text("held", 2400), answer=1500, client=CLIENTS[0])
    others = [msgspec.structs.replace(each, at_us=each.at_us + 200_000) for each in documents(40, 700, at_us=0, every_us=80_000)]
    return Incident(cause="holder", story=Story(config=config(page_count=260, prefix_caching=False), clients=[held, *others]))


def cache_off() -> Incident:
    """An instruction is common, and the prefix cache is off."""
    return Incident(cause="off", story=Story(config=config(prefix_caching=False), clients=bot(70, 45_000, 2500)))


MORE: dict[str, Callable[[], Incident]] = {
    each.__name__: each
    for each in (
        core_killed, draft_collapse, periodic_stalls, cold_start, throttled, weights_again, breaker_of_one, two_slots, dead_replica,
        retries, preemption_storm, tier_thrash, clock_step, late_grammars, albums, salted, long_answers, cancels, herd, two_troubles,
        growing, holder, cache_off,
    )
}  # fmt: skip
