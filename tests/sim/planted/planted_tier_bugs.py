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
    bug("a block counts that was not read", "state.facilities.tier", "end = hits + event.count", "end = len(pages)", *HITS),
    Bug(name="a transfer brings the whole prompt", found_by=("should have been refused",), edits=(
        Edit("state.facilities.tier", "most = (entry.known - 1) // state.config.block_size", "most = entry.known // state.config.block_size"),
        Edit("sched.tiering", "(entry.known - 1) // block_size]", "entry.known // block_size]"),
    )),
    bug("a transfer holds no hits", "state.facilities.tier", "pools.take(pools.hold(state.pool, hits), event.count)", "pools.take(state.pool, event.count)", "M2"),
    bug("a transfer keeps its pages", "state.facilities.tier", "pool = pools.release(pool, np.array(pages[::-1], dtype=np.int32))", "", "M2"),
    bug("a transfer never ends", "state.facilities.tier", "each.number != event.transfer)", "True)", "M2"),
    bug(
        "blocks come back under the names before them", "state.facilities.tier",
        "zip(transfer.keys[hits:end]", "zip(transfer.keys[:end]", *HITS,
    ),
    bug("a request joins while its blocks are read", "sched.admission", "if state.tier is None or not (moving", "if True or not (moving", "IllegalEvent"),
    bug("a request has transfers without end", "state.facilities.tier", "waits = replace(entry, transfer=event.transfer)", "waits = entry", "K2", "should have been refused", "L2"),
    bug("rows give way to a disk", "sched.tiering", "work.pages_sum > state.pool.free or", "", "K2"),
    bug("the best waits for another's disk", "sched.tiering", "return tokens > 0 and not fits(", "return False and not fits(", "K2", "S6"),
    bug("a disk holds more than it can", "state.facilities.tier", "len(disk) <= tier.capacity", "True", "K3", "should have been refused"),
    bug("nothing is evicted from a disk", "sched.tiering", "if tier is None or excess <= 0:", "if True:", "IllegalEvent"),
    bug("a reset leaves what is read", "state.facilities.tier", "replace(each, keys=())", "each", "K4"),
    bug("a reset leaves the disk", "state.reduce", "tier=tier.emptied(state.tier)", "tier=state.tier", "K4"),
    bug("a snapshot forgets the disk", "log.snapshot", "tier=_tier(frame.tier) if frame.tier else None", "tier=None", "X2", "BadSnapshot", "IllegalEvent"),
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
