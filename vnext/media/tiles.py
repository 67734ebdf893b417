"""Tiles: an image as Idefics 3 and SmolVLM read it: squares of one size, row by row, and all of it once more as the last.

Owns the sizes and the text that stands for an image. Numbers are transformers': each resizing is Pillow's, of uint8 pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.media.pictures import MediaError, digest_of

FORM_FILE = "preprocessor_config.json"
EDGE_MAX = 4096
RATIO_MAX = 200
IMAGE = "<image>"
AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"
LANCZOS = 1
RESCALED = 1 / 255


class TileForm(NamedTuple):
    """preprocessor_config.json: an image's longest side and a tile's side in pixels, whether there are several tiles; and how
    numbers are made of pixels. `tokens`: how many places in the text stand for a tile."""

    longest: int
    side: int
    tokens: int
    splits: bool = True
    resizes: bool = True
    resample: int = LANCZOS
    factor: float = RESCALED
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)


class Tiles(NamedTuple):
    """uint8 [N, side, side, 3]; `rows` and `columns` are 0 where all of the image is the only tile."""

    pixels: np.ndarray
    rows: int
    columns: int

    @property
    def digests(self) -> list[bytes]:
        return [digest_of(tile) for tile in self.pixels]


def form_in(folder: Path, tokens: int) -> TileForm:
    """What a model's preprocessor_config.json says, the usual where it has none. Raises MediaError."""
    path = folder / FORM_FILE
    try:
        raw = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise MediaError(f"{path} cannot be read: {error}") from error
    return tile_form(raw, tokens)


def tile_form(raw: Mapping[str, object], tokens: int) -> TileForm:
    """What preprocessor_config.json says. Raises MediaError for what is no number above 0."""

    def edge(key: str, usual: int) -> int:
        sizes = raw.get(key) or {"longest_edge": usual}
        found = sizes.get("longest_edge") if isinstance(sizes, Mapping) else None
        if not isinstance(found, int) or not 0 < found <= EDGE_MAX:
            raise MediaError(f"preprocessor_config.json: {key}.longest_edge is {found!r}: it must be 1 to {EDGE_MAX}")
        return found

    def numbers(key: str, does: str, neutral: float) -> tuple[float, ...]:
        found = raw.get(key, [0.5] * 3) if raw.get(does, True) else [neutral] * 3
        if not isinstance(found, list) or len(found) != 3 or not all(isinstance(each, int | float) for each in found):
            raise MediaError(f"preprocessor_config.json: {key} is {found!r}: it must be three numbers")
        return tuple(float(each) for each in found)

    factor, resample = raw.get("rescale_factor", RESCALED), raw.get("resample", LANCZOS)
    if not isinstance(factor, int | float) or not isinstance(resample, int):
        raise MediaError(f"preprocessor_config.json: rescale_factor {factor!r} and resample {resample!r} must be numbers")
    return TileForm(
        longest=edge("size", 4 * 364),
        side=edge("max_image_size", 364),
        tokens=tokens,
        splits=bool(raw.get("do_image_splitting", True)),
        resizes=bool(raw.get("do_resize", True)),
        resample=resample,
        factor=factor if raw.get("do_rescale", True) else 1.0,
        mean=numbers("image_mean", "do_normalize", 0.0),
        deviation=numbers("image_std", "do_normalize", 1.0),
    )


def tiles_of(picture: np.ndarray, form: TileForm, name: str) -> Tiles:
    """An image uint8 [height, width, 3] cut into tiles. Raises MediaError for one that is far longer than wide."""
    height, width, _ = picture.shape
    if max(height, width) > RATIO_MAX * min(height, width):
        raise MediaError(f"{name} is {width} x {height} pixels: no side may be more than {RATIO_MAX} times the other")
    if form.resizes:
        picture = _resized(picture, *_within(height, width, form.longest), form)
    side = form.side
    if not form.splits:
        return Tiles(_resized(picture, side, side, form)[None], 0, 0)
    height, width, _ = picture.shape
    picture = _resized(picture, *_in_sides(height, width, side), form)
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    if rows == columns == 1:
        return Tiles(picture[None], 0, 0)
    cut = picture.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return Tiles(np.concatenate((cut, _resized(picture, side, side, form)[None])), rows, columns)


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


def _resized(picture: np.ndarray, height: int, width: int, form: TileForm) -> np.ndarray:
    from PIL import Image

    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling(form.resample)))


def numbers_of(tiles: np.ndarray, form: TileForm) -> np.ndarray:
    """What a tower reads of tiles uint8 [N, side, side, 3]: float32 [N, 3, side, side]."""
    scaled = (tiles.astype(np.float64) * form.factor).astype(np.float32)
    normal = (scaled - np.array(form.mean, np.float32)) / np.array(form.deviation, np.float32)
    return np.ascontiguousarray(normal.transpose(0, 3, 1, 2))


def text_of(tiles: Tiles, form: TileForm) -> str:
    """The text that stands for an image."""
    places = IMAGE * form.tokens
    whole = f"{AROUND}{WHOLE}{places}{AROUND}"
    if not tiles.rows:
        return whole
    rows = (
        "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{places}" for column in range(tiles.columns)) + "\n"
        for row in range(tiles.rows)
    )
    return f"{''.join(rows)}\n{whole}"


def with_images(text: str, images: list[Tiles], form: TileForm) -> str:
    """The text with each image in the place of its <image>, in order. Raises MediaError where there are more or fewer."""
    pieces = text.split(IMAGE)
    if len(pieces) != len(images) + 1:
        raise MediaError(f"the prompt has {len(pieces) - 1} times {IMAGE} and {len(images)} images: they must be as many")
    return pieces[0] + "".join(text_of(each, form) + piece for each, piece in zip(images, pieces[1:], strict=True))


class Span(NamedTuple):
    """Positions [start, start + length) of a prompt stand for what has this digest."""

    start: int
    length: int
    digest: bytes


def spans_of(token_ids: list[int], image_token: int, images: list[Tiles], form: TileForm) -> list[Span]:
    """Where tiles stand among a prompt's tokens. Raises MediaError where a tokenizer made other tokens of the text."""
    found, digests = list(_runs(token_ids, image_token)), [digest for each in images for digest in each.digests]
    if [length for _, length in found] != [form.tokens] * len(digests):
        raise MediaError(f"the prompt's tokens do not stand for {len(digests)} tiles of {form.tokens} places each")
    return [Span(start, length, digest) for (start, length), digest in zip(found, digests, strict=True)]


def _runs(token_ids: list[int], token: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of one token."""
    is_it = np.concatenate(([False], np.array(token_ids) == token, [False]))
    starts, ends = np.flatnonzero(is_it[1:] & ~is_it[:-1]), np.flatnonzero(~is_it[1:] & is_it[:-1])
    return zip(starts.tolist(), (ends - starts).tolist())
