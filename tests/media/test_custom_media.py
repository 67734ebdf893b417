"""What a request says of how its images and videos are read: it is honoured within the model's bounds, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vnext.media.custom import Custom, custom_of
from vnext.media.grid import form_in
from vnext.media.pictures import MediaError

PICTURE = np.random.default_rng(5).integers(0, 256, (480, 640, 3), np.uint8)


def test_an_image_has_as_many_pixels_as_are_asked_for() -> None:
    form = form_in(Path("/nowhere"), 90, 14, 2, 10**7)
    few, many = (form.customized(Custom(max_pixels=most), "it").seen(PICTURE, "it").parts[0].pixels for most in (100_000, 300_000))
    assert few.shape[0] * few.shape[1] <= 100_000 < many.shape[0] * many.shape[1] <= 300_000
    [large] = form.customized(Custom(min_pixels=600_000), "it").seen(PICTURE, "it").parts
    assert large.pixels.shape[0] * large.pixels.shape[1] >= 600_000
    for custom in (Custom(max_pixels=10**8), Custom(min_pixels=9), Custom(min_pixels=90_000, max_pixels=80_000)):
        with pytest.raises(MediaError, match="^it is to have .* pixels: these must be in order, from 3136 to 1003520$"):
            form.customized(custom, "it")


def test_fields_say_how_media_are_read() -> None:
    assert custom_of({}, {}) == custom_of({}, {"video": {}}) == Custom()
    assert custom_of({"fps": 2, "max_pixels": 9}, {"video": {"fps": 2}}) == Custom(max_pixels=9, fps=2)
    assert custom_of({}, {"video": {"num_frames": 8}}) == Custom(num_frames=8)


@pytest.mark.parametrize(
    ("processor", "reading", "sentence"),
    [
        ({"num_crops": 4}, {}, "mm_processor_kwargs.num_crops is not supported: send min_pixels, max_pixels, num_frames, fps, or leave it out"),
        ({}, {"image": {"fps": 4}}, "media_io_kwargs.image.fps is not supported: send min_pixels, max_pixels, num_frames, fps, or leave it out"),
        ({}, {"video": 4}, "media_io_kwargs.video is not supported: send min_pixels, max_pixels, num_frames, fps, or leave it out"),
        ({"fps": "two"}, {}, "mm_processor_kwargs.fps must be a number above 0, of pixels and frames a whole one"),
        ({"fps": 10**400}, {}, "mm_processor_kwargs.fps must be a number above 0, of pixels and frames a whole one"),
        ({"fps": True}, {}, "mm_processor_kwargs.fps must be a number above 0, of pixels and frames a whole one"),
        ({"fps": float("nan")}, {}, "mm_processor_kwargs.fps must be a number above 0, of pixels and frames a whole one"),
        ({"num_frames": 2.5}, {}, "mm_processor_kwargs.num_frames must be a number above 0, of pixels and frames a whole one"),
        ({"min_pixels": 0}, {}, "mm_processor_kwargs.min_pixels must be a number above 0, of pixels and frames a whole one"),
        ({"fps": 2}, {"video": {"fps": 3}}, "media_io_kwargs.video.fps is 3 and was 2 before: send one"),
        ({"fps": 2, "num_frames": 3}, {}, "mm_processor_kwargs.fps cannot be combined with num_frames: leave one out"),
    ],
)
def test_what_says_nothing_is_refused_by_name(processor: dict[str, Any], reading: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MediaError) as refused:
        custom_of(processor, reading)
    assert str(refused.value) == sentence
