"""Rows: an image as Pixtral reads it: whole, in its own form, patches row by row, with a token behind each row of vectors.

The tokens between rows are parts of the image's input, so that one input is one image.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.base.tokenizer_files import vocabulary_numbers
from vnext.media.pictures import MediaError
from vnext.media.pixels import CLIP, PixelForm, check_ratio, edge, numbers_of, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen

IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


class RowForm(NamedTuple):
    """A Form (seen.py): an image's longest side, and the side of the square that becomes a vector, in pixels. `tokens`: of a
    vector, of what is behind a row of them, and behind the last one."""

    longest: int
    side: int
    tokens: tuple[int, ...]
    pixels: PixelForm = CLIP
    mark: str = IMAGE
    shown: str = IMAGE

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        check_ratio(picture.shape, name)
        height, width, _ = picture.shape
        if (ratio := max(height, width) / self.longest) > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = (math.ceil(max(each, 1) / self.side) for each in (height, width))
        part = Part(resized(picture, rows * self.side, columns * self.side, self.pixels))
        words = dict(zip(self.tokens, (IMAGE, BREAK, END), strict=True))
        return Seen((part,), "".join(words[token] for token in self.spelled(part).tolist()))

    def spelled(self, part: Part) -> np.ndarray:
        vector, between, behind = self.tokens
        height, width, _ = part.pixels.shape
        found = np.full((height // self.side, width // self.side + 1), vector)
        found[:, -1] = between
        found[-1, -1] = behind
        return found.reshape(-1)

    def numbers(self, part: Part) -> np.ndarray:
        return numbers_of(part.pixels[None], self.pixels)


def form_in(folder: Path, token: int, patch: int, merged: int, longest: int) -> RowForm:
    """What a model's preprocessor_config.json and tokenizer say; `merged`: patches along the square of a vector; `longest`: the
    side that the tower has room for. Raises MediaError."""
    raw = settings_in(folder)
    numbers = vocabulary_numbers(folder, (BREAK, END))
    if None in numbers:
        raise MediaError(f"tokenizer.json in {folder} lacks {BREAK} or {END}, which stand in an image of this model")
    size = edge(raw.get("size") or {"longest_edge": longest}, "longest_edge", "size", longest)
    return RowForm(size, patch * merged, (token, *(number for number in numbers if number is not None)), pixel_form(raw, CLIP))
