"""What ranks of a simulation give and share; what a step leaves behind that lacks memory, and the law of the state behind it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vnext.sim.checks import fitting
from vnext.sim.checks.plain_state import PlainState
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, MemoryRanShort, StepCommitted, StepLimitRaised, StepRewound
from vnext.state.pool import Pool, indexed_since
from vnext.state.state import State, Transfer

SPOILT = -11
BEHIND = b"|"
"""A snapshot's name in Contents has this behind that of its block."""


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
    """What a disk tier has of each block and snapshot, and those that it has not as they were written. Mutable; all ranks share it.
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


def named_since(pool: Pool | None, older: Pool | None, again: bool) -> list[tuple[bytes, int]]:
    """The pages that have a name now and had none; all with a name `again`."""
    if pool is None or older is None or (pool.prefix_index is older.prefix_index and not again):
        return []
    return list(pool.prefix_index.blocks().items()) if again else indexed_since(pool, older)


def spoil(cache: list[list[int]], seen: PlainState) -> StepCommitted:
    """Write what is nothing where the newest step was to write; it samples no token."""
    step, config = seen.in_flight[-1], seen.state.config
    size, groups = config.block_size, config.group_count
    for id_, start, count in zip(step.ids, step.starts, step.counts):
        table = seen.tables[seen.rows.id.index(id_)]
        for place in range(start, min(start + count, len(table) // groups * size)):
            for page in table[place // size * groups : (place // size + 1) * groups]:
                cache[page][place % size] = SPOILT
    return StepCommitted(step=step.step, tokens=b"")


def shortages_lose_nothing(before: PlainState, event: AnyEvent, after: PlainState) -> None:
    """C6: behind a shortage nothing runs, or all with what was computed before, and steps take half at most.

    Raises LawBroken.
    """
    old, state = before.state, after.state
    limit, now = old.config.max_num_batched_tokens, state.config.max_num_batched_tokens
    if (most := state.lowered_from or now) != (old.lowered_from or limit):
        raise LawBroken("C6", f"the engine started with {old.lowered_from or limit} tokens a step, and now says {most}")
    if isinstance(event, MemoryRanShort):
        half = max(sum(before.in_flight[0].counts) // 2, 1) if state.config.chunked_prefill else limit
        stay = before.rows.id if isinstance(event, StepRewound) else []
        left = after.rows.id != stay or state.in_flight or (state.planned, state.committed) != (old.planned, old.planned)
        if left or now > half:
            raise LawBroken("C6", f"behind a shortage requests {after.rows.id} run, and a step takes {now} tokens of {half}")
        computed, due = after.rows.computed, computed_before(before) if stay else []
        if (computed, after.rows.placeholders) != (due, [0] * len(stay)):
            raise LawBroken("C6", f"requests {stay} have {computed} tokens where {due} were computed")
    elif now < limit or (now > limit and not isinstance(event, StepLimitRaised)):
        raise LawBroken("C6", f"a step takes {now} tokens behind {type(event).__name__}, and took {limit}")


def computed_before(seen: PlainState) -> list[int]:
    """How many tokens each row has from steps that are over, in pages that no step in flight was to write; none where its result
    needs every position of its prompt."""
    size, starts = seen.state.config.block_size, dict(zip(zip(seen.rows.id, seen.rows.preemption_count), seen.rows.computed))
    for step in reversed(seen.in_flight):
        starts |= {owner: start for owner, start in zip(step.owners, step.starts) if owner in starts}
    found = list(starts.values())
    flown = {owner for step in seen.in_flight for owner in step.owners}
    pages = {page for owner, table, start in zip(starts, seen.tables, found) if owner in flown for page in table[start // size :]}
    for row, owner in enumerate(starts):
        if owner in flown:
            shared = [place * size for place in range(found[row] // size) if seen.tables[row][place] in pages]
            is_scored = fitting.readable_tokens(seen, owner[0]) == 0
            found[row] = 0 if is_scored else min([found[row], *shared])
    return found
