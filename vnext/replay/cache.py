"""cache: how much of the prompts the prefix cache had, and why not more.

Owns the comparison of every prompt with all texts before it, answers included: up to which token it begins like one of
them, and where it parts. What has parted cannot be in the cache, whatever its size; the rest of what was missed had been
there, or was on its way. In a log without texts pseudonyms are equal where all before them is, so it says the same.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
from rich.console import Console

from vnext.replay import render
from vnext.replay.folding import Broken, Folded, fold
from vnext.replay.source import Log, UnusableLog, open_log
from vnext.state.chain import chain_keys, root_key
from vnext.state.config import SchedulerConfig
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.state import State

RECENT = 8
"""So many of the latest texts with one beginning are compared token by token."""
TOP_MAX = 1_000
NOBODY = -1


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose prompts begin like an earlier text up to `token` and go on otherwise, with the `missed` tokens behind
    that place. One of them is `id`; the earlier one is `like`, -1 where they begin with something new (token 0)."""

    token: int
    requests: int
    missed: int
    id: int
    like: int


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """`asked` prompt tokens that the cache could have had: full blocks, without the prompt's last token. They are those it
    had (`found`), had under another salt (`salted`), those of a text that came before and were not there at that moment
    (`absent`: evicted, forgotten, or not computed yet), and `new` ones. `partings` by missed tokens.

    `caching` is whether the engine had the cache switched on. `requests` were admitted once at least.
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


class _Asked(msgspec.Struct, frozen=True):
    """What a prompt has in common with texts before it: `common` tokens, in full blocks `known`, `salted` if salts did not
    count; `like` whose text."""

    common: int
    known: int
    salted: int
    like: int


class _Texts:
    """All texts so far, to be found by their beginnings. Mutable."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._by_key: dict[bytes, list[int]] = {}
        self._texts: dict[int, np.ndarray] = {}

    def longest(self, salt: str, tokens: bytes) -> tuple[int, int, int]:
        """(tokens in common with the text nearest to these, those of them in full blocks, whose text it is)."""
        root = root_key(salt)
        keys, blocks = chain_keys(root, tokens, self._size), 0
        while blocks < len(keys) and keys[blocks] in self._by_key:
            blocks += 1
        mine, best, like = unpack_tokens(tokens), blocks * self._size, NOBODY
        for id_ in self._by_key.get(keys[blocks - 1] if blocks else root, ()):
            common = _common(mine, self._texts[id_])
            if common >= best:
                best, like = common, id_
        return best, blocks * self._size, like

    def add(self, id_: int, salt: str, tokens: bytes) -> None:
        root = root_key(salt)
        self._texts[id_] = unpack_tokens(tokens)
        for key in (root, *chain_keys(root, tokens, self._size)):
            ids = self._by_key.setdefault(key, [])
            if id_ not in ids:
                ids.append(id_)
                del ids[:-RECENT]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Leading tokens that are equal."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


