"""Faults of constraints: what an answer may go on with is computed from other tokens, forgotten, or another on one rank."""

from __future__ import annotations

from planting import Bug, Edit


def bug(name: str, module: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name=name, edits=(Edit(module, old, new),), found_by=found_by)


FOLD = "sampling.constraint"
BUDGET = "if 0 <= limit <= self._reasoned:"

CONSTRAINT_BUGS = [
    bug("a matcher forgets the answer before a preemption", FOLD, "(*constraint.begun, *tokens)", "constraint.begun", "G1", "G2", "history changed"),
    bug("a grammar takes no token", FOLD, "if self._grammar is not None and not self.error", "if False", "G1", "was answered"),
    bug(
        "a finished grammar goes on",
        FOLD,
        "        self.complete(mask)\n",
        "        self.complete(mask)\n        if not self.error and (mask == self._vocabulary.mask_of(self._vocabulary.end_tokens)).all():\n            mask[:] = self._vocabulary.everything\n",
        "G2",
    ),
    bug("a grammar begins within the reasoning", FOLD, "self.is_reasoning = bool(constraint.reasoning_end) and not constraint.reasoning_begin", "self.is_reasoning = False", "G1"),
    bug("a mark that is begun is forgotten", FOLD, "self._opened += 1", "self._opened += 0", "G1", "was answered"),
    bug("a grammar that a mark has left goes on", FOLD, "is_left = self._opened >= 0 and self._constraint.grammar", "is_left = False", "G1"),
    bug("a mark counts for nothing in the budget", FOLD, "-1, len(begin), True, None", "-1, 0, True, None", "G1"),
    bug("a grammar never begins", FOLD, "if self._tail == end:", "if False:", "G1", "G2", "was answered"),
    bug("reasoning goes on a token too long", FOLD, BUDGET, "if 0 <= limit < self._reasoned:", "G1"),
    bug("reasoning has no budget", FOLD, BUDGET, "if False:", "G1"),
    bug("a budget begins the end anew", FOLD, "mask_of(end[begun : begun + 1])", "mask_of(end[:1])", "G1", "P2", "was answered"),
    bug("reasoning may end the answer", FOLD, "if not self._constraint.grammar:\n            return vocabulary", "if True:\n            return vocabulary", "G1"),
    bug("a list holds after the reasoning only", FOLD, "if self._has_lists and not self.error:", "if self._has_lists and not self.error and not self.is_reasoning:", "G1"),
    bug("other tokens than the listed", FOLD, "        mask &= self._listed\n", "", "G1"),
    bug("a banned sequence of several tokens", FOLD, "if self._ends_with(sequence[:-1]):", "if len(sequence) == 1:", "G1"),
    bug("a banned sequence counts from its second token", FOLD, "[-self._recent_max :]", "[-1:]", "G1"),
    bug("an answer begins with any token", FOLD, "if not self._is_begun:", "if False:", "G1"),
    bug("a time may fall", FOLD, "slice(self.least if is_end", "slice(first if is_end", "G1"),
    bug("times come thrice in a row", FOLD, "if self.last == (True, True):", "if False:", "G1"),
    Bug(name="one rank forgets what is banned", one_rank=(Edit(FOLD, "if self._ends_with(sequence[:-1]):", "if False:"),), found_by=("G3",)),
    Bug(name="one rank reasons longer", one_rank=(Edit(FOLD, BUDGET, "if 0 <= limit < self._reasoned:"),), found_by=("G3",)),
    Bug(
        name="one rank forgets the answer before a preemption",
        one_rank=(Edit(FOLD, "(*constraint.begun, *tokens)", "constraint.begun"),),
        found_by=("G3",),
    ),
]  # fmt: skip

NOTICED, COPIED = "elif grammar.is_error():", "None if self._grammar is None else self._grammar.deep_copy()"
FAILING_BUGS = [
    bug("a failure ends a request that has given way", "state.state", "running.get(id_) == preemptions", "id_ in state.requests", "was answered"),
    bug("a failed constraint ends no request", "state.state", "running.get(id_) == preemptions", "False", "was answered"),
    bug("a grammar without fuel goes on", FOLD, NOTICED, "elif False:", "was answered", "G1", "G2"),
    bug("a failure is forgotten", FOLD, "        if self.error:\n            mask[:]", "        if self.error:\n            self.error = ''\n            mask[:]", "was answered"),
    Bug(name="one rank does not notice a failure", one_rank=(Edit(FOLD, NOTICED, "elif False:"),), found_by=("G3",)),
    Bug(name="one rank has forgotten a failure", one_rank=(Edit(FOLD, "            mask[:] = self._vocabulary.mask_of(self._vocabulary.end_tokens)", "            self.error = ''\n            mask[:] = self._vocabulary.mask_of(self._vocabulary.end_tokens)"),), found_by=("G3",)),
]  # fmt: skip
"""Found where constraints fail."""

FORCING_BUGS = [
    bug("what drafts take is taken of their request", FOLD, COPIED, "self._grammar", "was answered", "G1", "G2", "G4"),
    bug("a draft is checked against the grammar's beginning", FOLD, COPIED, "None if self._grammar is None else self._vocabulary.compiled(self._constraint.grammar).deep_copy()",
        "was answered", "G1", "G2", "G4"),
    bug("what was forced at the beginning is drafted", FOLD, "grammar.deep_copy().compute_ff_tokens()", "self._vocabulary.compiled(self._constraint.grammar).deep_copy().compute_ff_tokens()", "G4"),
    bug("one token more than the grammar forces", FOLD, "        return forced\n", "        return [*forced, 1]\n", "G4"),
    bug("a draft is banned as if the one before it were not there", FOLD, "found = copy(self)", "found = copy(self)\n        found._recent_max = 0", "was answered", "G1", "G4"),
    Bug(name="one rank's drafts are taken of their request", one_rank=(Edit(FOLD, COPIED, "self._grammar"),), found_by=("G3",)),
]  # fmt: skip
"""Found where grammars draft."""
