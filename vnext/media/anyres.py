"""Any resolution: an image as LLaVA-OneVision reads it: all of it in one square, and, alone in its prompt, in squares of a grid.

The grid is the one of a list that loses least of the image, which is laid upon its middle. Vectors of the grid's squares lie side
by side, are cut to the image, made fewer where there are many, and have one behind each row that says so. A video is frames at even
distances, each an input of one square with a quarter of its vectors, of which the last has one more.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.media.custom import RATE_MAX, Custom
from vnext.media.films import TAKEN_MAX, Choice, Clip, Film
from vnext.media.pictures import MediaError
from vnext.media.pixels import CLIP, FORM_FILE, PixelForm, check_ratio, edge, numbers_of, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen

IMAGE, FILM = "<image>", "<video>"
FILM_FILE = "video_preprocessor_config.json"
FRAMES = 32
"""Of a video, where the model's files say nothing: as its authors read it."""
MANY = 1.1
GRID_MAX = 6


class SquareFilmForm(NamedTuple):
    """A FilmForm (seen.py): `side` in pixels and `grid` in vectors along a frame; how many frames at most, and `a_second`, 0 for as
    many as that."""

    side: int
    grid: int
    pixels: PixelForm
    most: int
    a_second: float = 0.0
    mark: str = FILM
    shown: str = FILM

    def customized(self, custom: Custom, name: str) -> SquareFilmForm:
        if custom.num_frames > self.most or custom.fps > RATE_MAX:
            raise MediaError(f"{name} is to be read in more frames than it may: {self.most}, {RATE_MAX:.0f} a second")
        return self._replace(most=custom.num_frames or self.most, a_second=custom.fps or self.a_second)

    def choose(self, clip: Clip, name: str) -> Choice:
        check_ratio((clip.height, clip.width), name)
        wanted = int(clip.frames / clip.rate * self.a_second) if self.a_second else self.most
        count = max(min(wanted, self.most, clip.frames), 1)
        numbers = [at * clip.frames // count for at in range(count)]
        return Choice(numbers, self.side, self.side, partial(resized, height=self.side, width=self.side, form=self.pixels))

    def seen(self, film: Film, name: str) -> Seen:
        last = len(film.frames) - 1
        parts = tuple(Part(frame[None], (int(at == last),)) for at, frame in enumerate(film.frames))
        return Seen(parts, FILM * sum(frame_tokens(part, self.grid) for part in parts))


def frame_tokens(part: Part, grid: int) -> int:
    """Of a frame, and one behind the last."""
    return (-(-grid // 2)) ** 2 + part.more[0]


class AnyresForm(NamedTuple):
    """A Form (seen.py): `side` in pixels and `grid` in vectors along a square, `most` squares whose vectors are not made fewer,
    `sizes` (height, width) of grids in pixels. `films`: how videos are read."""

    side: int
    grid: int
    most: int
    sizes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    pixels: PixelForm = CLIP
    mark: str = IMAGE
    shown: str = IMAGE
    films: SquareFilmForm | None = None

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        check_ratio(picture.shape, name)
        (own_height, own_width, _), side, form = picture.shape, self.side, self.pixels
        if is_alone:
            height, width = best_size(own_height, own_width, self.sizes)
            laid = on_middle(resized(picture, *within(own_height, own_width, height, width), form), height, width)
            cut = laid.reshape(height // side, side, width // side, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
            tiles = np.concatenate((resized(picture, side, side, form)[None], cut))
            part = Part(tiles, layout_of(height // side, width // side, own_height, own_width, self.grid, self.most))
        else:
            longer, colour = max(own_height, own_width), tuple(int(each * 255) for each in form.mean)
            part = Part(resized(on_middle(picture, longer, longer, colour), side, side, form)[None])
        return Seen((part,), IMAGE * len(self.spelled(part)))

    def spelled(self, part: Part) -> np.ndarray:
        if not part.more:
            return np.full(self.grid**2 + 1, self.tokens[0])
        if len(part.more) == 1:
            return np.full(frame_tokens(part, self.grid), self.tokens[0])
        *_, height, width = part.more
        return np.full(self.grid**2 + height * (width + 1), self.tokens[0])

    def numbers(self, part: Part) -> np.ndarray:
        is_frame = self.films is not None and len(part.more) == 1
        return numbers_of(part.pixels, self.films.pixels if self.films is not None and is_frame else self.pixels)


def layout_of(down: int, across: int, height: int, width: int, grid: int, most: int) -> tuple[int, ...]:
    """How vectors of an image lie, in `down` times `across` squares of grid * grid: (squares down, squares across, vectors left out
    above and below, before and behind, height and width that the rest is brought to)."""
    rows, columns, above, before = down * grid, across * grid, 0, 0
    if width / height > columns / rows:
        above = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        before = (columns - int(round(width * (rows / height), 7))) // 2
    seen_down, seen_across = rows - 2 * above, columns - 2 * before
    ratio = max(math.sqrt(seen_down * seen_across / (most * grid**2)), 1.0)
    if ratio <= MANY:
        return down, across, above, before, seen_down, seen_across
    return down, across, above, before, int(seen_down // ratio), int(seen_across // ratio)


def best_size(height: int, width: int, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The size that shows most of an image's pixels, and of these the one with least beside it."""

    def worth(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - size[0] * size[1]

    return max(sizes, key=worth)


def within(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """The largest size of an image's form in a room."""
    across, down = most_width / width, most_height / height
    if across < down:
        return min(math.ceil(height * across), most_height), most_width
    return most_height, min(math.ceil(width * down), most_width)


def on_middle(picture: np.ndarray, height: int, width: int, colour: tuple[int, ...] = (0, 0, 0)) -> np.ndarray:
    """The image uint8 [H, W, 3] on the middle of a larger one."""
    found = np.empty((height, width, 3), np.uint8)
    found[:] = colour
    above, before = (height - picture.shape[0]) // 2, (width - picture.shape[1]) // 2
    found[above : above + picture.shape[0], before : before + picture.shape[1]] = picture
    return found


def form_in(folder: Path, token: int, side: int, grid: int, most: int, film_token: int = 0) -> AnyresForm:
    """What a model's files say, for a tower that reads squares of `side` pixels as `grid` vectors along each side; `film_token`: in
    whose place vectors of videos stand, 0 where none are read. Raises MediaError."""
    raw = settings_in(folder)
    own = raw.get("size") or {"height": side, "width": side}
    if {edge(own, key, "size") for key in ("height", "width")} != {side}:
        raise MediaError(f"{FORM_FILE}: size is {own!r}, and the tower reads squares of {side} pixels")
    usual = [(side * down, side * across) for down in range(1, GRID_MAX + 1) for across in range(1, GRID_MAX + 1)]
    sizes = raw.get("image_grid_pinpoints") or usual
    if not isinstance(sizes, list) or not all(_is_grid(size, side) for size in sizes):
        raise MediaError(f"{FORM_FILE}: image_grid_pinpoints must be heights and widths of 1 to {GRID_MAX} squares of {side}")
    form = AnyresForm(side, grid, most, tuple((size[0], size[1]) for size in sizes), (token,), pixel_form(raw, CLIP))
    return form._replace(tokens=(token, film_token), films=_films_in(folder, side, grid)) if film_token else form


def _films_in(folder: Path, side: int, grid: int) -> SquareFilmForm:
    raw = settings_in(folder, FILM_FILE)
    most, rate = raw.get("num_frames") or FRAMES, raw.get("fps") or 0.0
    if not isinstance(most, int) or most < 1 or not isinstance(rate, int | float) or not 0 <= rate <= RATE_MAX:
        raise MediaError(f"{FILM_FILE}: a video is read in {most!r} frames, {rate!r} a second: these must be numbers above 0")
    return SquareFilmForm(side, grid, pixel_form(raw, CLIP), min(most, TAKEN_MAX), rate)


def _is_grid(size: object, side: int) -> bool:
    lengths = [side * count for count in range(1, GRID_MAX + 1)]
    return isinstance(size, list | tuple) and len(size) == 2 and all(each in lengths for each in size)
