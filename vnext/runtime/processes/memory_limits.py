"""How much memory this machine has left, as Linux estimates it, and how much of that a cache takes by default."""

from __future__ import annotations

from pathlib import Path

CACHE_SHARE = 0.25
CACHE_BYTES_MAX = 4 * 2**30
UNKNOWN_BYTES = 4 * 2**30
"""Where the machine does not say."""


def memory_fields() -> dict[str, int]:
    """Linux's /proc/meminfo, in bytes."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    words = (line.replace(":", "").split() for line in lines)
    return {word[0]: int(word[1]) * 1024 for word in words if word[-1] == "kB"}


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping."""
    return memory_fields().get("MemAvailable", UNKNOWN_BYTES)


def usual_cache_bytes(available_bytes: int) -> int:
    """A cache on the CPU for which no option names a size."""
    return int(min(CACHE_BYTES_MAX, available_bytes * CACHE_SHARE))
