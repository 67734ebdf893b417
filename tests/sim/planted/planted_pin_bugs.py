"""Faults around pins: blocks that leave before their time or stay beyond it, shares that are exceeded, and requests that wait for
pages which nobody gives them."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


PIN_BUGS = [
    bug("a pin holds no page", "state.pool", "pool = _replace(hold(pool, new), pins=pins)", "pool = _replace(pool, pins=pins)", "M2"),
    bug("a pin that is prolonged holds its page twice", "state.pool", "new = pages[pins.ends.at(pages) == 0]", "new = pages", "M2"),
    bug("a pin that is over keeps its page", "state.pool", "return _replace(release(pool, pages), pins=pool.pins.without(pages, ending))", "return _replace(pool, pins=pool.pins.without(pages, ending))", "M2"),
    bug("pins exceed their share", "state.pool", "excess = pins.count - page_count_max", "excess = pins.count - page_count_max - 1", "K5", "K6"),
    bug("pins that last longer give way", "state.store.pins", 'kind="stable")].astype(np.int32)', 'kind="stable")][::-1].astype(np.int32)', "K6"),
    bug("the end of a prefix outlives its beginning", "state.store.pins", "- np.minimum(np.arange(blocks), DEPTHS - 1)", "- DEPTHS + 1 + np.minimum(np.arange(blocks), DEPTHS - 1)", "K6"),
    bug("a pin lasts a second too long", "state.store.pins", "// DEPTHS <= seconds]", "// DEPTHS < seconds]", "K5", "K6"),
    bug("a pin ends a second too soon", "state.store.pins", "// DEPTHS <= seconds]", "// DEPTHS <= seconds + 1]", "K6"),
    bug("a shorter pin cuts a longer one", "state.store.pins", "ends > before", "ends != before", "K6"),
    bug("a later pin does not prolong an earlier one", "state.store.pins", "ends > before", "before == 0", "K6"),
    bug("pins are counted once for each request", "state.store.pins", "np.count_nonzero(before == 0)", "len(pages)", "K5"),
    bug("the whole request stays where a beginning was asked for", "state.fold_commit", "min(tokens, len(history) - 1)", "(len(history) - 1)", "K6"),
    bug("an answer's last token is pinned too", "state.fold_commit", "min(tokens, len(history) - 1)", "min(tokens, len(history))", "K6"),
    bug("a pin is of the time when the engine started", "state.fold_commit", "state.clock + seconds", "seconds", "K5", "K6"),
    bug("an aborted request pins nothing", "state.fold_commit", "if state.requests[id_].sampling.retention and", "if ending == \"finished\" and state.requests[id_].sampling.retention and", "K6"),
    bug("a reset leaves pins", "state.pool", "    pool = without_pins(pool)\n", "", "K5", "K6"),
    bug("a clock goes back", "state.facilities.pins", "require(event.seconds > state.clock,", "require(True,", "should have been refused"),
    bug("more pins yield than there are", "state.facilities.pins", "require(0 < event.count <= len(pinned),", "require(True,", "should have been refused"),
    bug("pins never yield", "sched.pinning", "if lacking <= 0:", "if True:", "S6"),
    bug("pins yield to a request and not to a row", "sched.pinning", "stuck = work.pages_sum > pool.free and", "stuck = False and", "S6"),
    bug("a snapshot forgets pins", "log.snapshot", "    pins = pins_of(frame.pins, config.page_count)\n", "    pins = None\n", "X2", "BadSnapshot", "IllegalEvent", "M1"),
    bug("a snapshot forgets the clock", "log.snapshot", "clock=frame.clock", "clock=0", "X2", "IllegalEvent"),
]  # fmt: skip
PIN_LOSS_BUGS = [
    bug("weights change and pins stay", "state.facilities.weights", "pool=pools.without_pins(state.pool)", "pool=state.pool", "K6"),
    bug("pins outlive their pages", "state.pool", "pins=before and before.emptied()", "pins=before", "M2", "K5"),
]  # fmt: skip
"""Where memory or weights are lost with pins."""
