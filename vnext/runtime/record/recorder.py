"""Recorder: writes the log, one os.write for each engine iteration, before the iteration's effects.

Owns which parts of an iteration are written, and the secret key of a redacted log; segments.py owns the files. A failing disk
never stops the engine, unless the log is required: the frame is dropped, and the next frame that can be written records how many
are missing. Otherwise only opening may fail, because an operator can still act then.
A steady iteration costs one compiled call for the frame, one for its chain and checksum, and one system call. A file mapped
into memory would save that one, but a full or failing disk would then kill the engine by SIGBUS.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from vnext.base.spelling import reason
from vnext.base.version import __version__
from vnext.log import codec, log_bytes, pseudonyms, snapshot as snapshots
from vnext.log.codec import RankDetail, RankDigest, SegmentHeader
from vnext.log.redaction import Redactor
from vnext.log.snapshot import Snapshot, snapshot
from vnext.runtime.record.retention import forget
from vnext.runtime.record.segments import UNBOUNDED, Bounds, Segments, open_segments
from vnext.state.events import AnyEvent, EngineStarted
from vnext.state.fold_commit import MatchedSamples
from vnext.state.state import State

RecordPrivacy = Literal["full", "shape", "off"]
COMPLAINT_S = 60.0
"""Time between two messages about a failing disk."""


class LogLost(Exception):
    """A frame could not be written, and the engine was started with a required log; one sentence."""


class Recorder:
    """The log of one engine. `frames_lost` counts the frames that a failing disk has dropped; where the log is `required`, the
    first lost frame raises LogLost."""

    def __init__(
        self, files: Segments | None, header: SegmentHeader | None, redactor: Redactor | None, required: bool = False
    ) -> None:
        self._files = files
        self._required = required
        self._width = header.token_width if header else 0
        self._redactor = redactor
        self._next_event = codec.FIRST_FRAME_EVENT
        self._digest: int | None = None  # before the first decision
        self._lost_now = 0
        self._gap = (0, 0)  # the event behind the last frame that reported lost ones, and their number
        self._frame = bytearray()
        self._quiet_until_s = 0.0
        self._unopened = ""
        self.frames_lost = 0

    @classmethod
    def unopened(cls, failure: str) -> Recorder:
        """The log of an engine that goes on although its files could not be made: it loses every frame."""
        recorder = cls(None, None, None)
        recorder._unopened = failure
        return recorder

    @classmethod
    def open(
        cls, log_dir: str | Path, started: EngineStarted, privacy: RecordPrivacy, bounds: Bounds = UNBOUNDED
    ) -> Recorder:
        """Start a log with event 0. Creates `log_dir`, which belongs to this engine. Raises LogUnwritable if it cannot."""
        if privacy == "off":
            return cls(None, None, None)
        header = replace(codec.first_header(started, privacy, __version__), closes=True)
        files, redactor = open_segments(Path(log_dir), header, bounds), None
        forget(Path(log_dir), bounds.starts_max, bounds.starts_bytes_max)
        if privacy == "shape":
            redactor = Redactor(started, secrets.token_bytes(pseudonyms.KEY_SIZE_BYTES), new_name_key(Path(log_dir)))
        return cls(files, header, redactor, bounds.required)

    @property
    def bytes_written(self) -> int:
        return self._files.bytes_written if self._files else 0

    @property
    def bytes_deleted(self) -> int:
        """Written bytes that are gone: older segments deleted to keep the log's bounds."""
        return self._files.bytes_deleted if self._files else 0

    @property
    def failure(self) -> str:
        """The disk's last error."""
        return self._files.failure if self._files else self._unopened

    def append(
        self,
        events: Sequence[AnyEvent],
        befores: Sequence[State],
        state_digest: int,
        rank_digests: Sequence[RankDigest] = (),
        matched: Sequence[MatchedSamples | None] = (),
        details: Sequence[RankDetail] = (),
    ) -> None:
        """Write one iteration: its events, the state before each, and the digest of the state after the last. Raises LogLost.

        `matched` holds the result of `fold` for each event; empty where it was not kept. `details` accompany the
        `rank_digests` that differ from the engine's.
        """
        files = self._files
        if files is None:
            self.frames_lost += bool(self._unopened)
            return
        if files.is_due and befores:
            files.start_next(snapshots.encode(self._snapshot(befores[0]), self._width))
        if rank_digests or self._lost_now or not self._put_steady(events, befores, matched):
            if self._redactor is not None:
                events = list(map(self._redactor.redact, befores, events, matched or repeat(None)))
            reported = events, rank_digests, self._lost_now, self._width, details
            codec.put_frame(self._frame, codec.encode_body(self._next_event, *reported))
        self._next_event += len(events)
        self._digest = state_digest
        self._write(files)

    def _write(self, files: Segments) -> None:
        """Write the frame; count it as lost if the disk fails. Raises LogLost where the log is required."""
        try:
            files.write(self._frame, self._digest or 0, self._next_event, self._required)
        except OSError as error:
            self._lost_now += 1
            self.frames_lost += 1
            if self._required:
                raise self._ended() from error
            if self._lost_now == 1:
                files.mark_gap(is_open=True)
            self._complain()
        else:
            if self._lost_now:
                files.mark_gap(is_open=False)
                files.renew()
                self._gap, self._lost_now = (self._next_event, self._lost_now), 0

    def _ended(self) -> LogLost:
        """Close a required log. It ends before the frame that could not be written, which now has no effect."""
        why = self.failure
        if self._files is not None:
            self._files.close()
            self._files = None
        return LogLost(
            f"the log cannot be written ({why}), and --log-required is on: make room for it, or choose another place with --log-dir"
        )

    def took(self, step: int, seconds: float) -> None:
        """How long rank 0 was busy with a step (timestamp_file.py)."""
        files = self._files
        if files is not None and (timestamps := files.newest.timestamps) is not None:
            timestamps.took(step, seconds)

    def _put_steady(
        self, events: Sequence[AnyEvent], befores: Sequence[State], matched: Sequence[MatchedSamples | None]
    ) -> bool:
        """Make the usual iteration's frame in one go. Returns False, having done nothing, for any other iteration."""
        pair = codec.steady_pair(events)
        if pair is None:
            return False
        frame, first_event, width = self._frame, self._next_event, self._width
        if self._redactor is None:
            committed, planned = pair
            put_steady = log_bytes.impl.put_steady
            return put_steady(frame, first_event, committed.step, committed.tokens, planned.step, width)
        if not matched or matched[0] is None:
            return False
        return self._redactor.put_steady(frame, first_event, befores[0], pair, matched[0], width)

    def _snapshot(self, state: State) -> Snapshot:
        return snapshot(state) if self._redactor is None else self._redactor.snapshot(state)

    def _complain(self) -> None:
        """Report a failing disk, since metrics may go unread; serving goes on."""
        if (now_s := time.monotonic()) >= self._quiet_until_s:
            self._quiet_until_s = now_s + COMPLAINT_S
            logger.warning("the log is not written at present, frames are lost: %s", self.failure)

    def close(self) -> None:
        """Record the log's end and close the file. Written frames stay; nothing can be appended afterwards."""
        if self._files is not None:
            self._write_end(self._files)
            if self.frames_lost:
                logger.warning("the log lacks %d frames: %s", self.frames_lost, self.failure)
            self._files.close()
            self._files = None

    def _write_end(self, files: Segments) -> None:
        """Write a frame without events that also records how many frames were lost. If the disk is still full, it replaces the
        last frame, which is then lost as well: a log that states its losses is worth more."""
        if self._digest is None:
            return  # no decision was made
        try:
            self._write_end_frame(files)
        except OSError:
            self._complain()
            reported_until, reported = self._gap
            hidden = reported if reported_until == files.written_event else 0
            if self._lost_now and files.take_last_back():
                self._lost_now += 1 + hidden
                self.frames_lost += 1
                with suppress(OSError):
                    self._write_end_frame(files)

    def _write_end_frame(self, files: Segments) -> None:
        codec.put_frame(self._frame, codec.encode_body(self._next_event, (), (), self._lost_now, self._width))
        files.write(self._frame, self._digest or 0, self._next_event, patient=True)
        if self._lost_now:
            files.mark_gap(is_open=False)


# ---- the key of hashed names -------------------------------------------------------------------------------------
# Name keys: the key that hashes request names in a redacted log, in a file beside the log's folder.
#
# The operator keeps the file and can find a ticket's request with it; a folder that is passed on goes without it. Without the
# key a hash reveals nothing of the name, even of a short one that a client has chosen. Deleting the file cuts the link for good.


FILE_MODE = 0o600
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

logger = logging.getLogger(__name__)


def new_name_key(log_dir: Path) -> bytes:
    """A new key, stored in its file. If that cannot be written, no key: a log is worth more than its names."""
    key = secrets.token_bytes(pseudonyms.KEY_SIZE_BYTES)
    try:
        folder = log_dir.resolve()
        fd = os.open(folder.with_name(pseudonyms.name_key_file(folder.name)), FLAGS, FILE_MODE)
        with os.fdopen(fd, "w") as file:
            file.write(f"{key.hex()}\n")
    except OSError as error:
        logger.warning("requests have no names in this log, because their key cannot be written: %s", reason(error, with_file=True))
        return b""
    return key
