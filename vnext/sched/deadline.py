"""Deadlines: the policy `deadline:MS`, which serves the earliest deadline first (Liu and Layland, Scheduling algorithms for
multiprogramming in a hard-real-time environment, J. ACM 20, 1973).

A request's deadline is for its first token: as many milliseconds after its arrival as its `priority` says, MS where that is not
above 0. Where more arrives than the engine can serve, that order alone makes everybody late. So who is late comes after those who
can still be in time, and who has waited OVERDUE times what it allows comes before all, by arrival: while the clock advances, only
those that arrive before then overtake it, so nothing starves.

The state knows the time only from its arrivals: it is now when the latest live request came. Without arrivals nothing becomes late.
"""

from __future__ import annotations

from typing import Protocol

USUAL_MS = 1000
OVERDUE = 8
NS_PER_MS = 1_000_000
NAME = "deadline"
DIGITS_MAX = 9

Key = tuple[int, int]
BEFORE_ALL, IN_TIME, LATE = range(3)
"""The first part of a key."""


class Due(Protocol):
    """What of a request tells its deadline."""

    @property
    def priority(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...


def usual_ms(name: str) -> int | None:
    """The milliseconds in the name of a policy; None if it is another policy."""
    kind, colon, digits = name.partition(":")
    if kind != NAME or not colon:
        return USUAL_MS if kind == NAME else None
    is_number = digits.isascii() and digits.isdecimal() and digits[0] != "0" and len(digits) <= DIGITS_MAX
    return int(digits) if is_number else None


def deadline_key(request: Due, id_: int, has_begun: bool, now_ns: int, usual: int) -> Key:
    """The plain form. Who has its first token keeps its place by its deadline, which has been met."""
    allowed_ns = (request.priority if request.priority > 0 else usual) * NS_PER_MS
    due_ns = request.arrival_ns + allowed_ns
    if now_ns - request.arrival_ns >= OVERDUE * allowed_ns:
        return BEFORE_ALL, id_
    return (IN_TIME if has_begun or due_ns >= now_ns else LATE), due_ns
