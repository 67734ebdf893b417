"""Helping: what would have made a log's requests faster, and by how much, by runs of the same arrivals (futures/).

Owns which settings to try for a cause, and what to leave out of the arrivals where no setting helps: the run then says what the
trouble itself has cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from vnext.replay.causes.ledger import Ledger
from vnext.replay.futures.auto import Changes
from vnext.replay.futures.ground import Ground, changed, ground_of, timed, usual_us, words
from vnext.replay.futures.recording import Outside, Recorded
from vnext.replay.futures.step_times import Pace
from vnext.replay.futures.what_if_run import Ran, rerun
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.verify import why_not_decided
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineRecovered, MemoryRanShort, PrefixCacheReset, RequestArrived

STEPS_MAX = 100_000
"""A longer log is not run again; the answer names the command."""
GAIN = 0.9
"""What helps takes less than this share of the time."""
OPTIONS = {
    "policy": "scheduling-policy", "page_count": "num-blocks-override", "max_num_seqs": "max-num-seqs", "max_loras": "max-loras",
    "max_num_batched_tokens": "max-num-batched-tokens", "long_prefill_token_threshold": "long-prefill-token-threshold",
}  # fmt: skip


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw, in ms: the 99th percentile of first tokens and of gaps between tokens (None where it is not known), and the
    mean time of a request."""

    first_99: float
    gap_99: float | None
    whole: float


class Help(msgspec.Struct, frozen=True, kw_only=True):
    """`what` is a change, as options of `vnext serve` or in words; `then` is what it gives in place of `now`."""

    what: str
    now: Figures
    then: Figures

    @property
    def name(self) -> str:
        """The figure that gains most."""
        pairs = {
            name: (getattr(self.then, name), getattr(self.now, name)) for name in ("first_99", "whole", "gap_99")
            if getattr(self.now, name) and getattr(self.then, name) is not None
        }  # fmt: skip
        return min(pairs, key=lambda name: pairs[name][0] / pairs[name][1], default="whole")

    @property
    def share(self) -> float:
        """What remains of the figure that gains most."""
        before: float = getattr(self.now, self.name) or 1.0
        return float(getattr(self.then, self.name) or 0.0) / before


def settings_for(cause: str, config: SchedulerConfig) -> list[Changes]:
    def more(name: str, *factors: int) -> list[Changes]:
        return [((name, factor * getattr(config, name)),) for factor in factors]

    match cause:
        case "client" if config.policy != "fair":
            return [(("policy", "fair"),)]
        case "priority":
            return [(("policy", each),) for each in ("fair", "fcfs") if each != config.policy]
        case "long":
            most = config.long_prefill_token_threshold or config.max_num_batched_tokens
            return [(("long_prefill_token_threshold", limit),) for limit in (128, 512) if limit < most]
        case "sequences":
            return more("max_num_seqs", 2, 4)
        case "budget":
            return more("max_num_batched_tokens", 2, 4)
        case "off":
            return [(("prefix_caching", True),)]
        case "blocks" | "holder" | "preemption" | "evicted":
            return more("page_count", 2, 4)
        case "adapter" if config.max_loras:
            return more("max_loras", 2)
        case "drafts" if config.speculation is not None:
            return [(("speculation", None),)]
    return []


def helping(log: Log, ledger: Ledger, cause: str, client: int) -> Help | None:
    """What would have helped most against a cause; None where nothing that was tried does, or the log cannot be run again."""
    if len(ledger.entries) > STEPS_MAX or why_not_decided(log, own_policy=False):
        return None
    try:
        ground = ground_of(log)
    except UnusableLog:
        return None
    found: list[Help] = []
    others = _others(ledger, client) if cause == "client" else ()
    now = figures_of(_ran(ground, ground.started.config), others)
    for changes in settings_for(cause, ground.started.config):
        found += _tried(ground, changes, now, others)
    if not found and (left := WITHOUT.get(cause)) is not None:
        found.append(Help(what=left[0], now=recorded(ledger), then=_without(ground, left[1], client)))
    best = min(found, key=lambda each: each.share, default=None)
    return best if best is not None and best.share < GAIN else None


