"""Laws of the disk tier: nobody but its own request waits for a disk, and a reset forgets what is on it.

K1 is the shadow cache's (rank.py), K3 is a law of every state (vnext/state/laws.py).
"""

from __future__ import annotations

from vnext.sim.checks.fitting import first_chunk, needs_slot
from vnext.sim.checks.plain_state import PlainState
from vnext.sim.checks.recurrent_checks import snapshot_count
from vnext.state.errors import LawBroken
from vnext.state.events import AnyEvent, PrefixCacheReset, StepPlanned
from vnext.state.facilities.tier import transferring
from vnext.state.state import Waiting


def tiers_block_nobody(before: PlainState, plan: StepPlanned | None, after: PlainState, best: Waiting | None) -> None:
    """K2: while a transfer holds pages, no row is preempted for want of pages, and the best waiting request that has none does not
    wait for them. `best`: that one, of those that may be admitted."""
    if plan is None or not transferring(before.state):
        return
    if plan.preempted:
        raise LawBroken("K2", f"rows {plan.preempted} give way while blocks are read from disk")
    if plan.admitted or best is None or len(after) >= after.state.config.max_num_seqs or before.state.cautious:
        return
    budget = before.state.config.max_num_batched_tokens - sum(after.in_flight[-1].counts)
    if budget > 0 and not needs_slot(after, best) and not first_chunk(before, after, best, budget, transfers=True):
        return
    if budget > 0 and not needs_slot(after, best) and not first_chunk(before, after, best, budget):
        raise LawBroken("K2", f"request {best.id} waits for pages into which blocks are read from disk")


def resets_forget(event: AnyEvent, after: PlainState) -> None:
    """K4: behind a reset nothing is a hit, neither in memory nor on disk, nor what is being read."""
    if not isinstance(event, PrefixCacheReset):
        return
    tier = after.state.tier
    left = 0 if tier is None else len(tier.disk) + sum(len(each.keys) for each in tier.transfers)
    kept = len(after.state.pool.prefix_index) + snapshot_count(after.state)
    if left or kept:
        raise LawBroken("K4", f"{left} blocks on disk and {kept} in memory outlive a reset")
