"""The files of a router's decisions: appended with one write each, and bounded.

Owns the files of one router in a folder: `decisions-NAME-000000.vnextroutes` and so on. A file that is full is followed by the
next, and the oldest are deleted; a router that starts again goes on behind the files that are there. A failing disk never stops a
router: the decision is not recorded, and `lost` counts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from vnext.base.spelling import reason
from vnext.routing.decisions import FORMAT_VERSION, SUFFIX, Decision, Header, encode_decision, encode_header

FILE_BYTES_MAX = 16 << 20
FILES_MAX = 4
FILE_MODE = 0o600


def header_of(code_version: str, policy: str, replicas: Sequence[str]) -> Header:
    """That of a router which begins now."""
    return Header(
        format_version=FORMAT_VERSION, code_version=code_version, policy=policy, replicas=tuple(replicas), started_ns=time.time_ns()
    )


class DecisionFile:
    """Mutable. `name` tells the routers of a folder apart. `lost` counts decisions that were not written, `failure` is its last
    error."""

    def __init__(
        self, folder: Path, header: Header, name: str = "0", file_bytes_max: int = FILE_BYTES_MAX, files_max: int = FILES_MAX
    ) -> None:
        """Begins a file behind those of this name. Raises OSError."""
        self._began_ns = time.monotonic_ns()
        self._folder, self._name = folder, name
        self._header = replace(header, index=_next_index(folder, name))
        self._file_bytes_max, self._files_max = file_bytes_max, files_max
        self.lost, self.failure = 0, ""
        self._fd, self._size, self._is_stale = -1, 0, False
        folder.mkdir(parents=True, exist_ok=True)
        self._begin()

    def clock_us(self) -> int:
        """The time of a decision that is made now, since these files began."""
        return (time.monotonic_ns() - self._began_ns) // 1000

    def write(self, decision: Decision) -> None:
        data = encode_decision(decision)
        try:
            if self._is_stale or self._size + len(data) > self._file_bytes_max:
                self._follow()
            if (written := os.write(self._fd, data)) != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written: there is no more room")
            self._size += len(data)
        except OSError as error:
            self.lost, self.failure = self.lost + 1, reason(error, with_file=True)
            self._cut()

    def renew(self, replicas: Sequence[str]) -> None:
        """Other replicas stand at the places from now on: the next decision begins another file."""
        self._header, self._is_stale = replace(self._header, replicas=tuple(replicas)), True

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self) -> None:
        """Begin the file of the header's index; the one before goes on if that fails."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(file_path(self._folder, self._name, self._header.index), flags, FILE_MODE)
        head = encode_header(self._header)
        if os.write(fd, head) != len(head):
            os.close(fd)
            raise OSError("the header was not written whole")
        self.close()
        self._fd, self._size = fd, len(head)
        file_path(self._folder, self._name, self._header.index - self._files_max).unlink(missing_ok=True)

    def _follow(self) -> None:
        before, self._header = self._header, replace(self._header, index=self._header.index + 1)
        try:
            self._begin()
        except OSError:
            self._header = before
            raise
        self._is_stale = False

    def _cut(self) -> None:
        """Take back a decision that was half written."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self.failure = reason(error, with_file=True)


def file_path(folder: Path, name: str, index: int) -> Path:
    """Where a router's decisions of this index are."""
    return folder / f"decisions-{name}-{index:06d}{SUFFIX}"


def _next_index(folder: Path, name: str) -> int:
    """Behind the last file of this router."""
    numbers = [path.stem.rpartition("-")[2] for path in folder.glob(f"decisions-{name}-*{SUFFIX}")]
    return 1 + max((int(each) for each in numbers if each.isdecimal()), default=-1)


def files_of(path: Path) -> list[Path]:
    """The files of a folder, of one router after the other and oldest first; or the one file."""
    return [path] if path.suffix == SUFFIX else sorted(path.glob(f"*{SUFFIX}"))
