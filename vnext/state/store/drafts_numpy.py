"""Drafts in numpy: how many a step takes of each row, and what a commit makes of them. The plain form of `drafts.h`.

Functions fill their `out` arguments and only read the others. Cells are int64[FIELD_COUNT, R] and drafting is
int64[DRAFTING_FIELD_COUNT, R], as in rows.py. Owns the expected number of drafts; plans carry only other numbers.
"""

from __future__ import annotations

import numpy as np

from vnext.state.store import fields
from vnext.state.store.fields import FEW_ROWS, RATE, RATE_MEMORY, RATE_ONE, TENTATIVE, TRIAL_INTERVAL


def draft_room(cells: np.ndarray, most: int) -> np.ndarray:
    """The most drafts that a step may take of each row (int64[R]): none unless its last token alone is to be computed."""
    reached = cells[fields.KNOWN] + cells[fields.PLACEHOLDERS]
    room: np.ndarray = cells[fields.LIMIT] - 1 - reached
    room[reached - cells[fields.COMPUTED] != 1] = 0
    own = cells[fields.FLAGS] >> fields.DRAFTS_SHIFT
    np.minimum(room, own - 1, out=room, where=own > 0)
    return np.clip(room, 0, most, out=room)


def paying(cells: np.ndarray, rate: np.ndarray, room: np.ndarray, by: tuple[int, int, int, int]) -> np.ndarray:
    """The number of drafts of each row, up to its `room`, that are likely enough to be kept to pay for themselves (int64[R]).

    `by`: the most drafts of a row, and in thousandths of a step of one row what one more row costs, what drafting costs a step
    whatever the number of drafts, f, and what one more row costs beside more than FEW_ROWS. B rows make B tokens in T, one step
    and the cost of each row, and one row more costs c. The n-th draft is kept with probability
    RATE ** n. It pays if that is more than c * B / T, the tokens that are made in the time of one more row. The step
    drafts if all n drafts together bring more than (n * c + f) * B / T. A row whose drafts do not pay tries some now
    and then, fewer and up to sixteen times more rarely where a row costs much: with f 0 one, else enough to raise its RATE soon.
    """
    count, (most, few_cost, step_cost, many_cost) = cells.shape[1], by
    many = max(count - FEW_ROWS, 0)
    row_cost, cost = many_cost if many else few_cost, (count - many) * few_cost + many * many_cost
    least = min(RATE_ONE * count * row_cost // (1000 + cost), RATE_ONE)
    odds, drafts, gain = rate.copy(), np.zeros(count, dtype=np.int64), 0
    for place in range(most):
        pays = (odds > least) & (place < room)
        drafts += pays
        gain += int(odds[pays].sum())
        odds = odds * rate // RATE_ONE
    if step_cost and gain * (1000 + cost) <= RATE_ONE * count * (int(drafts.sum()) * row_cost + step_cost):
        drafts[:] = 0
    due = (cells[fields.KNOWN] + cells[fields.PLACEHOLDERS]) % (TRIAL_INTERVAL << 4 * least // RATE_ONE) == 0
    trial = 1 + (most - 1) * (RATE_ONE - least) // RATE_ONE if step_cost else 1
    some: np.ndarray = np.minimum(np.maximum(drafts, due * trial), room)
    return some


def drafts(
    cells: np.ndarray, drafting: np.ndarray, tokens: np.ndarray, out: np.ndarray, by: tuple[int, int, int, int], budget: int
) -> int:
    """Fill `out` (int64[R]) with the drafts of the expected plan beside the `tokens` (int64[R]) that rows compute without
    them; returns their sum. `by`: as in `paying`. Rows that compute any take drafts in order while the step's budget lasts.
    """
    wanted = paying(cells, drafting[RATE], draft_room(cells, by[0]), by)
    wanted[tokens == 0] = 0
    left = budget - int(tokens.sum())
    out[:] = np.clip(left - (np.cumsum(wanted) - wanted), 0, wanted)
    return int(out.sum())


def match_runs(
    cells: np.ndarray, step: tuple[np.ndarray, ...], runs: tuple[np.ndarray, ...], out_places: np.ndarray, out_ends: np.ndarray
) -> tuple[int, int] | None:
    """`match_samples` for a step with drafts, in which a row takes the tokens of its run up to the first that ends it.

    `step`: entries, samples, the tokens sampled, the model's end tokens. `runs` int64[n] each: of each request that sampled,
    the number of its tokens, of its drafts and of its planned drafts. Returns the number of tokens taken, which fill the
    lines of `out_places` and `out_ends` from the left, and the number of rows that end. Returns None also if a row has stop
    tokens of its own.
    """
    (entries, samples, sampled, eos), (counts, drafted, planned) = step, runs
    rows, asked = samples.nonzero()[0], len(samples)
    if asked > cells.shape[1] or not len(rows) == len(counts) == len(drafted) == len(planned):
        return None
    if int(counts.sum()) != len(sampled) or (sampled < 0).any():
        return None
    same = (cells[fields.ID, :asked] == entries[0]).all() and (cells[fields.PREEMPTION_COUNT, :asked] == entries[1]).all()
    lawful = (counts >= 1) & (counts <= drafted + 1) & (drafted <= planned)
    if not same or not lawful.all() or (cells[fields.FLAGS, rows] & fields.OWN_STOPS).any():
        return None
    owners = rows.repeat(counts)
    known = cells[fields.KNOWN, owners] + 1 + places_in_runs(counts)
    heeded = (cells[fields.FLAGS, owners] & fields.IGNORE_EOS) == 0
    stops = (sampled[:, None] == eos).any(axis=1) & heeded & (known > cells[fields.MIN_KNOWN, owners])
    at_limit = known >= cells[fields.LIMIT, owners]
    taken = up_to_first(stops | at_limit, counts).nonzero()[0]
    out_places[:, : len(taken)] = owners[taken], taken
    out_ends[:, : len(taken)] = stops[taken], at_limit[taken]
    return len(taken), int(np.count_nonzero((stops | at_limit)[taken]))


def places_in_runs(counts: np.ndarray) -> np.ndarray:
    """The place of each token in its run (int64[sum of counts])."""
    places: np.ndarray = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def up_to_first(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which tokens of the runs precede or are the first for which `ends` (bool[T]) is true (bool[T])."""
    before = np.cumsum(ends) - ends
    firsts = np.cumsum(counts) - counts
    kept: np.ndarray = before == np.repeat(before[firsts], counts)
    return kept


def settle(
    cells: np.ndarray, drafting: np.ndarray, rows: np.ndarray, runs: tuple[np.ndarray, ...], out_back: np.ndarray
) -> tuple[int, int]:
    """Take back the drafts that were not kept, in the matrices themselves. `rows` int64[n], no row twice; `runs` as above.

    Fills `out_back` (int64[R]) with the number of tokens taken back of each row. Returns the drafts computed and those kept.
    """
    counts, drafted, planned = runs
    out_back[:] = 0
    out_back[rows] = planned + 1 - counts
    cells[fields.COMPUTED] -= out_back
    cells[fields.PLACEHOLDERS] -= out_back
    drafting[TENTATIVE, rows] -= planned
    drafting[RATE, rows] = updated_rate(drafting[RATE, rows], drafted, counts - 1)
    return int(drafted.sum()), int((counts - 1).sum())


def updated_rate(rate: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """RATE after a commit (int64[n] each): every draft up to the first one that was not kept is a trial."""
    trials = np.minimum(drafted, accepted + 1)
    for trial in range(int(trials.max(initial=0))):
        target = np.where(trial < accepted, RATE_ONE, 0)
        rate = np.where(trial < trials, rate + (target - rate) // RATE_MEMORY, rate)
    return rate
