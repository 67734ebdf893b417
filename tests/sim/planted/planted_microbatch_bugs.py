"""Faults around microbatches: tokens in flight that are taken again, parts of another size, and turns that never come."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


COLUMNS = "state.store.columns_numpy"
MICROBATCH_BUGS = [
    bug("a token in flight is computed twice at once", COLUMNS, "[cells[fields.PLACEHOLDERS, decoding] == 0]", "", "S7"),
    bug("a microbatch is one request too large", COLUMNS, "[: end - first]", "[: end - first + 1]", "S7", "S6"),
    bug("the first microbatch has every turn", COLUMNS, "len(decoding), step % microbatches", "len(decoding), 0", "S6", "S8"),
    bug("a microbatch begins with the first request", COLUMNS, "np.roll(decoding, -first)", "np.roll(decoding, 0)", "S6", "S8"),
    bug("prompts take turns too", COLUMNS, "(_wants(cells) == 1).nonzero()[0]", "(_wants(cells) >= 1).nonzero()[0]", "S6"),
    bug("few requests are divided", COLUMNS, "count >= microbatches", "count > 0", "S6"),
    bug("a cautious engine divides its requests", "state.expected", "1 if state.cautious else state.config.microbatches",
        "state.config.microbatches", "S6"),
    bug("a microbatch that gives way leaves a step without work", "sched.preemption", "and not turn.all():", "and False:", "S6"),
]  # fmt: skip
