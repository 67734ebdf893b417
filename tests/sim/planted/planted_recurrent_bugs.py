"""Faults of recurrent layers: a snapshot of other tokens, two writers of one state, a copy too late, too early or never, a page lost."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


RECURRENT_BUGS = [
    bug("a hit needs no snapshot", "state.allocate",
        "return hits if pool.states is None else with_snapshot(pool, waiting.block_hashes, hits)", "return hits", "AssertionError"),
    bug("a hit goes a block beyond its snapshot", "state.recurrent", "hits[: there[-1] + 1]", "hits[: there[-1] + 2]", "AssertionError"),
    bug("a snapshot alone is no hit", "state.recurrent", "if len(there) else hits[:0]", "if len(there) > 1 else hits[:0]", "P1"),
    bug("a state goes on from zeros", "state.fold_plan", "        if allocation.source >= 0:\n", "        if allocation.source > 99:\n", "N1"),
    bug("a state goes on from another page", "state.fold_plan", "(allocation.source, int(allocation.states[0]))",
        "(int(allocation.states[-1]), int(allocation.states[0]))", "N1"),
    bug("a copy goes into the snapshot that it starts from", "state.recurrent",
        "pools.take(pools.hold(states, used), pages_held(config))", "pools.take(states, pages_held(config))", "M1", "N3", "N4", "N1"),
    bug("a request writes its snapshot in place", "state.recurrent",
        "    return pools.release(states, used), pages\n",
        "    pages[:1] = used if len(used) else pages[:1]\n    return states, pages\n", "N2", "N3", "N4", "ValueError"),
    bug("a snapshot is named before its tokens are computed", "state.recurrent",
        "        recurrent[[NEWEST, NEWEST_EDGE, SPARE, DUE], row] = spare, due, newest, 0",
        "        recurrent[[NEWEST, NEWEST_EDGE, SPARE, DUE], row] = spare, due - state.config.block_size, newest, 0", "N1"),
    bug("a snapshot has the name of the block behind it", "state.recurrent", "(rows.recurrent[DUE] == at)", "(rows.recurrent[DUE] <= at + 1)",
        "N1"),
    bug("a step is not cut at an edge", "state.expected", "up_to_inputs(state, cut(config, rows, most))", "up_to_inputs(state, most)", "S6"),
    bug("an admission is not cut at an edge", "sched.admission", "first_tokens(state, waiting, hit, tokens)", "tokens", "S6"),
    bug("a snapshot is taken inside a block", "state.recurrent", "(computed % size == 0) & (last", "(computed > 0) & (last", "N1"),
    bug("a preempted request keeps its state page", "state.preempt", "recurrent[[LIVE, SPARE, NEWEST], row]",
        "recurrent[[SPARE, NEWEST], row]", "N4"),
    bug("a page leaves twice", "state.preempt", "recurrent[[LIVE, SPARE, NEWEST], row]", "recurrent[[LIVE, LIVE, NEWEST], row]",
        "N4", "M1", "N1"),
    bug("a snapshot that is kept is used again", "state.recurrent", "states, pages = pools.take(pools.release(states, np.array([newest], dtype=np.int32)), 1)",
        "pages = np.array([newest])", "N1"),
    bug("a request holds fewer pages than it needs", "state.recurrent", "3 if config.takes_snapshots else 1", "2 if config.takes_snapshots else 1",
        "N1", "N2", "N4", "S3"),
    bug("nobody asks for free state pages", "sched.admission", "(lacks := lacking(", "(lacks := 0 * lacking(", "IllegalEvent", "ValueError"),
    bug("state pages of other rows go with a row that leaves", "state.store.rows",
        "np.compress(keep, rows.recurrent, axis=1)", "rows.recurrent[:, : int(keep.sum())]", "N1", "N2", "N4"),
    bug("a reset forgets no snapshot", "state.pool", "states = pool.states and clear_prefix_index(pool.states)", "states = pool.states", "K4"),
    bug("a recovery keeps snapshots", "state.reduce", "pools.new_pool(state.config.page_count, state.pool.pins, state.config.state_pages)",
        "msgspec.structs.replace(pools.new_pool(state.config.page_count, state.pool.pins), states=state.pool.states)", "N1", "N4", "C1"),
    Bug(name="one rank copies nothing behind a step", found_by=("Y1",), one_rank=(
        Edit("state.recurrent", "        if len(due):\n", "        if len(due) > 99:\n"),)),
]  # fmt: skip
PINNED_STATE_BUGS = [
    bug("a pin keeps blocks and no snapshot", "state.fold_commit", "        pool = with_pin(config, pool, keys[len(hits) // config.group_count - 1], int(ends[-1]))\n",
        "", "K6"),
    bug("blocks behind the last snapshot are pinned", "state.fold_commit", "with_snapshot(pool, keys, longest_prefix(pool, keys, len(keys)))",
        "longest_prefix(pool, keys, len(keys))", "K6", "TypeError"),
    bug("a snapshot outlives its block's pin", "state.facilities.pins",
        '        pool = with_pins_of_blocks(state.config, pool, "expired")\n', "", "N5"),
    bug("a snapshot is pinned where its block yields", "state.facilities.pins",
        'pool=with_pins_of_blocks(state.config, pool, "yielded")', "pool=pool", "N5"),
    bug("pins take the last state pages", "state.recurrent", "config.state_pages - pages_held(config) - 1)", "config.state_pages)",
        "S6", "N5", "K6"),
    bug("a log's snapshot forgets the pins of states", "log.snapshot", "    kept = pins_of(frame.states.pins, config.state_pages)\n", "    kept = None\n",
        "X2", "BadSnapshot", "N4"),
]  # fmt: skip
DRAFTED_STATE_BUGS = [
    bug("a snapshot of rejected drafts gets a name", "state.recurrent", "(back > 0) & (recurrent[DUE] >= known)", "(back < 0) & (recurrent[DUE] >= known)",
        "N1"),
    bug("drafts go beyond an edge", "state.drafting", "config.block_size - 1 - rows.computed", "config.block_size - rows.computed", "S6"),
    bug("a step has more drafts than a rank has pages for", "state.drafting", "budget = min(budget, int(tokens.sum()) + drafts_a_step(config))",
        "pass", "S6", "IllegalEvent"),
]  # fmt: skip
