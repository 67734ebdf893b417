"""A process's state as the system sees it: whether it is halted from outside. Linux only; unknown elsewhere."""

from __future__ import annotations

from pathlib import Path

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
