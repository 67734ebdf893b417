"""Log lines: how the processes of an engine and its server write for their operator, as text or as one JSON object a line.

Owns the object's fields, which are those of vLLM's and uvicorn's JSON loggers where they have them: `timestamp` (RFC 3339, UTC),
`level`, `logger`, `process`, `pid`, `message`, `exception`, and what a record brings as `extra`, such as `request_id`. A
process that begins with JSON also writes its uncaught exceptions and warnings so, and wraps the lines of its children that are
no JSON (subprocesses.py).
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec

from vnext.runtime.protocol.settings import LogFormat

TIMEOUT_MS = 1000
"""So long may a reader pause before words are left out."""


class PatientStream:
    """A stream of text, as of a logging handler, to a descriptor: one write at a time, so that whole lines stay whole. What cannot
    be written in time is left out, and after that nothing waits until there is room again. Mutable; for all threads."""

    def __init__(self, descriptor: int, timeout_ms: int = TIMEOUT_MS) -> None:
        self._descriptor, self._timeout_ms = descriptor, timeout_ms
        self._lock, self._is_stuck = threading.Lock(), False

    def write(self, text: str) -> None:
        self.pass_on(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """All is written at once."""

    def pass_on(self, data: bytes) -> None:
        """Write bytes. Where the descriptor is closed, they are left out too."""
        rest = memoryview(data)
        with self._lock, suppress(OSError):
            while rest and self._has_room():
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]

    def _has_room(self) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        self._is_stuck = not poller.poll(0 if self._is_stuck else self._timeout_ms)
        return not self._is_stuck


STDOUT, STDERR = PatientStream(1), PatientStream(2)
"""This process's own."""


LINE_BYTES_MAX = 64 * 2**10
"""A longer line of a child without an end is cut into several."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_process = ""
"""The name of this process while it writes JSON, "" while it writes text."""


class JsonFormatter(logging.Formatter):
    """A record as one JSON object, with what the caller added; what a library keeps there as `_name` is left out."""

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD and not name.startswith("_")}
        if record.exc_info:
            extra["exception"] = self.formatException(record.exc_info)
        return _object(record.created, record.levelname, record.name, _process, os.getpid(), record.getMessage(), extra)


def begin(process: str, log_format: LogFormat, level: str, text_format: str) -> None:
    """Write this process's log lines to stderr from now on, in one of the formats. `level` is the lowest that is written."""
    global _process
    handler = logging.StreamHandler(STDERR)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(text_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        _process = process
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda caught: _log_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)


def line(message: str, level: str = "INFO", log_format: LogFormat | None = None) -> str:
    """What this program says to its operator, without an end: JSON where the process writes it or `log_format` asks for it,
    and there one object for each line of the message."""
    if log_format != "json" and not _process:
        return message
    now_s, process = datetime.now(UTC).timestamp(), _process or "launcher"
    parts = (part.removeprefix("vnext: ").removeprefix("vnext serve: ") for part in message.splitlines())
    return "\n".join(_object(now_s, level, "vnext", process, os.getpid(), part, {}) for part in parts)


class ChildLines:
    """The stderr of a child, on its way to ours: JSON lines pass; others are wrapped where this process writes JSON. Mutable."""

    def __init__(self, process: str, pid: int) -> None:
        self._process, self._pid, self._rest = process, pid, b""

    def push(self, data: bytes) -> bytes:
        """Take in a part, b"" at the end; returns what to write."""
        if not _process:
            return data
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > LINE_BYTES_MAX):
            whole, self._rest = [*whole, self._rest], b""
        return b"".join(self._wrapped(each) + b"\n" for each in whole if each.strip())

    def _wrapped(self, text: bytes) -> bytes:
        if text.startswith(b"{"):
            try:
                msgspec.json.decode(text, type=dict[str, Any])
                return text
            except (ValueError, RecursionError):
                pass
        message, now_s = text.decode(errors="replace").rstrip("\r"), datetime.now(UTC).timestamp()
        return _object(now_s, "WARNING", "stderr", self._process, self._pid, message, {}).encode()


def _object(created_s: float, level: str, logger: str, process: str, pid: int, message: str, extra: dict[str, Any]) -> str:
    stamp = datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    known = {"timestamp": stamp, "level": level, "logger": logger, "process": process, "pid": pid, "message": message}
    return json.dumps(known | {name: value for name, value in extra.items() if name not in known}, default=str)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None and not isinstance(error, SystemExit):
        logging.critical("uncaught: %s", kind.__name__, exc_info=(kind, error, trace))
