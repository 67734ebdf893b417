"""Allowed tokens and banned sequences in batches: kept by every answer, with the same tokens whatever the schedule."""

from __future__ import annotations

from msgspec.structs import replace
from rank_drive import runner_of, some_arrivals
from test_constraints import SCHEDULES, tokens_of

from vnext.state.events import RequestArrived
from vnext.state.params import Constraint, Sampling

FEW = tuple(range(200, 240))
BANNED = ((210,), (211, 212), (213, 214, 215))


def arrivals() -> list[RequestArrived]:
    """A third has a list of allowed tokens, a third banned sequences, a third neither."""
    made = some_arrivals(12, seed=6)
    lists = (Constraint(allowed=FEW, banned=BANNED), Constraint(banned=BANNED), None)
    return [
        replace(each, prompt=each.prompt[: 4 * 30], sampling=Sampling(
            seed=at, max_tokens=25, temperature=1.5 if at % 2 else 0.0, ignore_eos=True, constraint=lists[at % 3]
        ))
        for at, each in enumerate(made)
    ]  # fmt: skip


def test_answers_keep_their_lists_and_do_not_depend_on_the_schedule() -> None:
    runner, given = runner_of(), arrivals()
    found = tokens_of(runner, given)
    for at, tokens in enumerate(found[key] for key in sorted(found)):
        assert len(tokens) == 25
        if at % 3 == 0:
            assert set(tokens) <= set(FEW) - {210}
        if at % 3 < 2:
            pairs = {tuple(tokens[start : start + len(each)]) for each in BANNED for start in range(25)}
            assert not pairs & set(BANNED)
    for changes in SCHEDULES[1:]:
        assert tokens_of(runner, given, **changes) == found, changes
