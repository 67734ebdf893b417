"""Faults of speculative decoding: what a rejected draft may leave behind, and drafts where there must be none."""

from __future__ import annotations

from planted_state_bugs import bug
from planting import Bug, Edit

DRAFTS, FOLD, PLAN, COLUMNS = "state.fold_drafts", "state.fold_commit", "state.fold_plan", "state.store.drafts_numpy"
DRAFT_BUGS = [
    bug("a rejected draft stays computed", COLUMNS, "cells[fields.COMPUTED] -= out_back", "cells[fields.COMPUTED] -= 0",
        "S2", "D1", "S6"),
    bug("a rejected draft is owed for ever", COLUMNS, "cells[fields.PLACEHOLDERS] -= out_back", "cells[fields.PLACEHOLDERS] -= 0",
        "A2"),
    bug("a step in flight starts behind a rejected draft", DRAFTS, "entries[2] -= np.where(found >= 0, back[found], 0)",
        "entries[2] -= 0", "D1"),
    bug("a step in flight forgets which row was set back", DRAFTS, "if back.any():", "if back.sum() > 1:", "D1"),
    bug("drafts stay in flight", COLUMNS, "drafting[TENTATIVE, rows] -= planned", "drafting[TENTATIVE, rows] -= 0", "D1"),
    bug("the rate of kept drafts never changes", COLUMNS, "    return rate\n", "    return rate * 0 + 768\n", "D5"),
    bug("a draft behind the first wrong one is a trial", COLUMNS, "np.minimum(drafted, accepted + 1)", "drafted", "D5"),
    bug("tokens behind an end are told", COLUMNS, "kept: np.ndarray = before == np.repeat(before[firsts], counts)",
        "kept: np.ndarray = before >= 0", "Y3", "answered", "IllegalEvent", "S2", "M2", "KeyError"),
    bug("a token before an end is lost", COLUMNS, "before = np.cumsum(ends) - ends", "before = np.cumsum(ends)", "answered",
        "Y3", "L1", "S2", "A2"),
    Bug(name="a commit of too many tokens", found_by=("should have been refused",), edits=(
        Edit(DRAFTS, "(counts <= drafted + 1)", "(counts <= drafted + 2)"),
        Edit(COLUMNS, "(counts <= drafted + 1)", "(counts <= drafted + 2)"),
    )),
    Bug(name="a commit of more drafts than planned", found_by=("should have been refused",), edits=(
        Edit(DRAFTS, "bool((drafted <= planned).all())", "True"),
        Edit(COLUMNS, " & (drafted <= planned)", ""),
    )),
    bug("every token of a run counts as an accepted draft", COLUMNS, "int((counts - 1).sum())", "int(counts.sum())", "Y3"),
    bug("drafts behind the limit", COLUMNS, "cells[fields.LIMIT] - 1 - reached", "cells[fields.LIMIT] - reached", "S6", "S2",
        "IllegalEvent"),
    bug("drafts in the middle of a prompt", COLUMNS, "room[reached - cells[fields.COMPUTED] != 1] = 0", "pass", "S1", "S6", "D2",
        "should have been refused"),
    bug("a request's own bound of drafts is forgotten", COLUMNS, "where=own > 0", "where=own < 0", "S6"),
    bug("drafts over the budget", COLUMNS, "np.clip(left - (np.cumsum(wanted) - wanted), 0, wanted)", "wanted", "S1", "S6",
        "IllegalEvent"),
    bug("drafts take pages that are not there", "state.expected", "if drafting.pages_sum <= state.pool.free:", "if True:", "S4", "S6",
        "IllegalEvent"),
    bug("drafts in a plan that preempts", PLAN, "drafts=not event.preempted)", "drafts=True)", "S6", "IllegalEvent"),
    bug("beside many rows a draft costs what it costs beside few", COLUMNS, "many_cost if many else few_cost", "few_cost", "S6"),
    bug("windows move with drafts that may be rejected", "state.store.rows",
        "self.computed if self.drafting is None else self.computed - self.drafting[TENTATIVE]", "self.computed", "M2", "content"),
    bug("windows stay where drafts were kept", FOLD, "if matched.runs is not None and state.config.windows:", "if False:", "M2"),
    bug("a request that ends gives pages back one by one", DRAFTS,
        "drafting[fields.TENTATIVE, ended] = cells[fields.COMPUTED, ended] - before.computed_at_least[ended]", "pass", "P1"),
]  # fmt: skip
COST_BUGS = [
    bug("drafts that do not pay", COLUMNS, "pays = (odds > least)", "pays = (odds >= 0)", "S6"),
    bug("a step drafts at any cost", COLUMNS, "int(drafts.sum()) * row_cost + step_cost", "int(drafts.sum()) * row_cost", "S6"),
    bug("a trial as often where a row costs much", COLUMNS, "TRIAL_INTERVAL << 4 * least // RATE_ONE", "TRIAL_INTERVAL", "S6"),
]  # fmt: skip
