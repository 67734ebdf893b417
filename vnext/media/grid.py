"""Grid: an image as Qwen2.5-VL reads it: whole, in about its own form, squares of patches row by row, of which each is a vector."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.media.custom import Custom
from vnext.media.pairs import PairForm, fitting_size, pairs_in
from vnext.media.pictures import MediaError
from vnext.media.pixels import CLIP, FORM_FILE, PixelForm, check_ratio, numbers_of, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen
from vnext.state.store.inputs import TOKENS_MIN

BEGIN, PLACE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
OMNI = "<|IMAGE|>"
LEAST, MOST = 56**2, 28**2 * 1280


class GridForm(NamedTuple):
    """A Form (seen.py): the `side` of the square that becomes a vector, and between how many pixels an image has. `films`: how
    videos are read."""

    side: int
    least: int
    most: int
    tokens: tuple[int, ...]
    pixels: PixelForm = CLIP
    mark: str = PLACE
    shown: str = BEGIN + PLACE + END
    films: PairForm | None = None

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        check_ratio(picture.shape, name)
        height, width, _ = picture.shape
        height, width = fitting_size(height, width, self.side, self.least, self.most)
        part = Part(resized(picture, height, width, self.pixels), rows=height // self.side)
        return Seen((part,), self.mark * len(self.spelled(part)))

    def customized(self, custom: Custom, name: str) -> GridForm:
        """The form for one request's images. Raises MediaError where it asks for more than the model's files have."""
        fewest = TOKENS_MIN * self.side**2
        most = custom.max_pixels or self.most
        least = custom.min_pixels or min(self.least, most)
        if not fewest <= least <= most <= self.most:
            raise MediaError(f"{name} is to have {least} to {most} pixels: these must be in order, from {fewest} to {self.most}")
        return self._replace(least=least, most=most)

    def spelled(self, part: Part) -> np.ndarray:
        *_, height, width, _ = part.pixels.shape
        return np.full(height * width // self.side**2, self.tokens[0])

    def numbers(self, part: Part) -> np.ndarray:
        if part.pixels.ndim == 3 or self.films is None:
            return numbers_of(part.pixels[None], self.pixels)
        return numbers_of(part.pixels, self.films.pixels)


def form_in(folder: Path, token: int, patch: int, merged: int, room: int, film_token: int = 0, per_second: int = 0) -> GridForm:
    """What a model's files say; `merged`: patches along the square of a vector; `room`: for so many pixels, to which larger images
    shrink; `film_token`: in whose place vectors of videos stand, 0 where none are read; `per_second`: as PairForm. Raises
    MediaError."""
    raw, side = settings_in(folder), patch * merged
    size = raw.get("size") or {}
    own, fewest = size if isinstance(size, dict) else {}, TOKENS_MIN * side**2
    least, most = raw.get("min_pixels") or own.get("shortest_edge", max(LEAST, fewest)), raw.get("max_pixels")
    most = most or own.get("longest_edge", MOST)
    if not isinstance(least, int) or not isinstance(most, int) or not fewest <= least <= most:
        raise MediaError(
            f"{FORM_FILE}: an image has {least!r} to {most!r} pixels: these must be numbers, in order, of {fewest} or more"
        )
    for key, known in (("patch_size", patch), ("merge_size", merged)):
        if raw.get(key, known) != known:
            raise MediaError(f"{FORM_FILE}: {key} is {raw[key]!r} and {known} in config.json: correct one of them")
    pixels, least, most = pixel_form(raw, CLIP), min(least, room), min(most, room)
    if not film_token:
        return GridForm(side, least, most, (token,), pixels)
    return GridForm(side, least, most, (token, film_token), pixels, films=pairs_in(folder, side, room, per_second))


def omni_in(folder: Path, *numbers: int) -> GridForm:
    """The same, with the marks of Qwen2.5-Omni."""
    return form_in(folder, *numbers)._replace(mark=OMNI, shown=f"<|vision_bos|>{OMNI}<|vision_eos|>")


def capitals_in(folder: Path, *numbers: int) -> GridForm:
    """The same, with the marks of Compass: Qwen3-VL's in capitals."""
    form = form_in(folder, *numbers)
    films = form.films and form.films._replace(marks=tuple(each.upper() for each in form.films.marks))
    return form._replace(mark=PLACE.upper(), shown=form.shown.upper(), films=films)
