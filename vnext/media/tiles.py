"""Tiles: an image as Idefics 3 and SmolVLM read it: squares of one size, row by row, and all of it once more as the last.

Owns their sizes and the text that stands for an image. A video is frames at even distances, each one tile behind its time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.media.custom import RATE_MAX, Custom
from vnext.media.films import TAKEN_MAX, Choice, Clip, Film
from vnext.media.pictures import MediaError
from vnext.media.pixels import FORM_FILE, PixelForm, check_ratio, edge, numbers_of, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen

IMAGE = "<image>"
FILM_FILE = "video_preprocessor_config.json"
SKIPPED_S = 1
"""At either end of a long video."""
FEW = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
ONES = (*FEW.split(), "eighteen", "nineteen")
TENS = tuple("twenty thirty forty fifty sixty seventy eighty ninety".split())
AROUND = "<fake_token_around_image>"
WHOLE = "<global-img>"


class Tiles(NamedTuple):
    """uint8 [N, side, side, 3]; `rows` and `columns` are 0 where all of the image is the only tile."""

    pixels: np.ndarray
    rows: int
    columns: int


class FrameForm(NamedTuple):
    """A FilmForm (seen.py): the longest side that a frame is brought to before it is a tile, and a TileForm's numbers; how many
    frames `a_second`, and at most."""

    longest: int
    side: int
    places: int
    pixels: PixelForm
    a_second: float
    most: int
    mark: str = "<video>"
    shown: str = "<video>"

    def customized(self, custom: Custom, name: str) -> FrameForm:
        if custom.num_frames > self.most or custom.fps > RATE_MAX:
            raise MediaError(f"{name} is to be read in more frames than it may: {self.most}, {RATE_MAX:.0f} a second")
        return self._replace(most=custom.num_frames or self.most, a_second=custom.fps or self.a_second)

    def choose(self, clip: Clip, name: str) -> Choice:
        check_ratio((clip.height, clip.width), name)
        seconds, last = clip.frames / clip.rate, clip.frames - 1
        ends = 0, last
        if seconds - 2 * SKIPPED_S > self.most * self.a_second:
            ends = int(SKIPPED_S * clip.rate), min(int(clip.frames - SKIPPED_S * clip.rate), last)
        count = max(min(round(self.a_second * seconds), self.most), 1)
        numbers = np.unique(np.linspace(*(ends if ends[0] < ends[1] else (0, last)), count, dtype=int)).tolist()
        return Choice(numbers, self.side, self.side, self._tile)

    def _tile(self, frame: np.ndarray) -> np.ndarray:
        within = resized(frame, *_within(frame.shape[0], frame.shape[1], self.longest), self.pixels)
        return resized(within, self.side, self.side, self.pixels)

    def seen(self, film: Film, name: str) -> Seen:
        """The words are the authors'."""
        clip, count = film.clip, len(film.numbers)
        whole = f"{AROUND}{WHOLE}{IMAGE * self.places}{AROUND}"
        times = (divmod(int(number / clip.rate), 60) for number in film.numbers)
        lasts = timedelta(seconds=int(clip.frames / clip.rate))
        text = f"You are provided the following series of {in_words(count)} frames from a {lasts} [H:MM:SS] video.\n"
        text += "".join(f"\nFrame from {minutes:02d}:{seconds:02d}:{whole}" for minutes, seconds in times)
        return Seen(tuple(map(Part, film.frames)), text + "\n\n")


class TileForm(NamedTuple):
    """A Form (seen.py): an image's longest side and a tile's side in pixels, whether there are several tiles. `places`: how many of
    the `tokens` stand for a tile. `films`: how videos are read."""

    longest: int
    side: int
    places: int
    tokens: tuple[int, ...] = (0,)
    splits: bool = True
    resizes: bool = True
    pixels: PixelForm = PixelForm()
    mark: str = IMAGE
    shown: str = IMAGE
    films: FrameForm | None = None

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        tiles = tiles_of(picture, self, name)
        return Seen(tuple(map(Part, tiles.pixels)), text_of(tiles, self))

    def spelled(self, part: Part) -> np.ndarray:
        return np.full(self.places, self.tokens[0])

    def numbers(self, part: Part) -> np.ndarray:
        return numbers_of(part.pixels[None], self.pixels)


def form_in(folder: Path, token: int, places: int) -> TileForm:
    """What a model's preprocessor_config.json says, the usual where it has none. Raises MediaError."""
    raw, of_films = settings_in(folder), settings_in(folder, FILM_FILE)
    form, sampling = tile_form(raw, places, token), of_films.get("video_sampling") or raw.get("video_sampling")
    return form._replace(films=frame_form(form, sampling or of_films)) if sampling or of_films else form


def frame_form(form: TileForm, raw: Mapping[str, object]) -> FrameForm:
    """What the model's files say of videos. Raises MediaError for what is no number above 0."""
    rate, most = raw.get("fps"), raw.get("max_frames") or raw.get("num_frames")
    if not isinstance(rate, int | float) or not isinstance(most, int) or not 0 < rate <= RATE_MAX or most < 1:
        raise MediaError(f"{FORM_FILE}: a video is read in {most!r} frames, {rate!r} a second: these must be numbers above 0")
    size = raw.get("video_size") or raw.get("size") or {"longest_edge": form.longest}
    return FrameForm(edge(size, "longest_edge", "video_size"), form.side, form.places, form.pixels, rate, min(most, TAKEN_MAX))


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
    places = IMAGE * form.places
    whole = f"{AROUND}{WHOLE}{places}{AROUND}"
    if not tiles.rows:
        return whole
    rows = (
        "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{places}" for column in range(tiles.columns)) + "\n"
        for row in range(tiles.rows)
    )
    return f"{''.join(rows)}\n{whole}"


def in_words(number: int) -> str:
    """A number below 1,000 in English."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return f"{ONES[number // 100]} hundred" + (f" and {in_words(number % 100)}" if number % 100 else "")
