"""The reader: from the images of one prompt to the text that stands for them, and to the places of their tiles among its tokens.

Owns the order of the two and what must agree: as many marks in the text as images, as many tokens as a tile has vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vnext.media.pictures import MediaError, picture_of
from vnext.media.sources import MediaRules, bytes_at
from vnext.media.store import MediaStore, folder_of
from vnext.media.tiles import Tiles, form_in, tiles_of, with_images
from vnext.state.store.inputs import Input, with_inputs

IMAGES_MAX = 32
"""Of one prompt."""


class ImageReader:
    """Reads images for one model, and puts their tiles where its ranks find them. Any thread may call it."""

    def __init__(self, model_path: Path, sizes: str, addresses: Iterable[str], rules: MediaRules = MediaRules()) -> None:
        """`sizes`: the token of an image and how many stand for a tile, as the engine tells them; `addresses`: of the engines.
        Raises MediaError."""
        self._token, count = map(int, sizes.split())
        self._form, self._rules = form_in(model_path, count), rules
        self._store = MediaStore(map(folder_of, addresses))

    def at(self, addresses: Sequence[tuple[str, str]]) -> list[Tiles]:
        """The tiles of the images at (address, name). Blocks. Raises MediaError."""
        if len(addresses) > IMAGES_MAX:
            raise MediaError(f"{addresses[IMAGES_MAX][1]} is one too many: a prompt may have {IMAGES_MAX} images")
        return [self.of(picture_of(bytes_at(address, self._rules, name), name), name) for address, name in addresses]

    def seen(self, image: Any, name: str) -> Tiles:
        """`of` an image in any form: an address, a file's bytes, an array, or an image of Pillow. Raises MediaError."""
        if isinstance(image, str):
            image = bytes_at(image, self._rules, name)
        if isinstance(image, bytes):
            image = picture_of(image, name)
        elif hasattr(image, "convert"):
            image = np.asarray(image.convert("RGB"))
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,) or not image.size:
            raise MediaError(f"{name} is no image: give an address, a file's bytes, Pillow's image or uint8 [height, width, 3]")
        return self.of(image, name)

    def of(self, picture: np.ndarray, name: str) -> Tiles:
        """The tiles of an image uint8 [height, width, 3], where the ranks find them. Blocks. Raises MediaError."""
        tiles = tiles_of(picture, self._form, name)
        self._store.put(tiles.pixels, name)
        return tiles

    def written(self, text: str, images: Sequence[Tiles]) -> str:
        """A prompt's text in which each mark is the text of its image. Raises MediaError."""
        return with_images(text, list(images), self._form)

    def packed(self, tokens: Sequence[int], images: Sequence[Tiles]) -> bytes:
        """The tokens of a written prompt as the engine gets them: int32 bytes, in which tiles are inputs. Raises MediaError where
        the tokenizer is another model's."""
        digests, count = [digest for each in images for digest in each.digests], self._form.tokens
        marks = [place for place, token in enumerate(tokens) if token == self._token]
        firsts = marks[::count]
        if marks != [place for first in firsts for place in range(first, first + count)] or len(firsts) != len(digests):
            raise MediaError(f"the tokenizer makes {len(marks)} tokens of images where the model has {count * len(digests)}")
        inputs = [Input(first, count, digest) for first, digest in zip(firsts, digests)]
        return with_inputs(np.array(tokens, dtype=np.int32), inputs).tobytes()
