"""Faults of speculative decoding: what a rejected draft may leave behind, and drafts where there must be none."""

from __future__ import annotations

from planted_state_bugs import bug

DRAFTS, FOLD, PLAN, POLICY = "state.fold_drafts", "state.fold_commit", "state.fold_plan", "state.drafting"
DRAFT_BUGS = [
    bug("a rejected draft stays computed", DRAFTS, "cells[fields.COMPUTED, runs.rows] -= rejected",
        "cells[fields.COMPUTED, runs.rows] -= 0", "S2", "D1", "S6"),
    bug("a rejected draft is owed for ever", DRAFTS, "cells[fields.PLACEHOLDERS, runs.rows] -= rejected",
        "cells[fields.PLACEHOLDERS, runs.rows] -= 0", "A2"),
    bug("a step in flight starts behind a rejected draft", DRAFTS, "entries[2] -= by", "entries[2] -= 0", "D1"),
    bug("a step in flight forgets which row was set back", DRAFTS, "if by}", "if by > 1}", "D1"),
    bug("drafts stay in flight", DRAFTS, "drafting[fields.TENTATIVE, runs.rows] -= runs.planned",
        "drafting[fields.TENTATIVE, runs.rows] -= 0", "D1"),
    bug("the rate of kept drafts never changes", POLICY, "    return rate\n", "    return rate * 0 + 768\n", "D5"),
    bug("a draft behind the first wrong one is a trial", POLICY, "np.minimum(drafted, accepted + 1)", "drafted", "D5"),
    bug("tokens behind an end are told", DRAFTS, "kept: np.ndarray = before == np.repeat(before[firsts], counts)",
        "kept: np.ndarray = before >= 0", "Y3", "answered", "IllegalEvent", "S2", "M2", "KeyError"),
    bug("a token before an end is lost", DRAFTS, "before = np.cumsum(ends) - ends", "before = np.cumsum(ends)", "answered",
        "Y3", "L1", "S2", "A2"),
    bug("a commit of too many tokens", DRAFTS, "(counts <= drafted + 1)", "(counts <= drafted + 2)",
        "should have been refused"),
    bug("a commit of more drafts than planned", DRAFTS, "bool((drafted <= planned).all())", "True",
        "should have been refused"),
    bug("every token of a run counts as an accepted draft", DRAFTS, "int((runs.counts - 1).sum())", "int(runs.counts.sum())",
        "Y3"),
    bug("drafts behind the limit", POLICY, "room = rows.limit - 1 - rows.known", "room = rows.limit - rows.known", "S6", "S2",
        "IllegalEvent"),
    bug("drafts in the middle of a prompt", POLICY, "np.where(wants(rows) == 1, np.clip(room, 0, most), 0)",
        "np.clip(room, 0, most)", "S1", "S6", "D2",
        "should have been refused"),
    bug("drafts over the budget", POLICY, "np.clip(left - (ends - drafts), 0, drafts)", "drafts", "S1", "S6", "IllegalEvent"),
    bug("drafts take pages that are not there", "state.expected", "if drafting.pages_sum <= free_pages:", "if True:", "S4", "S6",
        "IllegalEvent"),
    bug("drafts in a plan that preempts", PLAN, "drafts=not event.preempted)", "drafts=True)", "S6", "IllegalEvent"),
    bug("drafts that do not pay", POLICY, "drafts += odds > least", "drafts += odds >= 0", "S6"),
    bug("windows move with drafts that may be rejected", "state.store.rows",
        "self.computed if self.drafting is None else self.computed - self.drafting[TENTATIVE]", "self.computed", "M2", "content"),
    bug("windows stay where drafts were kept", FOLD, "if matched.runs is not None and state.config.windows:", "if False:", "M2"),
    bug("a request that ends gives pages back one by one", DRAFTS,
        "drafting[fields.TENTATIVE, ended] = cells[fields.COMPUTED, ended] - state.rows.computed_at_least[ended]", "pass", "P1"),
]  # fmt: skip
