"""The lifecycle table: every status with every change, by hand, and what the engine does with a request in each."""

from __future__ import annotations

import pytest
from core_drive import Engine

from vnext.state.errors import IllegalEvent
from vnext.state.lifecycle import LIFECYCLE, Change, Status, after
from vnext.state.state import status_of

# Written out by hand, one line per status, in the order of Change: arrive, admit, preempt, commit, finish, abort.
U, W, R, F, NO = Status.UNKNOWN, Status.WAITING, Status.RUNNING, Status.FINISHED, None
TABLE = {
    U: (W, NO, NO, NO, NO, NO),
    W: (NO, R, NO, NO, NO, F),
    R: (NO, NO, W, R, F, F),
    F: (NO, NO, NO, NO, NO, F),
}
CASES = [(status, change, TABLE[status][place]) for status in Status for place, change in enumerate(Change)]


@pytest.mark.parametrize(("status", "change", "expected"), CASES)
def test_every_change_of_every_status(status: Status, change: Change, expected: Status | None) -> None:
    if expected is None:
        with pytest.raises(IllegalEvent, match=f"{status.value} cannot {change.value}"):
            after(status, change)
    else:
        assert after(status, change) is expected


def test_the_table_has_no_other_entries() -> None:
    assert len(LIFECYCLE) == sum(expected is not None for _, _, expected in CASES)


def test_a_finished_request_changes_no_more() -> None:
    assert {change for status, change in LIFECYCLE if status is Status.FINISHED} == {Change.ABORT}


def test_a_request_walks_through_every_status() -> None:
    engine = Engine()
    assert status_of(engine.state, 0) is Status.UNKNOWN
    id_ = engine.arrive([1, 2, 3], max_tokens=2)
    assert status_of(engine.state, id_) is Status.WAITING
    engine.plan()
    assert status_of(engine.state, id_) is Status.RUNNING
    engine.commit(7)
    assert status_of(engine.state, id_) is Status.RUNNING
    engine.step(8)
    assert status_of(engine.state, id_) is Status.FINISHED
    assert status_of(engine.state, -1) is Status.UNKNOWN
