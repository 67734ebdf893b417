"""Whole: an image as Gemma 3 reads it: all of it in one square, whatever its form."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.media.pictures import MediaError
from vnext.media.pixels import BILINEAR, FORM_FILE, PixelForm, check_ratio, edge, numbers_of, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen

BEGIN, PLACE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class WholeForm(NamedTuple):
    """A Form (seen.py): `side` in pixels, and how many `places` in the text stand for an image."""

    side: int
    places: int
    tokens: tuple[int, ...]
    pixels: PixelForm
    mark: str = BEGIN
    shown: str = BEGIN

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        check_ratio(picture.shape, name)
        part = Part(resized(picture, self.side, self.side, self.pixels))
        return Seen((part,), f"\n\n{BEGIN}{PLACE * self.places}{END}\n\n")

    def spelled(self, part: Part) -> np.ndarray:
        return np.full(self.places, self.tokens[0])

    def numbers(self, part: Part) -> np.ndarray:
        return numbers_of(part.pixels[None], self.pixels)


def form_in(folder: Path, token: int, side: int, places: int) -> WholeForm:
    """What a model's preprocessor_config.json says, for a tower that reads squares of `side` pixels. Raises MediaError."""
    raw = settings_in(folder)
    own = raw.get("size") or {"height": side, "width": side}
    if {edge(own, key, "size") for key in ("height", "width")} != {side}:
        raise MediaError(f"{FORM_FILE}: size is {own!r}, and the tower reads squares of {side} pixels")
    if raw.get("do_pan_and_scan"):
        raise MediaError(f"{FORM_FILE}: do_pan_and_scan is not supported, correct it")
    return WholeForm(side, places, (token,), pixel_form(raw, PixelForm(BILINEAR)))
