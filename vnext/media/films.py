"""Films: bytes of a video's file -> those of its frames that a model reads.

Owns which formats there are, and how many bytes, pixels, frames and seconds one may take. PyAV, the extra `video`, is imported when
the first one comes, and opens nothing beside these bytes: playlists and files that name others are none of the formats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from vnext.media.pictures import BYTES_MAX, MediaError

FORMATS = ("MP4", "WebM", "Matroska", "AVI", "GIF")
OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif", "protocol_whitelist": "none"}
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "gif")
FRAME_PIXELS_MAX = 9_437_184
"""Of a frame: 4,096 x 2,304."""
FRAMES_MAX = 36_000
"""Of a video: twenty minutes at thirty a second."""
TAKEN_MAX = 768
"""Of the frames that a model reads."""
PIXELS_MAX = 160_000_000
"""Of all these together, as a model reads them."""
SECONDS_MAX = 30.0
"""That it may take to decode them."""
STREAMS_MAX = 8
USUAL_RATE = 24.0
RATES = 1 / 86_400, 1_000.0
"""How many frames a second arrays may have: from one a day."""


class Clip(NamedTuple):
    """How many frames a video has, how many of them a second, and their size."""

    frames: int
    rate: float
    height: int
    width: int


class Choice(NamedTuple):
    """The numbers of the frames to take, in order, and what is made of each, uint8 [H, W, 3]."""

    numbers: Sequence[int]
    height: int
    width: int
    fit: Callable[[np.ndarray], np.ndarray]


class Film(NamedTuple):
    """What has been taken: frames uint8 [N, height, width, 3], and the numbers that they have in the clip."""

    clip: Clip
    numbers: Sequence[int]
    frames: np.ndarray


Chooser = Callable[[Clip], Choice]


def film_of(video: object, name: str, choose: Chooser) -> Film:
    """Of the bytes of a file, or of (frames uint8 [N, H, W, 3], their number a second). Raises MediaError."""
    if isinstance(video, bytes):
        return _decoded(video, name, choose)
    frames, rate = video if isinstance(video, tuple) and len(video) == 2 else (video, USUAL_RATE)
    is_array = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.shape[3:] == (3,) and frames.size
    if not isinstance(frames, np.ndarray) or not is_array or not isinstance(rate, int | float) or not RATES[0] <= rate <= RATES[1]:
        remedy = "give an address, a file's bytes, or (uint8 [frames, height, width, 3], frames a second)"
        raise MediaError(f"{name} is no video: {remedy}")
    count, height, width, _ = frames.shape
    return _taken(Clip(count, float(rate), height, width), name, choose, enumerate(frames))


def _taken(clip: Clip, name: str, choose: Chooser, frames: Iterable[tuple[int, np.ndarray]]) -> Film:
    """Where there are fewer frames than the file says, the last one stands for those that lack."""
    numbers, height, width, fit = choose(clip)
    if len(numbers) * height * width > PIXELS_MAX:
        size = f"{len(numbers)} frames of {width} x {height}"
        raise MediaError(f"{name} has {size} to read: they may have {PIXELS_MAX} pixels together")
    found, wanted, taken = np.empty((len(numbers), height, width, 3), np.uint8), {*numbers}, 0
    for number, frame in frames:
        if number in wanted:
            found[taken] = fit(frame)
            taken += 1
            if taken == len(numbers):
                break
    if not taken:
        raise MediaError(f"{name} has no frame that can be read")
    found[taken:] = found[taken - 1]
    return Film(clip, numbers, found)


def _decoded(data: bytes, name: str, choose: Chooser) -> Film:
    if len(data) > BYTES_MAX:
        raise MediaError(f"{name} has {len(data)} bytes: a video may have {BYTES_MAX}")
    try:
        import av
    except ImportError as error:
        raise MediaError(f"{name} is a video, and PyAV is missing here: pip install 'vnext[video]'") from error
    end = time.monotonic() + SECONDS_MAX
    opened: dict[str, Any] = {
        "options": OPTIONS, "stream_options": [{"max_pixels": str(FRAME_PIXELS_MAX)}] * STREAMS_MAX, "timeout": SECONDS_MAX,
        "metadata_errors": "replace",
    }  # fmt: skip
    try:
        with av.open(BytesIO(data), **opened) as container:
            clip = _clip(container, name, end)
        with av.open(BytesIO(data), **opened) as container:
            frames = _frames(container, name, end)
            first = [*islice(frames, 1)]
            for _, frame in first:  # which is turned
                clip = clip._replace(height=frame.shape[0], width=frame.shape[1])
            return _taken(clip, name, choose, chain(first, frames))
    except MediaError:
        raise
    except Exception as error:  # decoders raise what they like
        raise MediaError(f"{name} is no video that can be read: it must be {', '.join(FORMATS)}") from error


def _clip(container: Any, name: str, end: float) -> Clip:
    """Frames are counted by their packets: what the head of a file says may be nothing, or anything."""
    stream = container.streams.video[0]
    if stream.codec_context.name not in CODECS or stream.index >= STREAMS_MAX:
        raise MediaError(f"{name} is written in {stream.codec_context.name}, which is not read: it must be {', '.join(CODECS)}")
    if stream.width * stream.height > FRAME_PIXELS_MAX:
        raise MediaError(f"{name} has frames of {stream.width} x {stream.height} pixels: one may have {FRAME_PIXELS_MAX}")
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > FRAMES_MAX:
            raise MediaError(f"{name} has more than {FRAMES_MAX} frames, which a video may have")
        _in_time(name, end)
    return Clip(max(count, 1), float(stream.average_rate or USUAL_RATE), stream.height, stream.width)


def _frames(container: Any, name: str, end: float) -> Iterator[tuple[int, np.ndarray]]:
    """Frames with their numbers, by quarters turned as the file says: as a player shows them, and as an image's EXIF does."""
    stream = container.streams.video[0]
    stream.codec_context.options, stream.codec_context.thread_count = {"max_pixels": str(FRAME_PIXELS_MAX)}, 1
    for number, frame in enumerate(container.decode(stream)):
        _in_time(name, end)
        yield number, np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def _in_time(name: str, end: float) -> None:
    if time.monotonic() > end:
        raise MediaError(f"{name} takes more than {SECONDS_MAX:.0f} s to decode")
