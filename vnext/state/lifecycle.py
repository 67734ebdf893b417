"""The life of a request as a table: status x change -> status. A pair that is missing from the table is illegal.

A finished request is not stored: an id below `next_id` that neither waits nor runs has finished.
"""

from __future__ import annotations

from enum import Enum

from vnext.state.errors import IllegalEvent


class Status(Enum):
    UNKNOWN = "unknown"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Change(Enum):
    ARRIVE = "arrive"
    ADMIT = "be admitted"
    PREEMPT = "be preempted"
    COMMIT = "take a token"
    FINISH = "finish"
    ABORT = "be aborted"


LIFECYCLE: dict[tuple[Status, Change], Status] = {
    (Status.UNKNOWN, Change.ARRIVE): Status.WAITING,
    (Status.WAITING, Change.ADMIT): Status.RUNNING,
    (Status.RUNNING, Change.PREEMPT): Status.WAITING,
    (Status.RUNNING, Change.COMMIT): Status.RUNNING,
    (Status.RUNNING, Change.FINISH): Status.FINISHED,
    (Status.WAITING, Change.ABORT): Status.FINISHED,
    (Status.RUNNING, Change.ABORT): Status.FINISHED,
    (Status.FINISHED, Change.ABORT): Status.FINISHED,  # ignored: a client's abort may race with the last token
}


def after(status: Status, change: Change) -> Status:
    """The next status. Raises IllegalEvent if the table has none."""
    found = LIFECYCLE.get((status, change))
    if found is None:
        raise IllegalEvent(f"a request that is {status.value} cannot {change.value}")
    return found
