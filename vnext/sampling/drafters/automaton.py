"""The suffix automaton: the compiled one where it was built, else the plain one. Both give equal drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vnext.base.compiled import load
from vnext.sampling.drafters import automaton_plain

_automaton = load("vnext.sampling.drafters._automaton", {"COUNTED_MAX": automaton_plain.COUNTED_MAX})
SuffixAutomaton = automaton_plain.SuffixAutomaton
if not TYPE_CHECKING and _automaton is not None:  # the compiled one has the plain one's signatures
    SuffixAutomaton = _automaton.SuffixAutomaton
