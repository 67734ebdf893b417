"""Reasons: why a grammar is refused, in our words for llguidance's.

Its messages quote the grammar over several lines, and name its own options and units. Those that describe a client's text, a
pattern or a rule, pass.
"""

from __future__ import annotations

import re

from vnext.state.params import GRAMMAR_ROW_MAX

EMPTY = "no answer satisfies it"
_WORK = "it takes more work than a grammar may, simplify it"
_WORDS: tuple[tuple[str, str], ...] = (  # a pattern in its message, and ours
    (r"NoExtension", EMPTY),
    (
        r"Current row has",
        f"a position of it has more than {GRAMMAR_ROW_MAX} items (some 270 optional properties, or rules that can be read in many "
        "ways), simplify it",
    ),
    (r"oneOf constraints are not supported", "'oneOf' is only supported where no answer fits two of its schemas, use 'anyOf'"),
    (r"Unsatisfiable schema: (\w+ \([^)]*\) is greater than \w+ \([^)]*\))", EMPTY + r": \1"),
    (r"Unsatisfiable schema: (required property '.*') is unsatisfiable", EMPTY + r": nothing fits the \1"),
    (r"Unsatisfiable schema: Regex is empty", EMPTY + ": its patterns, formats, lengths and values contradict each other"),
    (r"Unsatisfiable schema: incompatible types", EMPTY + ": its types contradict each other"),
    (r"[Uu]nsatisfiable", EMPTY),
    (
        r"min/maxProperties only supported",
        "'minProperties' and 'maxProperties' are only supported where all 'properties' are required",
    ),
    (
        r"patternProperty regexes",
        "patterns of 'patternProperties' that fit the same name are not supported, make them exclude each other",
    ),
    (r"circular references", "a reference that leads back to itself and has keywords beside it is not supported"),
    (r"Expected f64 for ('\w+'), got (.*)", r"\1 is \2, and must be a number"),
    (r"Expected positive integer for ('\w+'), got (.*)", r"\1 is \2, and must be a whole number of 0 or more"),
    (r"Expected string for ('\w+'), got (.*)", r"\1 is \2, and must be a text"),
    (r"Unimplemented keys: (.*)", r"the keywords \1 are not supported, leave them out"),
    (r"look-?arounds?\b", "look-around in a pattern is not supported, leave it out"),
    (r"too (large|big|many|complex)|[Ff]uel|TooComplex", _WORK),
)


def in_words(error: str) -> str:
    """Our sentence for a message of llguidance."""
    for pattern, words in _WORDS:
        if found := re.search(pattern, error):
            return found.expand(words)
    cause = re.search(r"error: (.*)", error)
    line = cause[1] if cause else re.sub(r"^(at )?\d+\(\d+\): ", "", error.partition("\n")[0])
    return line or "it is not valid"
