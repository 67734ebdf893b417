"""The bound that memory sets to a decoded step on the CPU: it reads each weight once, and memory gives so many bytes a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

READ_BYTES = 256 * 2**20  # of all threads together: more than caches hold
REPEATS = 7


def memory_bound(environment: Mapping[str, str], ranks: int, step_ms: float) -> dict[str, float]:
    """The weights that a step of all ranks reads, the rate at which as many threads read memory, and the share of that bound that a
    step of `step_ms` reaches; more than 1 where weights stay in the cache. {} on a GPU."""
    if "token_bytes" not in environment:
        return {}
    weights_bytes, gb_per_s = ranks * int(environment["token_bytes"]), read_gb_per_s(ranks * int(environment["threads"]))
    bound_ms = weights_bytes / gb_per_s / 1e6
    return {
        "weights_mb_a_step": round(weights_bytes / 1e6, 1), "memory_read_gb_per_s": round(gb_per_s, 1),
        "share_of_memory_bound": round(bound_ms / step_ms, 3),
    }  # fmt: skip


def read_gb_per_s(threads: int) -> float:
    """10^9 bytes a second that so many threads read together, each its own part; the best of several times."""
    parts = [np.ones(READ_BYTES // 8 // threads, np.int64) for _ in range(threads)]
    spent_s = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            list(pool.map(np.sum, parts))
            spent_s.append(time.perf_counter() - began_s)
    return READ_BYTES / min(spent_s) / 1e9
