"""Incidents of kinds that somebody made who had not read the rules of `explain`, with causes written down before any answer.

Own no checks; each is made as those of incidents.py, and none was changed behind an answer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from incidents import CLIENTS, Acts, Coming, Incident, Story, asked, bot, config, next_load, talks, text, with_tier

from vnext.state.events import AnyEvent, EnginePaused, PrefixCacheReset, RequestAborted, WeightsChanged
from vnext.state.state import State


def agent_loops() -> Incident:
    """Sixteen agents whose contexts grow each turn, and a cache for a part of them."""
    system = text("agent system", 300)
    history = [text(f"agent {agent}", 1200 + 300 * 10) for agent in range(16)]
    clients = [
        Coming(
            at_us=4_000_000 * turn + 250_000 * agent, prompt=[*system, *history[agent][: 1200 + 300 * turn]], answer=30,
            client=CLIENTS[agent % 3],
        )
        for turn in range(10) for agent in range(16)
    ]
    return Incident(cause="evicted", story=Story(config=config(page_count=1000), clients=clients))


def night_batch() -> Incident:
    """A client classifies 300 texts in three seconds, beside the chat of two others."""
    chat = [msgspec.structs.replace(each, client=CLIENTS[place % 2]) for place, each in enumerate(talks(60, 100_000))]
    batch = [
        Coming(at_us=1_000_000 + 10_000 * each, prompt=text(f"classify {each}", 400), answer=2, client=CLIENTS[2])
        for each in range(300)
    ]
    return Incident(cause="client", story=Story(config=config(), clients=[*chat, *batch]))


def lora_tourist() -> Incident:
    """Two clients with an adapter each, a third one that goes round eight, and two slots."""
    clients = [
        Coming(at_us=150_000 * each + 40_000 * who, prompt=text(f"lora {who} {each}", 90), answer=15, client=CLIENTS[who],
               adapter="ab"[who] * 16)
        for who in range(2) for each in range(50)
    ]
    clients += [
        Coming(at_us=250_000 * each + 20_000, prompt=text(f"tour {each}", 90), answer=15, client=CLIENTS[2],
               adapter=f"{each % 8:016x}")
        for each in range(30)
    ]

    def load(state: State) -> list[AnyEvent]:
        found = next_load(state)
        return [] if found is None else list(found.events(f"adapter {found.digest[-1]}"))

    acts = [(at_us, load) for at_us in range(0, 40_000_000, 300_000)]
    return Incident(cause="adapter", story=Story(config=config(max_loras=2), clients=clients), acts=acts)


def reload_warmup() -> Incident:
    """New weights in a tenth of a second, then a long warm-up."""
    acts: Acts = [
        (2_000_000, lambda state: [EnginePaused(mode="keep")]),
        (2_100_000, lambda state: [WeightsChanged(version=1, digest="c" * 16), EnginePaused(mode="")]),
    ]
    return Incident(
        cause="slow", story=Story(config=config(), clients=asked(80, 80_000)), acts=acts,
        pace=lambda us, step: 6.0 if 2_100_000 < us < 4_600_000 else 1.0,
    )


def queue_deadline() -> Incident:
    """Four places; who waits for one longer than a second is given up."""
    clients = asked(90, 83_000)

    def drop(id_: int) -> Callable[[State], list[AnyEvent]]:
        return lambda state: [RequestAborted(ids=(id_,), reason="client")] if any(w.id == id_ for w in state.waiting) else []

    ordered = sorted(clients, key=lambda coming: coming.at_us)
    acts = [(coming.at_us + 1_000_000, drop(id_)) for id_, coming in enumerate(ordered)]
    story = Story(config=config(max_num_seqs=4), clients=clients)
    return Incident(cause="sequences", story=story, acts=acts)


def flush_beside_load() -> Incident:
    """More requests come than the engine serves; the cache is emptied three times, which costs next to nothing."""
    crowd = [
        Coming(at_us=40_000 * each, prompt=text(f"crowd {each}", 1500), answer=40, client=CLIENTS[each % 3]) for each in range(100)
    ]
    acts: Acts = [(at_us, lambda state: [PrefixCacheReset()]) for at_us in (1_000_000, 2_000_000, 3_000_000)]
    return Incident(cause="load", story=Story(config=config(), clients=[*crowd, *bot(40, 100_000, 300)]), acts=acts)


def nfs_hiccup() -> Incident:
    """Conversations come back from a disk that hangs for three seconds."""
    first = [Coming(at_us=60_000 * u, prompt=text(f"conversation {u}", 900), answer=30, client=CLIENTS[u % 3]) for u in range(40)]
    again = [
        Coming(at_us=3_000_000 + 80_000 * u, prompt=[*text(f"conversation {u}", 900), *text(f"more {u}", 60)], answer=30,
               client=CLIENTS[u % 3])
        for u in range(40)
    ]
    reads = [at_us for at_us in range(3_005_000, 12_000_000, 20_000) if not 3_500_000 < at_us < 6_500_000]
    acts = with_tier([2_980_000], range(3_000_000, 12_000_000, 10_000), reads)
    return Incident(cause="disk", story=Story(config=config(), clients=[*first, *again]), acts=acts)


def idle_maintenance() -> Incident:
    """An operator puts the engine to sleep and changes its weights while no request lives."""
    before, after = asked(25, 150_000), [msgspec.structs.replace(e, at_us=e.at_us + 10_000_000) for e in asked(25, 150_000)]
    acts: Acts = [
        (6_000_000, lambda state: [EnginePaused(mode="sleep")]),
        (8_000_000, lambda state: [WeightsChanged(version=1, digest="d" * 16)]),
        (8_500_000, lambda state: [PrefixCacheReset()]),
        (9_000_000, lambda state: [EnginePaused(mode="")]),
    ]
    return Incident(cause="none", story=Story(config=config(), clients=[*before, *after]), acts=acts)


KEPT: dict[str, Callable[[], Incident]] = {
    each.__name__: each
    for each in (
        agent_loops, night_batch, lora_tourist, reload_warmup, queue_deadline, flush_beside_load, nfs_hiccup, idle_maintenance,
    )
}  # fmt: skip
