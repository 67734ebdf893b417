"""Policies as key functions: who comes first. The smallest key is admitted first, the largest gives way first.

    fcfs       arrival order; a preempted request is older than all that wait, so it returns to the head
    priority   smaller priority value first, then arrival order
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from vnext.state import rows as columns
from vnext.state.config import SchedulerConfig
from vnext.state.rows import Rows
from vnext.state.state import Waiting


def waiting_key(config: SchedulerConfig, waiting: Waiting) -> tuple[int, int]:
    return (waiting.priority if config.policy == "priority" else 0, waiting.id)


def worst_row(config: SchedulerConfig, rows: Rows, among: np.ndarray) -> int:
    """The row that gives way: last in running order (fcfs), or worst priority and then latest arrival.

    `among` is bool[R], the rows still running; at least one is.
    """
    candidates = np.flatnonzero(among)
    if config.policy == "priority":
        order = np.lexsort((rows.id[candidates], rows.cells[columns.PRIORITY, candidates]))
        return int(candidates[order[-1]])
    return int(candidates[-1])


def enqueue(config: SchedulerConfig, queue: tuple[Waiting, ...], entry: Waiting) -> tuple[Waiting, ...]:
    """The queue with one more entry at its place."""
    key = waiting_key(config, entry)
    if not queue or waiting_key(config, queue[-1]) < key:
        return (*queue, entry)
    at = bisect_left(queue, key, key=lambda other: waiting_key(config, other))
    return (*queue[:at], entry, *queue[at:])
