"""What Linux says in /proc: how much memory is left, of which a cache takes a share by default, and whether a process is halted."""

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


HALTED = {
    "T": " is stopped by a signal",
    "t": " is held by a debugger",
    "D": " waits for a disk or a device",
    "Z": " has ended",
}
"""By the letter in /proc/PID/stat."""


def why_halted(pid: int) -> str:
    """What holds a process, as the end of a sentence about it; "" if the process may run or its state is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return HALTED.get(stat.rpartition(")")[2].split()[0], "")  # the name is in brackets and may contain any character
