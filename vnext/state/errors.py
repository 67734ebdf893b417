"""The two errors of the core.

IllegalEvent: the reducer received an event that may not happen now; nothing was changed.
LawBroken: the state itself is wrong. The engine must stop, and its log shows why.
"""

from __future__ import annotations


class IllegalEvent(Exception):
    """An event that is impossible in this state. The state is unchanged."""


class LawBroken(Exception):
    """A law of the state does not hold. `law` is its short name, such as "M1"."""

    def __init__(self, law: str, message: str) -> None:
        super().__init__(f"law {law} broken: {message}")
        self.law = law


def require(condition: bool, message: str) -> None:
    """Raise IllegalEvent unless the condition holds."""
    if not condition:
        raise IllegalEvent(message)
