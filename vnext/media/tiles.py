"""Tiles: an image as Idefics 3 and SmolVLM read it: squares of one size, row by row, and all of it once more as the last.

Owns their sizes and the text that stands for an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.media.pixels import PixelForm, check_ratio, edge, numbers_of, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen

IMAGE = "<image>"
AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"


class Tiles(NamedTuple):
    """uint8 [N, side, side, 3]; `rows` and `columns` are 0 where all of the image is the only tile."""

    pixels: np.ndarray
    rows: int
    columns: int


class TileForm(NamedTuple):
    """A Form (seen.py): an image's longest side and a tile's side in pixels, whether there are several tiles. `places`: how many of
    the `tokens` stand for a tile."""

    longest: int
    side: int
    places: int
    tokens: tuple[int, ...] = (0,)
    splits: bool = True
    resizes: bool = True
    pixels: PixelForm = PixelForm()
    mark: str = IMAGE
    shown: str = IMAGE

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        tiles = tiles_of(picture, self, name)
        return Seen(tuple(map(Part, tiles.pixels)), text_of(tiles, self))

    def spelled(self, part: Part) -> np.ndarray:
        return np.full(self.places, self.tokens[0])

    def numbers(self, part: Part) -> np.ndarray:
        return numbers_of(part.pixels[None], self.pixels)


def form_in(folder: Path, token: int, places: int) -> TileForm:
    """What a model's preprocessor_config.json says, the usual where it has none. Raises MediaError."""
    return tile_form(settings_in(folder), places, token)


def tile_form(raw: Mapping[str, object], places: int, token: int = 0) -> TileForm:
    """What preprocessor_config.json says. Raises MediaError for what is no number above 0."""
    return TileForm(
        longest=edge(raw.get("size") or {"longest_edge": 4 * 364}, "longest_edge", "size"),
        side=edge(raw.get("max_image_size") or {"longest_edge": 364}, "longest_edge", "max_image_size"),
        places=places,
        tokens=(token,),
        splits=bool(raw.get("do_image_splitting", True)),
        resizes=bool(raw.get("do_resize", True)),
        pixels=pixel_form(raw),
    )


def tiles_of(picture: np.ndarray, form: TileForm, name: str) -> Tiles:
    """An image uint8 [height, width, 3] cut into tiles. Raises MediaError for one that is far longer than wide."""
    check_ratio(picture.shape, name)
    height, width, _ = picture.shape
    if form.resizes:
        picture = resized(picture, *_within(height, width, form.longest), form.pixels)
    side = form.side
    if not form.splits:
        return Tiles(resized(picture, side, side, form.pixels)[None], 0, 0)
    height, width, _ = picture.shape
    picture = resized(picture, *_in_sides(height, width, side), form.pixels)
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    if rows == columns == 1:
        return Tiles(picture[None], 0, 0)
    cut = picture.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return Tiles(np.concatenate((cut, resized(picture, side, side, form.pixels)[None])), rows, columns)


def _within(height: int, width: int, longest: int) -> tuple[int, int]:
    """A size of the same form whose longer side is `longest`; the other one is even."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return max(other + other % 2, 1), longest
    other = int(longest * ratio)
    return longest, max(other + other % 2, 1)


def _in_sides(height: int, width: int, side: int) -> tuple[int, int]:
    """The next size that tiles fill."""

    def whole(length: int) -> int:
        return math.ceil(length / side) * side

    ratio = width / height
    if width >= height:
        width = whole(width)
        return max(whole(int(width / ratio)), side), width
    height = whole(height)
    return height, max(whole(int(height * ratio)), side)


def text_of(tiles: Tiles, form: TileForm) -> str:
    """The text that stands for an image."""
    places = IMAGE * form.places
    whole = f"{AROUND}{WHOLE}{places}{AROUND}"
    if not tiles.rows:
        return whole
    rows = (
        "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{places}" for column in range(tiles.columns)) + "\n"
        for row in range(tiles.rows)
    )
    return f"{''.join(rows)}\n{whole}"
