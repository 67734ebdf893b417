"""Theirs: an image as the processor of the installed transformers reads it, of a model whose tower transformers computes.

Owns what is asked of that processor: the text that stands for an image, its tokens, and the arrays that the model is given. An
image is one input, from its first vector's token to its last one's: what stands between is a part of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import transformers
from PIL import Image
from transformers import BaseImageProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto import image_processing_auto, processing_auto

from vnext.base.installed import first_line
from vnext.media.pictures import MediaError
from vnext.media.pixels import check_ratio
from vnext.media.seen import Part, Seen
from vnext.media.transforms import module_of

FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Read(NamedTuple):
    """What a processor makes of an image: text, its tokens int64 [N], the `span` of them that is the image's input, in how many
    `rows` these lie (0: none known), and what the model is given beside them."""

    text: str
    tokens: np.ndarray
    span: slice
    rows: int
    given: dict[str, np.ndarray]


class Heard:
    """A tokenizer that keeps the last text which it was given."""

    def __init__(self, own: PreTrainedTokenizerBase) -> None:
        self._own, self.text = own, ""

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)

    def __call__(self, text: list[str], **how: object) -> object:
        self.text = text[0]
        return self._own(text, **how)


class TheirForm:
    """A Form (seen.py). `between`: what stands once between images that follow one another. Any thread may call it."""

    def __init__(self, folder: Path, tokens: tuple[int, ...]) -> None:
        """`tokens` stand for vectors. Raises MediaError."""
        self.tokens, self._lock = tokens, threading.Lock()
        self._last: tuple[np.ndarray | None, Read | None] = (None, None)
        self._files = blake2b(b"\0".join(path.read_bytes() for name in FILES if (path := folder / name).is_file())).hexdigest()
        try:
            self._processor = _processor_in(folder)
            self.mark = self.shown = str(vars(self._processor)["image_token"])
            self.between = str(getattr(self._processor, "fake_image_token", ""))
            self._around = tuple(str(getattr(self._processor, f"image_id_{side}_token", "")) for side in ("start", "end"))
        except Exception as error:  # foreign code may raise anything
            by = f"transformers {transformers.__version__}"
            raise MediaError(f"{by} cannot make the processor in {folder}: {first_line(error)}") from error

    def __repr__(self) -> str:
        return f"TheirForm({self.tokens}, transformers {transformers.__version__}, {self._files})"

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        check_ratio(picture.shape, name)
        try:
            found = self.read(picture)
            return Seen((Part(picture, rows=found.rows),), found.text)
        except Exception as error:  # as above
            raise MediaError(f"{name} cannot be read by this model's processor: {first_line(error)}") from error

    def numbered(self, texts: list[str]) -> list[str]:
        """The texts of a prompt's images with each one's number, where they have any: each was read as the first one."""
        begin, end = self._around
        return [text.replace(f"{begin}0{end}", f"{begin}{at}{end}", 1) if begin else text for at, text in enumerate(texts)]

    def spelled(self, part: Part) -> np.ndarray:
        found = self.read(part.pixels)
        return found.tokens[found.span]

    def read(self, picture: np.ndarray) -> Read:
        """What the processor makes of an image uint8 [height, width, 3]. It may raise anything."""
        with self._lock:
            last, found = self._last
            if last is picture and found is not None:
                return found
            made = self._processor(text=self.mark, images=[Image.fromarray(picture)], return_tensors="np", add_special_tokens=False)
            tokens = np.asarray(made["input_ids"][0], np.int64)
            places = np.flatnonzero(np.isin(tokens, self.tokens))
            if not len(places):
                raise ValueError(f"its text has no token {self.tokens[0]}, which config.json names as that of images")
            given = {name: np.asarray(each) for name, each in made.items() if name not in OF_TEXT}
            span = slice(int(places[0]), int(places[-1]) + 1)
            found = Read(self._processor.tokenizer.text, tokens, span, self._rows_of(given, span.stop - span.start), given)
            self._last = picture, found
            return found


    def _rows_of(self, given: Mapping[str, np.ndarray], count: int) -> int:
        """In how many rows of patches that were joined so many vectors lie, 0 where the processor does not tell."""
        side = int(getattr(self._processor.image_processor, "merge_size", 1))
        _, rows, columns = given.get("image_grid_thw", np.zeros((1, 3), np.int64))[0] // side
        return int(rows) if rows * columns == count else 0


def _processor_in(folder: Path) -> ProcessorMixin:
    """The processor of the model in a folder, but not its part for videos."""
    model_type = str(json.loads((folder / "config.json").read_text())["model_type"])
    settings, _ = ProcessorMixin.get_processor_dict(folder)
    kind = getattr(transformers, vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(model_type) or settings["processor_class"])
    parts = {
        "image_processor": _image_processor_in(folder, model_type),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True),
    }
    own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    parts["video_processor"] = parts["image_processor"]  # which some ask for settings, and no video
    given = [parts.get(name) for name in kind.get_attributes()]
    found: ProcessorMixin = cast(type[ProcessorMixin], own).from_args_and_dict(given, settings)
    found.tokenizer = Heard(found.tokenizer)
    return found


def _image_processor_in(folder: Path, model_type: str) -> BaseImageProcessor:
    """By Pillow, whatever is installed beside it; by torch where transformers has none by Pillow."""
    names = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"].get(model_type)
    if names is None or "pil" in names:
        found: BaseImageProcessor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        return found
    own: type[BaseImageProcessor] = vars(module_of(model_type))[names["torchvision"]]
    return own.from_pretrained(folder, local_files_only=True)