class _Counting:
    """The comparison while the log is folded. Mutable."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._size = config.block_size
        self._salted, self._plain = _Texts(config.block_size), _Texts(config.block_size)
        self._asked: dict[int, _Asked] = {}
        self._living: dict[int, tuple[str, bytes, list[int]]] = {}
        self.sums: Counter[str] = Counter()
        self._partings: dict[int, list[int]] = {}

    def hear(self, item: Folded) -> None:
        match item.event:
            case RequestArrived():
                self._arrived(item.event)
            case StepPlanned():
                if item.event.admitted:
                    self._admitted(item.before, item.event, item.after)
            case StepCommitted():
                for told in outputs(item.before, item.event, item.after):
                    if told.sample >= 0 and told.id in self._living:
                        self._living[told.id][2].append(told.token)
                    if told.finish:
                        self._ended(told.id)

    def _arrived(self, event: RequestArrived) -> None:
        common, known, like = self._salted.longest(event.cache_salt, event.prompt)
        _, plain, _ = self._plain.longest("", event.prompt)
        self._asked[event.id] = _Asked(common, known, plain, like)
        self._living[event.id] = (event.cache_salt, event.prompt, [])
        self._salted.add(event.id, event.cache_salt, event.prompt)
        self._plain.add(event.id, "", event.prompt)

    def _ended(self, id_: int) -> None:
        """Its answer can be the beginning of a next turn."""
        if (found := self._living.pop(id_, None)) is not None:
            salt, prompt, answer = found
            whole = prompt + pack_tokens(answer)
            self._salted.add(id_, salt, whole)
            self._plain.add(id_, "", whole)

    def _admitted(self, before: State, event: StepPlanned, after: State) -> None:
        flight = after.flights[-1]
        for id_ in after.rows.id[len(before.rows) - len(event.preempted) :].tolist():
            asked = self._asked.pop(id_, None)  # a second admission tells of the first one's blocks
            if asked is not None:
                self._count(id_, asked, int(flight.starts[flight.ids == id_][0]))

    def _count(self, id_: int, asked: _Asked, found: int) -> None:
        most = (len(self._living[id_][1]) // 4 - 1) // self._size * self._size
        known, salted = max(min(asked.known, most), found), min(asked.salted, most)
        new = most - max(known, salted)
        self.sums.update(
            requests=1, asked=most, found=found, absent=known - found, salted=max(salted - known, 0), new=new
        )  # fmt: skip
        if known < most:
            parted = self._partings.setdefault(asked.common, [0, 0, id_, asked.like])
            parted[0] += 1
            parted[1] += most - known

    def partings(self, top: int) -> list[Parting]:
        found = sorted(self._partings.items(), key=lambda pair: (-pair[1][1], pair[0]))[:top]
        return [
            Parting(token=token, requests=requests, missed=missed, id=id_, like=like)
            for token, (requests, missed, id_, like) in found
        ]  # fmt: skip


def cache_use(log: Log, top: int) -> CacheUse:
    """Compare every prompt of a log, and name the `top` places at which most is missed."""
    config, ended = log.header.started.config, "complete"
    counting = _Counting(config)
    for item in fold(log):
        if isinstance(item, Folded):
            counting.hear(item)
        elif isinstance(item, Broken):
            ended = item.message
    sums = {name: counting.sums[name] for name in ("requests", "asked", "found", "salted", "absent", "new")}
    return CacheUse(**sums, caching=config.prefix_caching, partings=counting.partings(top), ended=ended)


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """`cache` among the commands."""
    counting = command(
        "cache", run, "how much of the prompts the prefix cache had, and why not more",
        "Compares each prompt with all texts before it. Exit code 1: the log could not be folded to its end.",
    )  # fmt: skip
    counting.add_argument("--top", type=int, default=5, help="places at which prompts part, those that cost most (default 5)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 the whole log, 1 up to where it breaks."""
    if not 1 <= arguments.top <= TOP_MAX:
        raise UnusableLog(f"--top {arguments.top}: it must lie between 1 and {TOP_MAX}")
    answer = cache_use(open_log(arguments.log), arguments.top)
    if arguments.json:
        render.print_json(console, answer)
    else:
        print_cache_use(console, answer)
    return int(answer.ended != "complete")


def print_cache_use(console: Console, answer: CacheUse) -> None:
    """Where the tokens of all prompts came from, and where prompts part."""

    def share(tokens: int) -> str:
        return f"{tokens:,}, {tokens / max(answer.asked, 1):.1%}"

    render.facts(console, f"{render.counted(answer.asked, 'prompt token')} in full blocks, "
                 f"of {render.counted(answer.requests, 'request')}", [
        ("in the cache", share(answer.found) if answer.caching else "none: it is switched off"),
        ("absent", f"{share(answer.absent)}: of earlier texts, but evicted, forgotten or not computed yet"),
        ("another salt", f"{share(answer.salted)}: of earlier texts under another cache_salt"),
        ("new", f"{share(answer.new)}: no text before began like this"),
    ])  # fmt: skip
    rows = [
        {"from token": f"{each.token:,}", "requests": f"{each.requests:,}", "tokens missed": f"{each.missed:,}",
         "for example": f"request {each.id}" + (f", until there like request {each.like}" if each.like >= 0 else ""),
        } for each in answer.partings
    ]  # fmt: skip
    render.records(console, "where prompts go on otherwise", ("from token", "requests", "tokens missed", "for example"), rows)
    if answer.ended != "complete":
        console.print(f"up to where it breaks: {render.printable(answer.ended)}", style="bold red", soft_wrap=True)
