"""Where snapshots of recurrent layers cut a request's steps, and which of them the cache offered, each decided a second time.

The engine's forms are in vnext/state/recurrent.py; these go token by token and page by page.
"""

from __future__ import annotations

from vnext.sim.checks.plain_state import PlainState
from vnext.state.config import SchedulerConfig
from vnext.state.state import State, Waiting
from vnext.state.store.fields import LIVE, NEWEST, SPARE


def up_to_edge(config: SchedulerConfig, computed: int, known: int, prompt: int, tokens: int) -> int:
    """`tokens` behind the `computed` ones, up to the first edge at which a snapshot is taken."""
    if not config.takes_snapshots:
        return tokens
    size = config.block_size
    edges = {(prompt - 1) // size * size, known // size * size}
    for count in range(1, tokens):
        if computed + count in edges or (computed + count) % config.snapshot_interval == 0:
            return count
    return tokens


def offered_edges(before: PlainState, after: PlainState, waiting: Waiting, stays: bool = False) -> list[bool]:
    """Of each full block of the request: whether the plan's admissions found a snapshot at its end. `stays`: whether it is there
    behind the plan, too."""
    then, now = before.state.pool.states, after.state.pool.states
    if then is None or now is None:
        return [True] * len(waiting.block_hashes)
    taken = _pages_of_new(before, after)
    found = []
    for key in waiting.block_hashes:
        page = then.prefix_index.block_of(key)
        found.append(page is not None and page not in taken and (not stays or now.prefix_index.block_of(key) == page))
    return found


def state_pages_fit(before: PlainState, after: PlainState, waiting: Waiting, hit_blocks: int) -> bool:
    """Whether one more request would have had its state pages, behind those that the plan admits."""
    config, then, now = after.state.config, before.state.pool.states, after.state.pool.states
    if then is None or now is None:
        return True
    need = 3 if config.takes_snapshots else 1
    if hit_blocks:
        page = then.prefix_index.block_of(waiting.block_hashes[hit_blocks - 1])
        need += page is not None and int(then.ref[page]) == 0
    return need <= now.free


def snapshot_count(state: State) -> int:
    """The snapshots that may be hits; 0 without recurrent layers."""
    return 0 if state.pool.states is None else len(state.pool.states.prefix_index)


def _pages_of_new(before: PlainState, after: PlainState) -> set[int]:
    """The state pages of requests that the plan admits."""
    recurrent = after.state.rows.recurrent
    assert recurrent is not None, "the model has recurrent layers"
    new = [row for row, id_ in enumerate(after.id) if id_ not in before.id]
    return set(recurrent[[LIVE, NEWEST, SPARE]][:, new].reshape(-1).tolist()) if before is not after else set()
