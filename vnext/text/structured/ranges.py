"""Ranges: regular expressions of the numbers between two bounds, exact however many digits the bounds have.

For bounds that float64 does not hold, which llguidance would round. Numbers are written as JSON without exponents.
"""

from __future__ import annotations

from math import ceil, floor, inf
from typing import NamedTuple

from vnext.text.structured.json_schema import LOWER, UPPER, Members

_FRACTION, _NO_FRACTION, _SOME_FRACTION = r"(\.[0-9]+)?", r"(\.0+)?", r"\.[0-9]*[1-9][0-9]*"


class Bound(NamedTuple):
    """Where a range ends; `is_open`: the bound itself lies outside. Without one, `at` is infinite."""

    at: float
    is_open: bool


def pattern_of(schema: Members, is_whole: bool) -> str:
    """The numbers that a schema's bounds admit, only whole ones if `is_whole`; "" where there are none. Raises ValueError where one
    bound of other numbers is not whole."""
    lower, upper = (_bound(schema, names, sign) for names, sign in ((LOWER, 1), (UPPER, -1)))
    if is_whole:
        low, high = ceil_of(lower), floor_of(upper)
        lower, upper = Bound(low, False), Bound(high, False)
    elif any(abs(each.at) != inf and each.at != int(each.at) for each in (lower, upper)):
        raise ValueError("a bound beyond 2**53 is not kept beside one with a fraction: make both whole numbers")
    parts = []
    if lower.at < 0:
        below = _magnitudes(_inner(Bound(-upper.at, upper.is_open)), Bound(-lower.at, lower.is_open), is_whole)
        parts += [f"-({below})"] if below else []
    if upper.at >= 0:
        parts += [_magnitudes(_inner(lower), upper, is_whole)]
    return "|".join(filter(None, parts))


def ceil_of(bound: Bound) -> float:
    return bound.at if bound.at == -inf else floor(bound.at) + 1 if bound.is_open else ceil(bound.at)


def floor_of(bound: Bound) -> float:
    return bound.at if bound.at == inf else ceil(bound.at) - 1 if bound.is_open else floor(bound.at)


def _bound(schema: Members, names: tuple[str, str], sign: int) -> Bound:
    """The nearer of an inclusive and an exclusive bound; `sign`: 1 for lower ones."""
    given = {name: schema[name] for name in names if name in schema}
    found = [Bound(int(at) if at == int(at) else at, name == names[1]) for name, at in given.items()]
    return max(found, key=lambda each: (sign * each.at, each.is_open), default=Bound(-sign * inf, True))


def _inner(lower: Bound) -> Bound:
    """The lower bound of magnitudes."""
    return lower if lower.at >= 0 else Bound(0, False)


def _magnitudes(lower: Bound, upper: Bound, is_whole: bool) -> str:
    """Numbers without a sign between bounds of at least 0."""
    if is_whole:
        return _between(int(lower.at), upper.at)
    low = int(lower.at)
    parts = []
    if lower.is_open and low < upper.at:
        parts.append(f"{low}{_SOME_FRACTION}")
        low += 1
    if within := _between(low, upper.at - 1 if upper.at != inf else inf):
        parts.append(f"({within}){_FRACTION}")
    if upper.at != inf and not upper.is_open and upper.at >= low:
        parts.append(f"{upper.at}{_NO_FRACTION}")
    return "|".join(parts)


def _between(low: int, high: float) -> str:
    """Whole numbers from `low`, at least 0, to `high`, "" where there are none."""
    if low > high:
        return ""
    first = len(str(low))
    if high == inf:
        return f"{_digits(str(low), '9' * first)}|[1-9][0-9]{{{first},}}"
    last, parts = len(str(high)), []
    for count in range(first, last + 1):
        begin = str(low) if count == first else "1" + "0" * (count - 1)
        parts.append(_digits(begin, str(high) if count == last else "9" * count))
    return "|".join(parts)


def _digits(low: str, high: str) -> str:
    """Texts of as many digits as both, from one to the other."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f"{low[0]}({_digits(low[1:], high[1:])})"
    rest = len(low) - 1
    parts, first, last = [], int(low[0]), int(high[0])
    if set(low[1:]) - {"0"}:
        parts.append(f"{first}({_digits(low[1:], '9' * rest)})")
        first += 1
    if set(high[1:]) - {"9"}:
        parts.append(f"{last}({_digits('0' * rest, high[1:])})")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)
