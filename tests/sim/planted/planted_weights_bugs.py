"""Faults around weights that change: blocks of old ones that are hit, and requests that go on where they may not."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


HITS = ("reads other content", "P1")
WEIGHTS_BUGS = [
    bug("other weights have the same roots", "state.block_hash", "    if not weights:", "    if True:", *HITS),
    bug("weights that return bring their blocks", "state.state", 'return f"{self.version} {self.digest}"', "return self.digest", *HITS),
    bug(
        "who waits keeps the names of old blocks", "state.facilities.weights",
        " if state.config.prefix_caching else state", " if not state.config.prefix_caching else state", "W1", *HITS,
    ),
    bug(
        "who runs keeps the pages of old weights", "state.facilities.weights",
        "weights without a digest\")\n    state = preempt(state, tuple(range(len(state.rows))))", "weights without a digest\")",
        "W1", "Y3", *HITS,
    ),
    bug("weights change under a step", "state.facilities.weights", "    if state.in_flight or (", "    if (", "should have been refused"),
    bug(
        "weights change under a request that has begun", "state.facilities.weights",
        "(len(state.rows) == 0 and", "(True and", "should have been refused",
    ),
    bug("a pause admits everybody", "sched.ranking", "    if state.paused:", "    if False:", "S3", "S6"),
    bug("a pause admits nobody", "sched.schedule", 'state.paused not in ("", "wait")', "state.paused", "S6", "L1"),
    bug("a paused engine plans", "sched.schedule", 'state.paused not in ("", "wait") or ', "", "IllegalEvent"),
    bug("a preempted request has not begun", "state.facilities.weights", "entry.preemption_count > 0 or ", "", "S3", "S6", "should have been refused"),
    bug(
        "a sleep keeps what pages held", "state.facilities.weights", "pool=pools.clear_prefix_index(state.pool)", "pool=state.pool", *HITS,
    ),
    bug("a snapshot forgets the weights", "log.snapshot", "weights=frame.weights", "weights=None", "X2", "BadSnapshot"),
    bug("a snapshot forgets the pause", "log.snapshot", "paused=frame.paused", 'paused=""', "X2", "IllegalEvent"),
]  # fmt: skip
