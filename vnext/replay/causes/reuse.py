"""Reuse: which tokens of a step had been computed before, and why they are computed again.

Owns what every request had computed, and which blocks the prefix cache had held. A prompt that differs from an earlier one in a
few tokens and is the same behind them loses what follows to these tokens; only a log with texts shows it. What it has in
common with one behind another salt is lost to the salt, and where the cache is off, what it has in common with any is lost to that.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from vnext.replay.reading.folding import Folded
from vnext.replay.reading.strides import Run
from vnext.state.block_hash import block_hashes
from vnext.state.events import (
    AnyEvent,
    EnginePaused,
    EngineRecovered,
    MemoryRanShort,
    PrefixCacheReset,
    RequestArrived,
    RequestResumed,
    WeightsChanged,
    unpack_tokens,
)
from vnext.state.state import State
from vnext.state.traits import everyone_leaves

RECENT = 8
"""A prompt is compared with this many earlier ones."""
ALIKE = 0.5
"""Behind the first difference, this share of the prompt is the same as an earlier one's."""
ALIKE_MIN = 64


class Reuse:
    """What has been computed, while a log is folded. Mutable."""

    def __init__(self, first: State) -> None:
        self._size = first.config.block_size
        self._reached: dict[int, int] = {}  # by request: the positions computed so far
        self._why: dict[int, str] = {}  # by request: why it computes again
        self._lost: dict[int, tuple[int, str]] = {}  # by request: up to where the cache could have had its prompt, and why not
        self._asked: dict[int, tuple[bytes, ...]] = {}  # by waiting request: the blocks of its prompt that the cache had held
        self._names: dict[int, tuple[bytes, ...]] = {}  # by waiting request, where the cache is off: its prompt's blocks
        self._held = dict.fromkeys(first.pool.prefix_index.blocks(), 0)  # what the cache had, with the number of the reset before
        self.preemptions, self._follows = 0, False  # `_follows`: another engine core had requests of this log
        self._resets, self._index = 0, first.pool.prefix_index
        self._prompts: deque[tuple[str, np.ndarray]] = deque(maxlen=RECENT)  # with their salts

    def hear(self, item: Folded) -> None:
        event, before = item.event, item.before
        match event:
            case RequestArrived():
                self._arrived(item, event)
                if isinstance(event, RequestResumed) and event.generated and self._follows:
                    self._reached[event.id], self._why[event.id] = len(event.prompt + event.generated) // 4, "crash"
            case EngineRecovered():
                self._follows |= bool(event.log)
            case PrefixCacheReset():
                self._resets += 1
        if (plan := item.plan) is not None:
            for row in plan.preempted:
                self._why[int(before.rows.id[row])] = "preemption"
                self.preemptions += 1
            for id_ in item.after.rows.id[len(before.rows) - len(plan.preempted) :].tolist():
                self._admitted(id_)
        self._hold(item.after)
        if everyone_leaves(event):
            self._resets += 1
            for id_ in before.rows.id.tolist():
                self._why[id_] = _why(event)

    def _arrived(self, item: Folded, event: RequestArrived) -> None:
        if not item.after.config.prefix_caching:
            request = item.after.requests.get(event.id)
            self._names[event.id] = block_hashes(request.root, event.prompt, self._size) if request is not None else ()
            return
        hashes = next((each.block_hashes for each in item.after.waiting if each.id == event.id), ())
        known = next((place for place, each in enumerate(hashes) if each not in self._held), len(hashes))
        self._asked[event.id] = hashes[:known]
        prompt = unpack_tokens(event.prompt)
        if hashes and self._parts(prompt, known * self._size):
            self._lost[event.id] = len(prompt), "prefix"
        elif hashes and (walled := self._walled(event.cache_salt, prompt)) >= known * self._size + ALIKE_MIN:
            self._lost[event.id] = walled, "salt"
        self._prompts.append((event.cache_salt, prompt))

    def _admitted(self, id_: int) -> None:
        """A request joins the batch, for the first time if it has asked for blocks that the cache had held, or would have."""
        if names := self._names.pop(id_, ()):
            known = next((place for place, each in enumerate(names) if each not in self._held), len(names))
            self._lost[id_] = known * self._size, "off"
            self._held |= dict.fromkeys(names, self._resets)
        if (asked := self._asked.pop(id_, ())) and id_ not in self._lost:
            flushed = any(self._held[each] < self._resets for each in asked)
            self._lost[id_] = len(asked) * self._size, "flush" if flushed else "evicted"

    def _parts(self, prompt: np.ndarray, known: int) -> bool:
        """Whether the prompt is mostly an earlier one's, but for a few tokens before the part that is the same."""
        for _, other in self._prompts:
            size = min(len(prompt), len(other))
            same = prompt[:size] == other[:size]
            alike = int(same[known + self._size :].sum())
            if not same.all() and alike > max(ALIKE_MIN, ALIKE * len(prompt)) and not same[: known + self._size].all():
                return True
        return False

    def _walled(self, salt: str, prompt: np.ndarray) -> int:
        """How many leading tokens are those of an earlier prompt behind another salt."""
        most = 0
        for other_salt, other in self._prompts:
            if other_salt != salt:
                same = prompt[: len(other)] == other[: len(prompt)]
                most = max(most, len(same) if same.all() else int(same.argmin()))
        return most // self._size * self._size

    def _hold(self, after: State) -> None:
        """Note the blocks that the cache has got since the last event."""
        index = after.pool.prefix_index
        if index is not self._index:
            self._held |= dict.fromkeys((key for key, _ in index.since(self._index)), self._resets)
            self._index = index

    def meet_run(self, run: Run) -> None:
        """Take a run of steady frames."""
        self._hold(run.after)
        for id_ in run.ids.tolist():
            self._reached[id_] = self._reached.get(id_, 0) + run.frames

    def again(self, item: Folded) -> dict[str, int]:
        """How many tokens of the step planned last had been computed before, by why they are computed again."""
        scheduled, found = item.after.in_flight[-1], Counter[str]()
        for id_, start, count in zip(*(column.tolist() for column in (scheduled.ids, scheduled.starts, scheduled.counts))):
            end, reached = start + count, self._reached.get(id_, 0)
            if start < reached and id_ in self._why:
                found[self._why[id_]] += min(end, reached) - start
            elif id_ in self._lost and start < self._lost[id_][0]:
                found[self._lost[id_][1]] += min(end, self._lost[id_][0]) - start
            self._reached[id_] = max(end, reached)
        return dict(found)


def _why(event: AnyEvent) -> str:
    """Why everyone computes again behind this event."""
    match event:
        case EngineRecovered():
            return "crash"
        case MemoryRanShort():
            return "memory"
        case WeightsChanged():
            return "weights"
        case EnginePaused():
            return "pause"
    return "flush"
