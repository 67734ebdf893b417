"""Custom: what a request says of how its own images and videos are read, within what the model's files say.

They change the pixels that a model reads, whose digest names the input: one image in two sizes is two inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vnext.media.pictures import MediaError

RATE_MAX, NUMBER_MAX = 1000.0, 2**53
HONOURED = {"min_pixels": int, "max_pixels": int, "num_frames": int, "fps": float}
OF_VIDEOS = ("media_io_kwargs.video.num_frames", "media_io_kwargs.video.fps")


class Custom(NamedTuple):
    """Pixels of an image, from `min_pixels` to `max_pixels`, and of a video `num_frames`, or `fps` of each of its seconds; 0 for
    what the model's files say."""

    min_pixels: int = 0
    max_pixels: int = 0
    num_frames: int = 0
    fps: float = 0.0


NOT_CUSTOM = Custom()


def custom_of(processor: Mapping[str, object], reading: Mapping[str, object]) -> Custom:
    """What mm_processor_kwargs and media_io_kwargs say, in vLLM's names. Raises MediaError for other names."""
    given = {f"mm_processor_kwargs.{name}": value for name, value in processor.items()}
    for kind, own in reading.items():
        path = f"media_io_kwargs.{kind}"
        given |= {f"{path}.{name}": value for name, value in own.items()} if isinstance(own, dict) else {path: own}
    found = dict[str, float]()
    for path, value in given.items():
        name = path.rpartition(".")[2]
        if name not in HONOURED or (path.startswith("media_io_kwargs") and path not in OF_VIDEOS):
            raise MediaError(f"{path} is not supported: send {', '.join(HONOURED)}, or leave it out")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < NUMBER_MAX
        if not is_number or not isinstance(value, int | float) or HONOURED[name](value) != value:
            raise MediaError(f"{path} must be a number above 0, of pixels and frames a whole one")
        if found.setdefault(name, value) != value:
            raise MediaError(f"{path} is {value!r} and was {found[name]!r} before: send one")
    if "num_frames" in found and "fps" in found:
        raise MediaError("mm_processor_kwargs.fps cannot be combined with num_frames: leave one out")
    least, most, frames = (int(found.get(name, 0)) for name in ("min_pixels", "max_pixels", "num_frames"))
    return Custom(least, most, frames, found.get("fps", 0.0))
