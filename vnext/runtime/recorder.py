"""Recorder: writes the log's segments, one os.write for each engine iteration, before the iteration's effects.

Owns the files of one engine's log directory and the secret key of a log without texts. A disk that fails never stops
the engine: the frame is dropped, the next one that can be written says how many are missing, and a half-written
frame is cut off again. Only opening may fail, because an operator can still do something about it then.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Literal

from vnext.state import log, log_forms, pseudonym
from vnext.state.committing import Settled
from vnext.state.events import AnyEvent, EngineStarted
from vnext.state.log import RankDigest, SegmentHeader
from vnext.state.shape import Shaper
from vnext.state.state import State
from vnext.version import __version__

RecordPrivacy = Literal["full", "shape", "off"]
FILE_MODE = 0o600
FIRST_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
NEXT_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


class LogUnwritable(Exception):
    """The log directory cannot be written; one sentence with the remedy."""


class Recorder:
    """The log of one engine. `frames_lost` counts what a failing disk has dropped, `failure` is its last complaint."""

    def __init__(self, files: _Segments | None, header: SegmentHeader | None, shaper: Shaper | None) -> None:
        self._files = files
        self._width = header.token_width if header else 0
        self._shaper = shaper
        self._next_event = log.FIRST_FRAME_EVENT
        self._lost_now = 0
        self._frame = bytearray()
        self.frames_lost = 0
        self.failure = ""

    @classmethod
    def open(
        cls,
        log_dir: str | Path,
        started: EngineStarted,
        privacy: RecordPrivacy,
        segment_size_bytes: int = log.SEGMENT_SIZE_BYTES,
    ) -> Recorder:
        """Start a log with event 0. `log_dir` is this engine's own and is made. LogUnwritable if it cannot be."""
        if privacy == "off":
            return cls(None, None, None)
        header = log.first_header(started, privacy, __version__)
        shaper = Shaper(started, secrets.token_bytes(pseudonym.KEY_SIZE_BYTES)) if privacy == "shape" else None
        return cls(_open_segments(Path(log_dir), header, segment_size_bytes), header, shaper)

    @property
    def recording(self) -> bool:
        """False if the log is off; then no digest is needed either."""
        return self._files is not None

    @property
    def bytes_written(self) -> int:
        return self._files.bytes_written if self._files else 0

    def append(
        self,
        events: Sequence[AnyEvent],
        befores: Sequence[State],
        state_digest: int,
        rank_digests: Sequence[RankDigest] = (),
        settled: Sequence[Settled | None] = (),
    ) -> None:
        """Write one iteration: its events, the state before each, and the digest of the state after the last.

        `settled` has for each event what `settle(before, event)` gave, or None; empty where nobody has asked.
        """
        files = self._files
        if files is None:
            return
        frame = self._frame
        if rank_digests or self._lost_now or not self._put_steady(events, befores, settled):
            if self._shaper is not None:
                events = list(map(self._shaper.shape, befores, events, settled or repeat(None)))
            log.put_frame(
                frame, log.encode_body(self._next_event, events, rank_digests, self._lost_now, self._width)
            )
        self._next_event += len(events)
        try:
            files.write(frame, state_digest, self._next_event)
        except OSError as error:
            self._lost_now += 1
            self.frames_lost += 1
            self.failure = str(error)
        else:
            self._lost_now = 0

    def _put_steady(
        self, events: Sequence[AnyEvent], befores: Sequence[State], settled: Sequence[Settled | None]
    ) -> bool:
        """The usual iteration's frame, made in one go. False, nothing done, if this is another."""
        if not log.is_steady(events):
            return False
        frame, first_event, width = self._frame, self._next_event, self._width
        if self._shaper is None:
            committed, planned = events
            put_steady = log_forms.kernels.put_steady
            return put_steady(frame, first_event, committed.step, committed.tokens, planned.step, width)
        if not settled or settled[0] is None:
            return False
        return self._shaper.put_steady(frame, first_event, befores[0], events, settled[0], width)

    def close(self) -> None:
        """Let go of the file. What was written stays; nothing can be appended any more."""
        if self._files is not None:
            self._files.close()
            self._files = None


def _open_segments(log_dir: Path, header: SegmentHeader, segment_size_bytes: int) -> _Segments:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        return _Segments(log_dir, header, segment_size_bytes)
    except FileExistsError as error:
        raise LogUnwritable(f"{log_dir} holds a log already: give every engine start a directory of its own") from error
    except OSError as error:
        raise LogUnwritable(
            f"the log directory {log_dir} cannot be written ({error}): choose another one or switch the log off"
        ) from error


class _Segments:
    """The newest segment file and where the log stands in it."""

    def __init__(self, log_dir: Path, header: SegmentHeader, segment_size_bytes: int) -> None:
        self._dir = log_dir
        self._size_max = segment_size_bytes
        self._fd = -1
        self._torn = False
        self._written_event = header.first_event
        self.bytes_written = 0
        self._start(header, FIRST_FLAGS)

    def write(self, frame: bytearray, state_digest: int, next_event: int) -> None:
        """Complete a frame and append it; OSError if it could not be written whole: as if nothing had been written."""
        if self._torn:
            self._cut()
        if self._size + len(frame) > self._size_max and self._has_frames:
            self._roll()
        digest = log.seal_frame(frame, self._chain, state_digest)
        self._append(frame)
        self._chain, self._written_event, self._has_frames = digest, next_event, True

    def close(self) -> None:
        os.close(self._fd)

    def _roll(self) -> None:
        """The next segment follows what was written, not what was lost: the frame after a gap explains the gap."""
        self._start(log.next_header(self._header, self._chain, self._written_event), NEXT_FLAGS)

    def _start(self, header: SegmentHeader, flags: int) -> None:
        data, chain = log.open_segment(header)
        path = self._dir / log.segment_name(header.index)
        fd = os.open(path, flags, FILE_MODE)
        try:
            _write_whole(fd, data)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._header, self._chain = fd, header, chain
        self._size, self._has_frames = len(data), False
        self.bytes_written += len(data)

    def _append(self, record: bytearray) -> None:
        try:
            _write_whole(self._fd, record)
        except OSError:
            self._torn = True
            self._cut()
            raise
        self._size += len(record)
        self.bytes_written += len(record)

    def _cut(self) -> None:
        """Take a half-written frame off again; as long as that fails nothing may follow it."""
        os.ftruncate(self._fd, self._size)
        self._torn = False


def _write_whole(fd: int, data: bytes | bytearray) -> None:
    """One os.write; a short one is an error, because the rest could not follow at once."""
    written = os.write(fd, data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes were written")
