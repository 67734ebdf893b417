"""Recorder: writes the log, one os.write for each engine iteration, before the iteration's effects.

Owns what of an iteration is written and the secret key of a log without texts; files are segments.py's. A disk that
fails never stops the engine: the frame is dropped, and the next one that can be written says how many are missing. Only
opening may fail, because an operator can still do something about it then.
A steady iteration costs one compiled call for the frame, one for its chain and checksum, and one system call. A file
mapped into memory would save that one, and let a full or failing disk kill the engine by SIGBUS.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Literal

from vnext.runtime.segments import UNBOUNDED, Bounds, Segments, open_segments
from vnext.state import keyframe as keyframes, log, log_forms, pseudonym
from vnext.state.committing import Settled
from vnext.state.events import AnyEvent, EngineStarted
from vnext.state.keyframe import Keyframe, keyframe
from vnext.state.log import RankDetail, RankDigest, SegmentHeader
from vnext.state.shape import Shaper
from vnext.state.state import State
from vnext.version import __version__

RecordPrivacy = Literal["full", "shape", "off"]
COMPLAINT_S = 60.0
"""Between two words about a failing disk."""

logger = logging.getLogger(__name__)


class Recorder:
    """The log of one engine. `frames_lost` counts what a failing disk has dropped."""

    def __init__(self, files: Segments | None, header: SegmentHeader | None, shaper: Shaper | None) -> None:
        self._files = files
        self._width = header.token_width if header else 0
        self._shaper = shaper
        self._next_event = log.FIRST_FRAME_EVENT
        self._lost_now = 0
        self._frame = bytearray()
        self._quiet_until_s = 0.0
        self.frames_lost = 0

    @classmethod
    def open(
        cls, log_dir: str | Path, started: EngineStarted, privacy: RecordPrivacy, bounds: Bounds = UNBOUNDED
    ) -> Recorder:
        """Start a log with event 0. `log_dir` is this engine's own and is made. LogUnwritable if it cannot be."""
        if privacy == "off":
            return cls(None, None, None)
        header = log.first_header(started, privacy, __version__)
        shaper = Shaper(started, secrets.token_bytes(pseudonym.KEY_SIZE_BYTES)) if privacy == "shape" else None
        return cls(open_segments(Path(log_dir), header, bounds), header, shaper)

    @property
    def recording(self) -> bool:
        """False if the log is off; then no digest is needed either."""
        return self._files is not None

    @property
    def bytes_written(self) -> int:
        return self._files.bytes_written if self._files else 0

    @property
    def bytes_deleted(self) -> int:
        """Of those written: what older segments held that the log's bounds have cost."""
        return self._files.bytes_deleted if self._files else 0

    @property
    def failure(self) -> str:
        """The disk's last complaint."""
        return self._files.failure if self._files else ""

    def append(
        self,
        events: Sequence[AnyEvent],
        befores: Sequence[State],
        state_digest: int,
        rank_digests: Sequence[RankDigest] = (),
        settled: Sequence[Settled | None] = (),
        details: Sequence[RankDetail] = (),
    ) -> None:
        """Write one iteration: its events, the state before each, and the digest of the state after the last.

        `settled` has for each event what `settle(before, event)` gave, or None; empty where nobody has asked. `details`
        come with the `rank_digests` that are not the engine's.
        """
        files = self._files
        if files is None:
            return
        if files.is_due and befores:
            files.start_next(keyframes.encode(self._keyframe(befores[0]), self._width))
        frame = self._frame
        if len(events) != 2 or rank_digests or self._lost_now or not self._put_steady(events, befores, settled):
            if self._shaper is not None:
                events = list(map(self._shaper.shape, befores, events, settled or repeat(None)))
            told = events, rank_digests, self._lost_now, self._width, details
            log.put_frame(frame, log.encode_body(self._next_event, *told))
        self._next_event += len(events)
        try:
            files.write(frame, state_digest, self._next_event)
        except OSError:
            self._lost_now += 1
            self.frames_lost += 1
            self._complain()
        else:
            if self._lost_now:
                files.renew()
                self._lost_now = 0

    def took(self, step: int, seconds: float) -> None:
        """How long rank 0 was busy with a step (stamps.py)."""
        files = self._files
        if files is not None and files.stamps is not None:
            files.stamps.took(step, seconds)

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

    def _keyframe(self, state: State) -> Keyframe:
        return keyframe(state) if self._shaper is None else self._shaper.keyframe(state)

    def _complain(self) -> None:
        """Nobody looks into metrics for this; serving goes on."""
        if (now_s := time.monotonic()) >= self._quiet_until_s:
            self._quiet_until_s = now_s + COMPLAINT_S
            logger.warning("the log is not written at present, frames are lost: %s", self.failure)

    def close(self) -> None:
        """Let go of the file. What was written stays; nothing can be appended any more."""
        if self._files is not None:
            if self.frames_lost:
                logger.warning("the log lacks %d frames: %s", self.frames_lost, self.failure)
            self._files.close()
            self._files = None
