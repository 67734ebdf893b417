"""The reader: from the images of one prompt to the text that stands for them, and to the places of their inputs among its tokens.

Owns the order of the two and what must agree: as many marks in the text as images, as many tokens as inputs have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vnext.media import anyres, grid, rows, tiles, whole
from vnext.media.pictures import MediaError, picture_of
from vnext.media.seen import Form, with_images
from vnext.media.sources import MediaRules, bytes_at
from vnext.media.store import MediaStore, folder_of
from vnext.state.store.inputs import Input, with_inputs

FORMS: Mapping[str, Callable[..., Form]] = MappingProxyType(
    {"anyres": anyres.form_in, "grid": grid.form_in, "rows": rows.form_in, "tiles": tiles.form_in, "whole": whole.form_in}
)
"""By the name that a tower's configuration gives."""
IMAGES_MAX = 32
"""Of one prompt."""


def form_of(folder: Path, sizes: str) -> Form:
    """The form of the images of the model in a folder; `sizes`: its name, the token of an image and other numbers. Raises
    MediaError."""
    name, *numbers = sizes.split()
    return FORMS[name](folder, *map(int, numbers))


class Shown(NamedTuple):
    """An image where ranks find it: the text that stands for it, and (digest, tokens) of each of its inputs."""

    text: str
    inputs: tuple[tuple[bytes, int], ...]


class ImageReader:
    """Reads images for one model, and puts their inputs where its ranks find them. Any thread may call it."""

    def __init__(self, model_path: Path, sizes: str, addresses: Iterable[str], rules: MediaRules = MediaRules()) -> None:
        """`sizes`: the form of images, as the engine tells it; `addresses`: of the engines. Raises MediaError."""
        self._form, self._rules = form_of(model_path, sizes), rules
        self._store = MediaStore(map(folder_of, addresses))
        self.mark, self.shown = self._form.mark, self._form.shown

    def at(self, addresses: Sequence[tuple[str, str]]) -> list[Shown]:
        """The images of a prompt at (address, name). Blocks. Raises MediaError."""
        if len(addresses) > IMAGES_MAX:
            raise MediaError(f"{addresses[IMAGES_MAX][1]} is one too many: a prompt may have {IMAGES_MAX} images")
        return [self.seen(address, name, len(addresses) == 1) for address, name in addresses]

    def seen(self, image: object, name: str, is_alone: bool) -> Shown:
        """An image in any form: an address, a file's bytes, an array, or an image of Pillow. Blocks. Raises MediaError."""
        if isinstance(image, str):
            image = bytes_at(image, self._rules, name)
        if isinstance(image, bytes):
            image = picture_of(image, name)
        elif hasattr(image, "convert"):
            image = np.asarray(image.convert("RGB"))
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,) or not image.size:
            raise MediaError(f"{name} is no image: give an address, a file's bytes, Pillow's image or uint8 [height, width, 3]")
        parts, text = self._form.seen(image, name, is_alone)
        digests = self._store.put([part.file for part in parts], name, [part.rows for part in parts])
        return Shown(text, tuple(zip(digests, (len(self._form.spelled(part)) for part in parts))))

    def written(self, text: str, images: Sequence[Shown]) -> str:
        """A prompt's text in which each mark is the text of its image. Raises MediaError."""
        return with_images(text, [image.text for image in images], self.mark)

    def packed(self, tokens: Sequence[int], images: Sequence[Shown]) -> bytes:
        """The tokens of a written prompt as the engine gets them: int32 bytes, in which inputs are. Raises MediaError where the
        tokenizer is another model's."""
        given, inputs = np.array(tokens, dtype=np.int32), list[Input]()
        places, behind = np.flatnonzero(np.isin(given, self._form.tokens)), 0
        for digest, count in (each for image in images for each in image.inputs):
            own = places[behind : behind + count]
            if len(own) < count or own[-1] - own[0] != count - 1:
                break
            inputs.append(Input(int(own[0]), count, digest))
            behind += count
        wanted = sum(count for image in images for _, count in image.inputs)
        if behind != wanted or len(places) != wanted:
            raise MediaError(f"the tokenizer makes {len(places)} tokens of images where the model has {wanted}")
        return with_inputs(given, inputs).tobytes()
