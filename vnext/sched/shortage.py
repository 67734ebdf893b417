"""Shortage: what an engine decides when a step lacks memory, and when steps may take more again. Pure.

The step is cut in halves: nothing of it is known, and the next ones take at most half of its tokens, of the same rows where these
can go back. After SUFFICED steps that had enough, the limit is doubled; each time that this was too early, it waits twice as long.
"""

from __future__ import annotations

from vnext.state.events import MemoryRanShort, StepLimitRaised, StepRewound
from vnext.state.facilities.shortage import halved, rewound
from vnext.state.state import State

SUFFICED, SUFFICED_MAX = 32, 4096
"""Steps between two looks, at first and at most."""


def ran_short(state: State, cause: str) -> MemoryRanShort:
    """The event of a shortage in the oldest step in flight."""
    event = MemoryRanShort if rewound(state) is None else StepRewound
    return event(step=state.in_flight[0].step, limit=halved(state), cause=cause)


def is_stuck(state: State) -> bool:
    """Whether a shortage now would leave the next step no smaller than the oldest one in flight."""
    return halved(state) >= state.in_flight[0].tokens or not state.config.chunked_prefill


def raised(state: State) -> StepLimitRaised:
    """The event of more tokens a step, where they are lowered."""
    return StepLimitRaised(limit=min(2 * state.config.max_num_batched_tokens, state.lowered_from))


def patience(steps: int, is_early: bool) -> int:
    """For how many steps the limit stays next, behind `steps` the last time; `is_early`: that was too early."""
    return min(2 * steps, SUFFICED_MAX) if is_early else SUFFICED
