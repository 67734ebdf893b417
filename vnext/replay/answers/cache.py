"""cache: show how much of the prompts the prefix cache held, and why not more.

Owns the comparison of every prompt with all earlier texts, answers included: how many leading tokens it shares with one
of them, and where the two part. Tokens after that point cannot be in the cache, whatever its size. The other missed
tokens had been in the cache, or were being computed. In a log without texts, pseudonyms are equal exactly where
everything before them is equal, so the answer is the same.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.console import Console

from vnext.replay.answers.cache_curve import CacheCurve, Curve, print_curve
from vnext.replay.console import render
from vnext.replay.console.commands import print_answer, top_of
from vnext.replay.reading.folding import Broken, Folded, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.state.block_hash import block_hashes, root_hash
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    ClockTicked,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    generated_by,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.outputs import outputs
from vnext.state.state import State

RECENT = 8
"""For each shared beginning, this many of the latest texts are compared token by token."""
TOP_MAX = 1_000
NOBODY = -1


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose prompts begin like an earlier text up to `token` and then differ; `missed` tokens follow that
    place. `id` is one of them; `like` is the earlier request, -1 where they begin with something new (token 0)."""

    token: int
    requests: int
    missed: int
    id: int
    like: int


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """`asked` prompt tokens that the cache could have had: full blocks, without the prompt's last token. They divide
    into those it had (`found`), those it had under another salt or adapter (`salted`), those of an earlier text that were
    absent at that moment (`absent`: evicted, forgotten, or not computed yet), and `new` ones. `partings` are sorted
    by missed tokens.

    `caching` is whether the engine had the cache switched on. `requests` were admitted at least once. `retentions` and `curve` are
    there if asked for.
    """

    requests: int
    asked: int
    found: int
    salted: int
    absent: int
    new: int
    caching: bool
    partings: list[Parting]
    ended: str
    retentions: list[Retention] = []
    curve: Curve | None = None


class _Asked(msgspec.Struct, frozen=True):
    """What a prompt shares with earlier texts: `common` tokens, of which `known` are in full blocks; `salted` is the
    same ignoring salts; `like` is the request with the nearest text."""

    common: int
    known: int
    salted: int
    like: int


class _Texts:
    """All texts so far, searchable by their beginnings. Mutable."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._by_key: dict[bytes, list[int]] = {}
        self._texts: dict[int, np.ndarray] = {}

    def longest(self, salt: str, adapter: str, tokens: bytes) -> tuple[int, int, int]:
        """(tokens shared with the nearest text, how many of those are in full blocks, the request that the text belongs
        to)."""
        root = root_hash(salt, self._size, adapter)
        keys, blocks = block_hashes(root, tokens, self._size), 0
        while blocks < len(keys) and keys[blocks] in self._by_key:
            blocks += 1
        mine, best, like = unpack_tokens(tokens), blocks * self._size, NOBODY
        for id_ in self._by_key.get(keys[blocks - 1] if blocks else root, ()):
            common = _common(mine, self._texts[id_])
            if common and common >= best:
                best, like = common, id_
        return best, blocks * self._size, like

    def add(self, id_: int, salt: str, adapter: str, tokens: bytes) -> None:
        root = root_hash(salt, self._size, adapter)
        self._texts[id_] = unpack_tokens(tokens)
        for key in (root, *block_hashes(root, tokens, self._size)):
            ids = self._by_key.setdefault(key, [])
            if id_ not in ids:
                ids.append(id_)
                del ids[:-RECENT]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """The number of equal leading tokens."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


