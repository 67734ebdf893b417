"""what-if --auto: seeks settings under which more of a log's requests would have met an objective.

Owns what is tried and in which order: each setting alone, then the best one with each of the others, as long as that helps
(steepest ascent by one coordinate). what_if.py judges what is found, with its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vnext.replay.futures.what_if_score import RunScore, worth
from vnext.state.config import SchedulerConfig

Changes = tuple[tuple[str, object], ...]
"""Settings that differ from the log's, by their names in SchedulerConfig."""
ROUNDS = 3
FACTORS = (0.5, 2, 4)
LIMITS = (128, 512)
"""Values of long_prefill_token_threshold."""
POLICIES = ("fcfs", "fair", "priority")


def sought(
    scores_of: Callable[[Sequence[Changes]], list[RunScore]], config: SchedulerConfig, can_work: Callable[[Changes], bool]
) -> list[Changes]:
    """The best changes of each round, each with those of the round before. `scores_of` says what they give, `can_work` whether the
    engine can have them."""
    found, best = list[Changes](), scores_of([()])[0]
    before: Changes = ()
    for _ in range(ROUNDS):
        tried = [changes for changes in _next(config, before) if can_work(changes)]
        served = [pair for pair in zip(scores_of(tried), tried) if not pair[0].refused]
        score, changes = max(served, key=lambda pair: worth(pair[0]), default=(best, before))
        if worth(score) <= worth(best):
            break
        best, before = score, changes
        found.append(changes)
    return found


def _next(config: SchedulerConfig, before: Changes) -> Iterator[Changes]:
    """These changes with one more setting."""
    taken = {name for name, _ in before}
    for name, value in proposals(config):
        if name not in taken:
            yield (*before, (name, value))


def proposals(config: SchedulerConfig) -> Iterator[tuple[str, object]]:
    """Each setting that takes no other machine, with values unlike the one that it has."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        yield from ((name, max(int(factor * getattr(config, name)), 1)) for factor in FACTORS)
    yield from (("policy", each) for each in POLICIES if each != config.policy)
    yield from (("long_prefill_token_threshold", each) for each in (0, *LIMITS) if each != config.long_prefill_token_threshold)
