"""What a form makes of an image: its inputs, as files in a store, and the text that stands for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from vnext.media.custom import Custom
from vnext.media.films import Choice, Clip, Film
from vnext.media.pictures import MediaError

HEAD_MAX = 100


class Part(NamedTuple):
    """One input: pixels uint8 [height, width, 3], or several of one size [N, height, width, 3]; `more` says what else its vectors
    depend on; `rows`: in how many its tokens lie, where their places tell, else 0; `step`: how much later it was seen than the
    input before it, with which it goes on, None for a first one."""

    pixels: np.ndarray
    more: tuple[int, ...] = ()
    rows: int = 0
    step: int | None = None

    @property
    def file(self) -> bytes:
        """As it is stored: sizes and more in figures, a zero, pixels."""
        head = b"/".join(b" ".join(b"%d" % each for each in some) for some in (self.pixels.shape, self.more) if some)
        return head + b"\0" + np.ascontiguousarray(self.pixels).data


class Seen(NamedTuple):
    """An image's inputs, and the text that stands for it in a prompt."""

    parts: tuple[Part, ...]
    text: str


class Form(Protocol):
    """How a kind of model reads images. `mark` stands for one in a prompt's text, `shown` in a message of a conversation; `tokens`
    stand for inputs, the first of them for vectors."""

    @property
    def mark(self) -> str: ...
    @property
    def shown(self) -> str: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...

    def seen(self, picture: np.ndarray, name: str, is_alone: bool) -> Seen:
        """What is made of an image uint8 [height, width, 3]; `is_alone`: in its prompt. Raises MediaError."""

    def spelled(self, part: Part) -> np.ndarray:
        """The tokens int64 [n] that stand for an input."""


class OwnForm(Form, Protocol):
    """One of a tower of ours."""

    def numbers(self, part: Part) -> np.ndarray:
        """What a tower reads of an input: float32 [N, 3, height, width]."""


class FilmForm(Protocol):
    """How a kind of model reads videos. `mark` and `shown` as of a Form."""

    @property
    def mark(self) -> str: ...
    @property
    def shown(self) -> str: ...

    def customized(self, custom: Custom, name: str) -> FilmForm:
        """The form for one request's videos. Raises MediaError where it asks for more than the model's files have."""

    def choose(self, clip: Clip, name: str) -> Choice:
        """The frames that transformers takes, in the size that it brings them to. Raises MediaError."""

    def seen(self, film: Film, name: str) -> Seen:
        """A film's inputs, and the text that stands for it. Raises MediaError."""


def part_in(file: bytes) -> Part:
    """The input that a file stores. Raises ValueError."""
    head, zero, _ = file[:HEAD_MAX].partition(b"\0")
    shape, *more = (tuple(map(int, some.split())) for some in head.split(b"/"))
    if not zero:
        raise ValueError("no sizes")
    return Part(np.frombuffer(file, np.uint8, offset=len(head) + 1).reshape(shape), more[0] if more else ())


def with_images(text: str, images: list[str], mark: str, kind: str = "images") -> str:
    """The text with each image's in the place of its mark, in order. Raises MediaError where there are more or fewer."""
    pieces = text.split(mark)
    if len(pieces) != len(images) + 1:
        raise MediaError(f"the prompt has {len(pieces) - 1} times {mark} and {len(images)} {kind}: they must be as many")
    return pieces[0] + "".join(image + piece for image, piece in zip(images, pieces[1:], strict=True))
