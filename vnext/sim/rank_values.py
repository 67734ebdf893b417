"""What ranks of a simulation give and share; what a step leaves behind that lacks memory, and the law of the state behind it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vnext.sim.checks.plain_state import PlainState
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, MemoryRanShort, StepCommitted, StepLimitRaised
from vnext.state.state import State, Transfer

SPOILT = -11


class StepResult(msgspec.Struct, frozen=True):
    """A rank's result of a step: its commit, its digest of the state in which it ran, 0 if none was asked for, that of what the
    step's constraints allowed (`masks`), the requests whose constraints cannot be followed (`failed`), whether memory ran short."""

    event: StepCommitted
    digest: int
    masks: int
    failed: tuple[int, ...]
    is_short: bool = False

    @property
    def step(self) -> int:
        return self.event.step


class Contents:
    """What a disk tier has of each block, and those that it has not as they were written. Mutable; all ranks of a run share it.
    `found` are those of a transfer that were damaged when it ended: a rank that folds its events later finds the disk as it was.
    `short`: the steps for which ranks lack memory."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[int]] = {}
        self.damaged: set[bytes] = set()
        self.found: dict[Transfer, frozenset[bytes]] = {}
        self.short: set[int] = set()


def is_short_in(state: State, short: Collection[int]) -> bool:
    """Whether one of the steps in flight lacks memory."""
    return bool(short) and any(step.step in short for step in state.in_flight)


def spoil(cache: list[list[int]], seen: PlainState) -> StepCommitted:
    """Write what is nothing where the newest step was to write; it samples no token."""
    step, config = seen.in_flight[-1], seen.state.config
    size, groups = config.block_size, config.group_count
    for id_, start, count in zip(step.ids, step.starts, step.counts):
        table = seen.tables[seen.id.index(id_)]
        for place in range(start, min(start + count, len(table) // groups * size)):
            for page in table[place // size * groups : (place // size + 1) * groups]:
                cache[page][place % size] = SPOILT
    return StepCommitted(step=step.step, tokens=b"")


def shortages_lose_nothing(before: PlainState, event: AnyEvent, after: PlainState) -> None:
    """C6: behind a shortage nothing runs, and steps take half at most.

    Raises LawBroken.
    """
    old, state = before.state, after.state
    limit, now = old.config.max_num_batched_tokens, state.config.max_num_batched_tokens
    if (most := state.lowered_from or now) != (old.lowered_from or limit):
        raise LawBroken("C6", f"the engine started with {old.lowered_from or limit} tokens a step, and now says {most}")
    if isinstance(event, MemoryRanShort):
        half = max(sum(before.in_flight[0].counts) // 2, 1) if state.config.chunked_prefill else limit
        left = after.id or state.in_flight or (state.planned, state.committed) != (old.planned, old.planned)
        if left or now > half:
            raise LawBroken("C6", f"behind a shortage requests {after.id} run, and a step takes {now} tokens of {half}")
    elif now < limit or (now > limit and not isinstance(event, StepLimitRaised)):
        raise LawBroken("C6", f"a step takes {now} tokens behind {type(event).__name__}, and took {limit}")