class _Counting:
    """The comparison while the log is folded. Mutable."""

    def __init__(self, config: SchedulerConfig, retentions: Retentions) -> None:
        self._size, self._retentions = config.block_size, retentions
        self._salted, self._plain = _Texts(config.block_size), _Texts(config.block_size)
        self._asked: dict[int, _Asked] = {}
        self._living: dict[int, tuple[RequestArrived, list[int]]] = {}
        self.sums: Counter[str] = Counter()
        self._partings: dict[int, list[int]] = {}

    def hear(self, item: Folded) -> None:
        self._retentions.hear(item)
        if (plan := item.plan) is not None and plan.admitted:
            self._admitted(item.after, len(item.before.rows) - len(plan.preempted))
        match item.event:
            case RequestArrived():
                self._arrived(item.event)
            case StepCommitted():
                for reported in outputs(item.before, item.event, item.after):
                    if reported.sample >= 0 and reported.id in self._living:
                        self._living[reported.id][1].append(reported.token)
                    if reported.finish:
                        self._ended(reported.id)
            case RequestAborted():
                for id_ in item.event.ids:
                    self._retentions.end(id_, ())

    def _arrived(self, event: RequestArrived) -> None:
        common, known, like = self._salted.longest(event.cache_salt, event.sampling.adapter, event.prompt)
        _, plain, _ = self._plain.longest("", "", event.prompt)
        self._asked[event.id] = _Asked(common, known, plain, like)
        self._living[event.id] = (event, unpack_tokens(generated_by(event)).tolist())
        self._add(event, event.prompt)

    def _add(self, event: RequestArrived, tokens: bytes) -> None:
        self._salted.add(event.id, event.cache_salt, event.sampling.adapter, tokens)
        self._plain.add(event.id, "", "", tokens)

    def _ended(self, id_: int) -> None:
        """Add a finished request's text: its answer can begin the next turn's prompt."""
        if (found := self._living.pop(id_, None)) is not None:
            event, answer = found
            self._retentions.end(id_, self._keys(event, event.prompt + pack_tokens(answer[:-1])))
            self._add(event, event.prompt + pack_tokens(answer))

    def _admitted(self, after: State, first: int) -> None:
        """Count the requests that have joined, from row `first` on."""
        scheduled = after.in_flight[-1]
        for id_ in after.rows.id[first:].tolist():
            asked = self._asked.pop(id_, None)  # a later admission would count the request's own blocks
            if asked is not None:
                self._count(id_, asked, int(scheduled.starts[scheduled.ids == id_][0]))

    def _count(self, id_: int, asked: _Asked, found: int) -> None:
        most = (len(self._living[id_][0].prompt) // 4 - 1) // self._size * self._size
        event = self._living[id_][0]
        self._retentions.begin(id_, self._keys(event, event.prompt)[: most // self._size], min(found, most) // self._size)
        found = min(found, most)  # a request that came back with tokens may find some of them too
        known, salted = max(min(asked.known, most), found), min(asked.salted, most)
        new = most - max(known, salted)
        self.sums.update(
            requests=1, asked=most, found=found, absent=known - found, salted=max(salted - known, 0), new=new
        )  # fmt: skip
        if known < most:
            parted = self._partings.setdefault(asked.common, [0, 0, id_, asked.like])
            parted[0] += 1
            parted[1] += most - known

    def _keys(self, event: RequestArrived, tokens: bytes) -> tuple[bytes, ...]:
        """The names of the full blocks of these tokens of a request."""
        return block_hashes(root_hash(event.cache_salt, self._size, event.sampling.adapter), tokens, self._size)

    def partings(self, top: int) -> list[Parting]:
        found = sorted(self._partings.items(), key=lambda pair: (-pair[1][1], pair[0]))[:top]
        return [
            Parting(token=token, requests=requests, missed=missed, id=id_, like=like)
            for token, (requests, missed, id_, like) in found
        ]  # fmt: skip


def cache_use(log: Log, top: int, ttls_s: Sequence[int] = (), curve: CacheCurve | None = None) -> CacheUse:
    """Compare every prompt of a log, and name the `top` places at which most is missed, and what retentions would have saved.
    Raises UnusableLog for a cache that `curve` does not know."""
    config, ended = log.header.started.config, "complete"
    retentions = Retentions(log, ttls_s)
    counting = _Counting(config, retentions)
    for item in fold(log):
        if isinstance(item, Folded):
            counting.hear(item)
            if curve is not None:
                curve.hear(item)
        elif isinstance(item, Broken):
            ended = item.message
    sums = counting.sums
    return CacheUse(
        requests=sums["requests"], asked=sums["asked"], found=sums["found"], salted=sums["salted"], absent=sums["absent"],
        new=sums["new"], caching=config.prefix_caching, ended=ended, partings=counting.partings(top),
        retentions=retentions.answer(), curve=None if curve is None else curve.done(),
    )  # fmt: skip


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    counting = command(
        "cache", run, "show how much of the prompts the prefix cache held, and why not more",
        "Compares each prompt with all earlier texts.",
    )  # fmt: skip
    counting.add_argument("--top", type=int, default=5, help="number of the costliest places where prompts diverge (default 5)")
    counting.add_argument("--curve", action="store_true", help="the hit rate of caches of other sizes")
    counting.add_argument("--ttl", default="", help="times such as 5m,1h: what it would have saved to keep each prompt for so long")


def run(arguments: argparse.Namespace, console: Console) -> None:
    ttls_s = ttls_of(arguments.ttl) if arguments.ttl else ()
    log = open_log(arguments.log)
    answer = cache_use(log, top_of(arguments, TOP_MAX), ttls_s, CacheCurve(log) if arguments.curve else None)
    print_answer(arguments, console, answer, print_cache_use)


def print_cache_use(console: Console, answer: CacheUse) -> None:
    """Print where the tokens of all prompts came from, and where prompts part."""

    def share(tokens: int) -> str:
        return f"{tokens:,}, {tokens / max(answer.asked, 1):.1%}"

    render.facts(console, f"{render.counted(answer.asked, 'prompt token')} in full blocks, "
                 f"of {render.counted(answer.requests, 'request')}", [
        ("in the cache", share(answer.found) if answer.caching else "none: it is switched off"),
        ("absent", f"{share(answer.absent)}: in earlier texts, but evicted, forgotten or not computed yet"),
        ("another salt", f"{share(answer.salted)}: in earlier texts under another cache_salt or adapter"),
        ("new", f"{share(answer.new)}: no earlier text began like this"),
    ])  # fmt: skip
    rows = [
        {"at token": f"{each.token:,}", "requests": f"{each.requests:,}", "tokens missed": f"{each.missed:,}",
         "for example": f"request {each.id}" + (f", the same as request {each.like} until there" if each.like >= 0 else ""),
        } for each in answer.partings
    ]  # fmt: skip
    render.records(console, "where prompts diverge", ("at token", "requests", "tokens missed", "for example"), rows)
    kept = [
        {"kept for": f"{each.ttl_s:,} s", "tokens saved": share(each.saved), "blocks at once": f"{each.blocks_max:,}",
         "block-seconds": f"{each.block_seconds:,.0f}"} for each in answer.retentions
    ]  # fmt: skip
    if kept:
        render.records(console, "if each prompt's blocks stayed after their last use", tuple(kept[0]), kept)
    if answer.curve is not None:
        print_curve(console, answer.curve)


# ---- --ttl -------------------------------------------------------------------------------------------------------
# cache --ttl: what it would have saved, and cost, to keep every request's blocks for some time after their last use.
#
# Owns the intervals in which nobody uses a block. A retention keeps it for the first part of each; it pays where the next use comes
# within it and the cache had lost the block. Times are those of the log's timestamps; without them, of its arrivals and ticks.


UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
TTLS_MAX = 16


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Had each block of a request stayed for `ttl_s` after its last use: `saved` more tokens would have been hits, and blocks would
    have been held for `block_seconds` in sum, `blocks_max` of them at once."""

    ttl_s: int
    saved: int
    block_seconds: float
    blocks_max: int


def ttls_of(text: str) -> list[int]:
    """Seconds of each of "5m,1h". Raises UnusableLog for other texts."""
    found = [re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", each) for each in text.split(",")]
    if not all(found) or len(found) > TTLS_MAX:
        raise UnusableLog(f"--ttl is {text!r}: write up to {TTLS_MAX} times such as 30s,5m,1h,1d")
    return sorted({int(each[1]) * UNITS_S[each[2]] for each in found if each})


class Retentions:
    """All times while a log is folded. Mutable."""

    def __init__(self, log: Log, ttls_s: Sequence[int]) -> None:
        self._clock, self._started_ns = Clock(timestamps_of(log)), log.header.started.started_ns
        self._ttls_s, self._size = ttls_s, log.header.started.config.block_size
        self._now_s = 0.0
        self._users: Counter[bytes] = Counter()
        self._idle_since_s: dict[bytes, float] = {}
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._idle: list[tuple[float, float]] = []
        self._saved = [0] * len(ttls_s)

    def hear(self, item: Folded) -> None:
        """Take the time of an event."""
        event = item.event
        if self._clock.timestamped:
            now_us = self._clock.known_us(item.frame_end, item.after.committed)
            self._now_s = self._now_s if now_us is None else now_us / 1e6
        elif isinstance(event, RequestArrived):
            self._now_s = max(self._now_s, event.arrival_ns / 1e9)
        elif isinstance(event, ClockTicked):
            self._now_s = max(self._now_s, self._started_ns / 1e9 + event.seconds)

    def begin(self, id_: int, keys: tuple[bytes, ...], found: int) -> None:
        """A request joins the batch with `found` of its prompt's blocks from the cache; `keys` are those that it could have."""
        idle_s = [self._now_s - since if (since := self._idle_since_s.get(key)) is not None else None for key in keys]
        for place, ttl_s in enumerate(self._ttls_s):
            count = found
            while count < len(keys) and (self._users[keys[count]] or ((gap := idle_s[count]) is not None and gap <= ttl_s)):
                self._saved[place] += 0 if self._users[keys[count]] else self._size
                count += 1
        for key in keys:
            if (since := self._idle_since_s.pop(key, None)) is not None:
                self._idle.append((since, self._now_s))
        self._users.update(keys)
        self._keys[id_] = keys

    def end(self, id_: int, keys: tuple[bytes, ...]) -> None:
        """A request has ended: its blocks that no other request uses are idle. `keys` are those of its prompt and its answer."""
        for key in self._keys.pop(id_, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle_since_s[key] = self._now_s
        self._idle_since_s |= {key: self._now_s for key in keys if key not in self._users and key not in self._idle_since_s}

    def answer(self) -> list[Retention]:
        """For each time, the shortest first."""
        spans = np.array([*self._idle, *((since, self._now_s) for since in self._idle_since_s.values())]).reshape(-1, 2)
        return [self._retention(spans, ttl_s, saved) for ttl_s, saved in zip(self._ttls_s, self._saved)]

    def _retention(self, spans: np.ndarray, ttl_s: int, saved: int) -> Retention:
        starts, ends = spans[:, 0], np.minimum(spans[:, 1], spans[:, 0] + ttl_s)
        moments = np.concatenate((starts, ends))
        changes = np.repeat((1, -1), len(spans))[np.lexsort((np.repeat((1, 0), len(spans)), moments))]
        most = int(np.cumsum(changes).max(initial=0))
        return Retention(ttl_s=ttl_s, saved=saved, block_seconds=round(float((ends - starts).sum()), 3), blocks_max=most)