def _ran(ground: Ground, config: SchedulerConfig) -> Ran:
    return rerun(ground.taken, ground.started, config, timed(ground.model, ground.taken, ground.pace))


def _others(ledger: Ledger, client: int) -> tuple[bool, ...]:
    """For each request that came in a log, whether it is of another client."""
    return tuple(life.client != client for life in ledger.lives.values() if life.came_us is not None)


def _tried(ground: Ground, changes: Changes, now: Figures, others: Sequence[bool]) -> list[Help]:
    try:
        config = changed(ground.started, changes)
    except UnusableLog:
        return []
    then = _ran(ground, config)
    return [] if then.refused else [Help(what=_option(changes), now=now, then=figures_of(then, others))]


def _option(changes: Changes) -> str:
    name, value = changes[0]
    if name == "speculation":
        return "no drafts"
    if name == "prefix_caching":
        return "--enable-prefix-caching"
    return f"--{OPTIONS[name]} {value}" if name in OPTIONS else words(changes)


# ---- what the trouble itself has cost ----------------------------------------------------------------------------


Left = Callable[[Outside, int], bool]
WITHOUT: dict[str, tuple[str, Left]] = {
    "pause": ("without the pause", lambda each, client: True),
    "weights": ("without the change of weights", lambda each, client: not isinstance(each.event, PrefixCacheReset)),
    "crash": ("without the crash", lambda each, client: not isinstance(each.event, EngineRecovered)),
    "memory": ("with enough memory", lambda each, client: not isinstance(each.event, MemoryRanShort)),
    "flush": ("without emptying the cache", lambda each, client: not isinstance(each.event, PrefixCacheReset)),
    "stall": ("without the stall", lambda each, client: True),
    "slow": ("at the machine's usual pace", lambda each, client: True),
    "client": (
        "without this client", lambda each, client: not (isinstance(each.event, RequestArrived) and each.event.client == client),
    ),
}  # fmt: skip


def _without(ground: Ground, left: Left, client: int) -> Figures:
    """A run at the machine's usual pace with some of what came from outside."""
    taken: Recorded = ground.taken
    taken = replace(taken, outside=[each for each in taken.outside if left(each, client)])
    begins = np.arange(len(taken.ends_us)) * 1e3
    even = Pace(begins, begins + 1e3, np.full(len(begins), 1e3))
    assert len(usual_us(ground.model, taken)) == len(begins), "a time for each step"
    return figures_of(rerun(taken, ground.started, ground.started.config, timed(ground.model, taken, even)))


# ---- figures -----------------------------------------------------------------------------------------------------


def figures_of(ran: Ran, others: Sequence[bool] = ()) -> Figures:
    """The figures of a run; with `others`, of these requests alone, without gaps."""
    came = [each for each in ran.served if not each.is_older]
    if len(others) == len(came):
        return figures_of(replace(ran, served=list(itertools.compress(came, others)), gaps_us=ran.gaps_us[:0]))
    served = [each for each in came if each.tokens]
    gap = float(np.percentile(ran.gaps_us, 99)) / 1e3 if len(ran.gaps_us) else None
    return _figures([each.first_us - each.arrived_us for each in served], [each.last_us - each.arrived_us for each in served], gap)


def recorded(ledger: Ledger) -> Figures:
    lives = [(life.came_us, life.first_us, life.last_us) for life in ledger.lives.values()]
    served = [(came, first, last) for came, first, last in lives if came is not None and first is not None and last is not None]
    return _figures([first - came for came, first, _ in served], [last - came for came, _, last in served], None)


def _figures(firsts_us: Sequence[float], wholes_us: Sequence[float], gap_ms: float | None) -> Figures:
    if not firsts_us:
        return Figures(first_99=0.0, gap_99=gap_ms, whole=0.0)
    return Figures(first_99=float(np.percentile(firsts_us, 99)) / 1e3, gap_99=gap_ms, whole=float(np.mean(wholes_us)) / 1e3)
