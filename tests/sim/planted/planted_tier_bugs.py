"""Faults around the disk tier: pages that nobody or somebody else holds, blocks that are not what their names say, and requests that
wait for a disk which is not theirs; and blocks that go to other engines and come from them."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


HITS = ("reads other content", "P1", "K1")
TIER_BUGS = [
    bug(
        "a damaged block is a hit", "tests.sim.tier", "key in self.damaged or key not in self.blocks", "key not in self.blocks",
        *HITS,
    ),
    bug("a block counts that was not read", "state.facilities.tier", "end = min(hits + event.count, len(pages))", "end = len(pages)", *HITS),
    Bug(name="a transfer brings the whole prompt", found_by=("should have been refused",), edits=(
        Edit("state.facilities.tier", "< count <= most", "< count <= most + 1"),
        Edit("sched.tiering", "entry.hit_blocks_max(state.config.block_size)]", "entry.known // state.config.block_size]"),
    )),
    bug("a transfer holds no hits", "state.facilities.tier", "pools.take(pools.hold(state.pool, hits), event.count)", "pools.take(state.pool, event.count)", "M2"),
    bug("a transfer keeps its pages", "state.facilities.tier", "pool = pools.release(pool, np.array(pages[::-1], dtype=np.int32))", "", "M2"),
    bug("a transfer never ends", "state.facilities.tier", "each.number != event.transfer)", "True)", "M2"),
    bug(
        "blocks come back under the names before them", "state.facilities.tier",
        "zip(transfer.keys[hits:end]", "zip(transfer.keys[:end]", *HITS,
    ),
    bug("a request joins while its blocks are read", "sched.admission", "if not moves or not (moving", "if True or not (moving", "IllegalEvent"),
    bug("a request has transfers without end", "state.facilities.tier", "waits = replace(entry, transfer=event.transfer)", "waits = entry", "K2", "should have been refused", "L2"),
    bug("rows give way to a disk", "sched.tiering", "work.pages_sum > state.pool.free or", "", "K2"),
    bug("the best waits for another's disk", "sched.tiering", "return tokens > 0 and (not fits(", "return False and (not fits(", "K2", "S6"),
    bug("a disk holds more than it can", "state.facilities.tier", "len(disk) <= tier.capacity", "True", "K3", "should have been refused"),
    bug("nothing is evicted from a disk", "sched.tiering", "if excess <= 0:", "if True:", "IllegalEvent"),
    bug("a reset leaves what is read", "state.facilities.tier", "replace(each, keys=())", "each", "K4"),
    bug("a reset leaves the disk", "state.reduce", "tier=tier.emptied(state.tier)", "tier=state.tier", "K4"),
    bug("a snapshot forgets the disk", "log.snapshot", "tier=_tier(frame.tier) if frame.tier else None", "tier=None", "X2", "BadSnapshot", "IllegalEvent"),
]  # fmt: skip
STATE_TIER_BUGS = [
    bug("a damaged snapshot is a hit", "tests.sim.tier", "if key in self.damaged or key", "if (key in self.damaged and BEHIND not in key[16:]) or key", "N1", "K1"),
    bug("a snapshot counts that was not read", "state.facilities.tier", "came = hits + event.count > end", "came = True", "N1", "K1"),
    bug("a snapshot comes back under the name of the block before", "state.facilities.tier", "for key in transfer.keys[-1:]]", "for key in transfer.keys[-2:-1]]", "N1", "K1"),
    bug("a transfer keeps its state page", "state.facilities.tier", "    return pools.release(states, np.array([transfer.state], dtype=np.int32))", "    return states", "N4"),
    bug("a transfer reads into a state page that others may take", "state.facilities.tier", "states, (page,) = pools.take(pool.states, 1)", "states, (page,) = pool.states, pools.take(pool.states, 1)[1]", "N4"),
    bug("a transfer ends where no snapshot is", "sched.tiering", "    for edge in range(end, hits, -1):\n", "    for edge in range(end, hits, -1):\n        return max(end - first, 0), 0\n", "IllegalEvent"),
    Bug(name="a snapshot is read where no state page is free", found_by=("IllegalEvent",), edits=(
        Edit("sched.tiering", "if min(free, free_states) < 0:", "if free < 0:"), Edit("sched.tiering", "if edge and not free_states:", "if False:"),
    )),
    bug("the best waits for another's state page", "sched.tiering", " or _takes_state_page(state, entry, len(hits)))", ")", "K2", "S6"),
    bug("a reset leaves the snapshots on disk", "state.facilities.tier", ", snapshots=emptied(tier.snapshots))", ")", "K4"),
    bug("a log's snapshot forgets a transfer's state page", "log.snapshot", "np.array([each.state for each in transfers if each.state >= 0], np.int64)", "np.empty(0, np.int64)", "X2", "BadSnapshot", "N4"),
    bug("a log's snapshot forgets the snapshots on disk", "log.snapshot", "None if frame.snapshots is None else _tier(frame.snapshots)", "None", "Y1", "X2", "BadSnapshot", "IllegalEvent"),
]  # fmt: skip
STATE_PEER_BUGS = [
    bug("a snapshot of an earlier block leaves", "state.facilities.handover", "prefix_index.block_of(names[-1])", "prefix_index.block_of(names[0])", "H1", "IllegalEvent"),
]  # fmt: skip
PEER_BUGS = [
    bug("a stale block comes", "state.facilities.handover", "event.count > 0 and event.names == names", "event.count > 0", "should have been refused"),
    bug("blocks come without a checksum", "state.facilities.handover", "fitting = len(event.checksums) > 0 and", "fitting =", "should have been refused"),
    bug("a block leaves before it is complete", "state.facilities.handover", "require(event.count <= int(rows.hashed_blocks[row or 0])", "require(True", "should have been refused"),
    Bug(name="the whole prompt leaves", found_by=("should have been refused",), edits=(
        Edit("state.facilities.handover", "most = (int(rows.prompt[row or 0]) - 1) // size", "most = int(rows.prompt[row or 0]) // size"),
        Edit("sched.handover", "count = (int(rows.prompt[row]) - 1) // size", "count = int(rows.prompt[row]) // size"),
    )),
    bug("blocks leave too early", "sched.handover", "0 < count <= int(rows.hashed_blocks[row])", "0 < count", "IllegalEvent"),
    bug("other pages leave", "state.facilities.handover", "row_blocks(state, row)[: event.count]", "row_blocks(state, row)[: event.count][::-1]", "H1"),
]  # fmt: skip
