"""Errors among ranks. Imports nothing, so that a rank's process can name them before torch is imported."""

from __future__ import annotations

ON_DEVICE = "OutOfMemoryError"
"""How torch and CuPy say that a GPU's memory lacks."""
LACKING = (
    "can't allocate memory", "cannot allocate memory", "std::bad_alloc", "can't start new thread", "out of memory", "out_of_memory",
    "status_alloc_failed",
)  # fmt: skip
"""What else says that memory lacks. The host's: torch, the system (an import, too), C++, and a thread without room for its stack; a
GPU's: CUDA, its driver (Numba), and its libraries of products."""
CAUSE_MAX = 160


class GaveUp(RuntimeError):
    """Another rank lacks memory for the step in which this one waits for it, so that no rank goes on with it. Says which."""


class RankLost(RuntimeError):
    """Another rank has ended, left the group or does not come: this rank cannot go on."""


def shortage_of(error: Exception, rank: int) -> str:
    """What a rank says of it; "" for any other error."""
    if isinstance(error, GaveUp):
        return str(error)
    words = " ".join(str(error).split())
    is_one = isinstance(error, MemoryError) or type(error).__name__ == ON_DEVICE or any(each in words.lower() for each in LACKING)
    words = words[:CAUSE_MAX]
    return f"rank {rank} lacks memory" + (f" ({words})" if words else "") if is_one else ""
