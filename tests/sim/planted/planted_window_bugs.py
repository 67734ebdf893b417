"""Faults of windows: what layers no longer see is given back too early, twice, never, or found again where it is not."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


EARLY_STEP = """    rows = state.rows
    moved = replace(state, rows=replace(rows, cells=rows.cells + (np.arange(len(rows.cells)) == fields.COMPUTED)[:, None] * work.tokens))
    state = advance(replace(state, pool=give_back(moved, starts)) if state.config.windows else state, work)
    ran = len(rows)
"""

WINDOW_BUGS = [
    bug(
        "a window's block is given back a token too early",
        "state.windows",
        "computed[:, None] - windows + 1",
        "computed[:, None] - windows + 2",
        "M2",
        "reads other content",
    ),
    bug(
        "a window's block is given back a token too late",
        "state.windows",
        "computed[:, None] - windows + 1",
        "computed[:, None] - windows",
        "M2",
    ),
    bug(
        "a window's block is never given back",
        "state.fold_plan",
        "pool = give_back(replace(state, pool=pool), at_least)",
        "pool = pool",
        "M2",
    ),
    bug(
        "a window's block is given back twice",
        "state.windows",
        "return pools.release(state.pool, pages)",
        "return pools.release(pools.release(state.pool, pages), pages)",
        "M1",
        "M2",
    ),
    bug(
        "a common block is given back for one of two",
        "state.windows",
        "if len(runs) == 1 or len(np.unique(pages)) == len(pages):",
        "if runs:",
        "M1",
        "M2",
    ),
    Bug(
        name="blocks are given back before the step that sees them has its own",
        found_by=("reads other content", "M1"),
        edits=(
            Edit("state.fold_plan", "    state = advance(state, work)\n", EARLY_STEP),
            Edit(
                "state.fold_plan",
                "pool = give_back(replace(state, pool=pool), at_least)",
                "pool = give_back(replace(state, pool=pool), np.where(np.arange(len(starts)) < ran, state.rows.computed, starts))",
            ),
        ),
    ),
    bug(
        "a block that was given back gets a name",
        "state.fold_commit",
        "hash_full_blocks(state, done, given_back=True)",
        "hash_full_blocks(state, done)",
        "P1",
        "M1",
        "reads other content",
    ),
    bug(
        "a hit needs the last block of a window only",
        "state.windows",
        "(there >= lengths[:, None] - first)",
        "(there >= np.where(first > 0, 1, lengths[:, None]))",
        "M2",
    ),
    bug(
        "a hit takes blocks that no window shows",
        "state.windows",
        "<= first[last]] = NULL",
        "<= first[last] - 1] = NULL",
        "M2",
    ),
    bug(
        "a hit claims another group's blocks",
        "state.windows",
        "group_hash(key, group) for key",
        "group_hash(key, 0) for key",
        "M1",
        "M2",
        "reads",
    ),
    bug(
        "all groups' pages have one name",
        "state.store.columns_numpy",
        "if group else key",
        "if group > 99 else key",
        "P1",
        "reads",
        "M1",
        "M2",
    ),
    bug("two groups' pages are named as if they were one", "state.allocate", "if groups > 1:", "if groups > 2:", "P1"),
    bug(
        "only the first group's pages are named",
        "state.allocate",
        "for key in keys for group in range(groups)]",
        "for key in keys for group in range(1)]",
        "P1",
    ),
    bug(
        "a request leaves with blocks that it gave back",
        "state.windows",
        "return table.compress(held_entries(config, state.rows.computed_at_least[here], state.rows.blocks[here]))",
        "return table",
        "M1",
    ),
    bug(
        "a request that needs its chunk's blocks is not refused",
        "state.windows",
        "blocks_for(window + chunk - 2, size) + 1",
        "blocks_for(window, size) + 1",
        "L1",
    ),
    bug(
        "a snapshot holds what was given back",
        "log.snapshot",
        "tables[held_entries(config, rows.computed_at_least, rows.blocks)]",
        "tables[tables >= 0]",
        "BadSnapshot",
        "no state of this engine",
    ),
    Bug(
        name="one rank never gives back",
        found_by=("Y1",),
        one_rank=(Edit("state.fold_plan", "pool = give_back(replace(state, pool=pool), at_least)", "pool = pool"),),
    ),
]
