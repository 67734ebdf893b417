"""what-if --auto: seeks settings under which more of a log's requests would have met an objective.

Owns what is tried and in which order: each setting alone, then the best one with each of the others, as long as that helps
(steepest ascent by one coordinate). what_if.py judges what is found, with its bounds. Waiting for a first token has two orders of
its own: deadlines, and in turns weights of the clients that ask for least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vnext.replay.futures.what_if_score import RunScore, worth
from vnext.replay.reading.objective import Objective
from vnext.state.config import SchedulerConfig

Changes = tuple[tuple[str, object], ...]
"""Settings that differ from the log's, by their names in SchedulerConfig, or weights of clients, `weight:` and the beginning of a
number."""
WEIGHT = "weight:"
WEIGHTS, LIGHT = (3, 10), 2
"""The weights to try, of so many clients."""
ROUNDS = 3
FACTORS = (0.5, 2, 4)
LIMITS = (128, 512)
"""Values of long_prefill_token_threshold."""
POLICIES = ("fcfs", "fair", "priority")


def sought(
    scores_of: Callable[[Sequence[Changes]], list[RunScore]], config: SchedulerConfig, can_work: Callable[[Changes], bool],
    objective: Objective, clients: Sequence[str] = (),
) -> list[Changes]:  # fmt: skip
    """The best changes of each round, each with those of the round before. `scores_of` says what they give, `can_work` whether the
    engine can have them; `clients` are numbers in hexadecimal, first those that asked for least."""
    found, best = list[Changes](), scores_of([()])[0]
    before: Changes = ()
    for _ in range(ROUNDS):
        tried = [changes for changes in _next(config, before, objective, clients) if can_work(changes)]
        served = [pair for pair in zip(scores_of(tried), tried) if not pair[0].refused]
        score, changes = max(served, key=lambda pair: worth(pair[0]), default=(best, before))
        if worth(score) <= worth(best):
            break
        best, before = score, changes
        found.append(changes)
    return found


def _next(config: SchedulerConfig, before: Changes, objective: Objective, clients: Sequence[str]) -> Iterator[Changes]:
    """These changes with one more setting."""
    taken = dict(before)
    light = clients[:LIGHT] if taken.get("policy", config.policy) == "fair" and len(clients) > 1 and objective.ttft_us else ()
    weights = ((WEIGHT + each, weight) for each in light for weight in WEIGHTS)
    for name, value in (*proposals(config, objective), *weights):
        if name not in taken:
            yield (*before, (name, value))


def proposals(config: SchedulerConfig, objective: Objective) -> Iterator[tuple[str, object]]:
    """Each setting that takes no other machine, with values unlike the one that it has."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        yield from ((name, max(int(factor * getattr(config, name)), 1)) for factor in FACTORS)
    deadlines = (f"deadline:{round(objective.ttft_us / 1e3)}",) if objective.ttft_us >= 1e3 else ()
    yield from (("policy", each) for each in (*POLICIES, *deadlines) if each != config.policy)
    yield from (("long_prefill_token_threshold", each) for each in (0, *LIMITS) if each != config.long_prefill_token_threshold)
