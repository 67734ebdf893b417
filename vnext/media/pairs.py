"""Pairs: a video as Qwen2.5-VL and Qwen3-VL read it: frames at even distances, of which each two make one input, as an image does.

When a pair was seen stands before it as text, or, of Qwen2.5-VL, in how far its tokens turn (store/inputs.py).
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
from vnext.media.pixels import BICUBIC, CLIP, PixelForm, check_ratio, pixel_form, resized, settings_in
from vnext.media.seen import Part, Seen
from vnext.state.store.inputs import STEP_MAX, TOKENS_MIN

FORM_FILE = "video_preprocessor_config.json"
MARKS = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
HALVES = PixelForm(BICUBIC)
PAIR = 2


class PairForm(NamedTuple):
    """`side` of the square that becomes a vector; pixels of a frame, or of all frames where times are texts: `least` to `most`, and
    `room` for those of one; frames `a_second`, and how many at least and at most; `per_second`: places from one second to the next,
    0 where times are texts. `marks`: what stands before vectors, for each of them, and behind them."""

    side: int
    least: int
    most: int
    room: int
    a_second: float
    fewest: int
    most_frames: int
    per_second: int
    pixels: PixelForm
    marks: tuple[str, ...] = MARKS

    @property
    def mark(self) -> str:
        """What stands for a video in a prompt's text."""
        return self.marks[1] if self.per_second else self.shown

    @property
    def shown(self) -> str:
        return "".join(self.marks)

    def customized(self, custom: Custom, name: str) -> PairForm:
        """The form for one request's videos. Raises MediaError where it asks for more than the model's files have."""
        if not PAIR <= (custom.num_frames or PAIR) <= self.most_frames or custom.fps > RATE_MAX:
            wanted = f"{custom.num_frames} frames" if custom.num_frames else f"{custom.fps} frames a second"
            raise MediaError(f"{name} is to be read in {wanted}: it takes {PAIR} to {self.most_frames}, {RATE_MAX:.0f} a second")
        if custom.num_frames:
            count = round(custom.num_frames / PAIR) * PAIR if self.per_second else custom.num_frames
            return self._replace(fewest=count, most_frames=count)
        return self._replace(a_second=custom.fps or self.a_second)

    def choose(self, clip: Clip, name: str) -> Choice:
        """The frames that transformers takes, in the size that it brings them to. Raises MediaError."""
        check_ratio((clip.height, clip.width), name)
        numbers = self._in_pairs(clip) if self.per_second else self._between(clip)
        height, width = self._size(max(len(numbers), PAIR), clip.height, clip.width)
        return Choice(numbers, height, width, partial(resized, height=height, width=width, form=self.pixels))

    def seen(self, film: Film, name: str) -> Seen:
        """A film's inputs, and the text that stands for it. Raises MediaError."""
        frames, numbers = film.frames, [*film.numbers]
        if len(numbers) % PAIR:
            frames, numbers = np.concatenate((frames, frames[-1:])), [*numbers, numbers[-1]]
        _, height, width, _ = frames.shape
        rows, columns, pairs = height // self.side, width // self.side, frames.reshape(-1, PAIR, height, width, 3)
        begin, place, end = self.marks
        if not self.per_second:
            seen_s = [number / film.clip.rate for number in numbers]
            times_s = [(first + last) / 2 for first, last in zip(seen_s[::PAIR], seen_s[1::PAIR])]
            written = "".join(f"<{each:.1f} seconds>{begin}{place * (rows * columns)}{end}" for each in times_s)
            return Seen(tuple(Part(pair, rows=rows) for pair in pairs), written)
        seconds = PAIR * film.clip.frames / (len(film.numbers) * film.clip.rate)
        times = (np.arange(len(pairs), dtype=np.float32) * np.float32(self.per_second * seconds)).astype(np.int64)
        steps = np.diff(times).tolist()
        if max(steps, default=0) > STEP_MAX:
            raise MediaError(f"{name} has {seconds:.0f} s between frames to read: it is too long")
        parts = [Part(pair, rows=rows, step=step) for pair, step in zip(pairs, (None, *steps), strict=True)]
        return Seen(tuple(parts), place * (len(pairs) * rows * columns))

    def _between(self, clip: Clip) -> list[int]:
        count = min(max(int(clip.frames / clip.rate * self.a_second), self.fewest), self.most_frames, clip.frames)
        found: list[int] = np.linspace(0, clip.frames - 1, count).round().astype(int).tolist()
        return found

    def _in_pairs(self, clip: Clip) -> list[int]:
        most = min(self.most_frames, clip.frames) // PAIR * PAIR
        count = int(min(max(clip.frames / clip.rate * self.a_second, self.fewest), most)) // PAIR * PAIR
        if not count:
            return [0]
        step = clip.frames / count
        found: list[int] = (np.arange(math.ceil(clip.frames / step)) * step).astype(np.float32).astype(int).tolist()
        return found

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of a frame, which has tokens enough for a digest and no more patches than there is room for."""
        side, fewest = self.side, TOKENS_MIN * self.side**2
        if self.per_second:
            return fitting_size(height, width, side, max(self.least, fewest), min(self.most, self.room))
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        found = fitting_size(height, width, side, self.least, min(self.most, self.room * count), count)
        return found if found[0] * found[1] >= fewest else fitting_size(height, width, side, fewest, self.room)


def fitting_size(height: int, width: int, side: int, least: int, most: int, count: int = 1) -> tuple[int, int]:
    """The multiples of `side` nearest to a size, or to what of its form has, in so many frames, so many pixels."""
    found, thick = [round(each / side) * side for each in (height, width)], round(count / PAIR) * PAIR if count > 1 else 1
    if thick * found[0] * found[1] > most:
        scale = math.sqrt(count * height * width / most)
        found = [max(side, math.floor(each / scale / side) * side) for each in (height, width)]
    elif thick * found[0] * found[1] < least:
        scale = math.sqrt(least / (count * height * width))
        found = [math.ceil(each * scale / side) * side for each in (height, width)]
    return found[0], found[1]


def pairs_in(folder: Path, side: int, room: int, per_second: int) -> PairForm:
    """What a model's video_preprocessor_config.json says, as GridForm has it. Raises MediaError."""
    raw, usual = settings_in(folder, FORM_FILE), (128 * side**2, 768 * side**2)
    size = raw.get("size")
    own = size if isinstance(size, dict) else {}
    least, most = (
        raw.get(name) or own.get(edge, number)
        for name, edge, number in zip(("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), usual)
    )
    rate, fewest, frames = raw.get("fps") or 2, raw.get("min_frames") or 4, raw.get("max_frames") or TAKEN_MAX
    if not all(isinstance(each, int) for each in (least, most, fewest, frames)) or not isinstance(rate, int | float):
        raise MediaError(f"{FORM_FILE}: sizes, frames and fps must be numbers")
    if not 0 < least <= most or not PAIR <= fewest <= frames or not 0 < rate <= 1000:
        raise MediaError(f"{FORM_FILE}: {least} to {most} pixels in {fewest} to {frames} frames, {rate} a second, are out of order")
    pixels = pixel_form(raw, CLIP if per_second else HALVES)
    return PairForm(side, least, most, room, float(rate), fewest, min(frames, TAKEN_MAX), per_second, pixels)
