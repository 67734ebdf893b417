"""Theirs: an image or a sound as the installed transformers' processor reads it, of a model whose tower transformers computes.

Owns what is asked of that processor: the text that stands for one, its tokens, and the arrays that the model is given. Each is one
input, from its first vector's token to its last one's: what stands between is a part of it.
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
from transformers import BaseImageProcessor, FeatureExtractionMixin, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto import image_processing_auto, processing_auto

from vnext.base.installed import first_line
from vnext.media.pictures import MediaError
from vnext.media.pixels import check_ratio
from vnext.media.seen import Part, Seen, part_in
from vnext.media.sounds import SAMPLE_RATE, Listened, read_whole, samples_in
from vnext.media.transforms import module_of
from vnext.state.store.inputs import TOKENS_MIN

FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
TRIED, TRIED_S = 64, 2
"""Pixels along the shorter side of the image, and seconds of the sound, that a tower is tried with."""
HEARERS = {"feature_extractor", "audio_processor"}
"""The parts of processors that read sounds."""
SECONDS_MAX = 600
"""Of a sound, where its processor has no bound of its own."""


class Read(NamedTuple):
    """What a processor makes of an input: text, its tokens int64 [N], the `span` of them that is the input's, in how many `rows`
    these lie (0: none known), and what the model is given beside them."""

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


class TheirProcessor:
    """A model's processor, which knows what it read last. `kind`: of what it reads; `member`: of the processor, has the mark that
    stands for one; `tried`: one for a first trial. Any thread may call it."""

    kind: str
    member: str
    tried: np.ndarray

    def __init__(self, folder: Path, tokens: tuple[int, ...]) -> None:
        """`tokens` stand for vectors. Raises MediaError."""
        self.tokens, self._lock = tokens, threading.Lock()
        self._last: tuple[np.ndarray | None, Read | None] = (None, None)
        self._files = blake2b(b"\0".join(path.read_bytes() for name in FILES if (path := folder / name).is_file())).hexdigest()
        try:
            self._processor = _processor_in(folder)
            self.mark = self.shown = str(vars(self._processor)[self.member])
        except Exception as error:  # foreign code may raise anything
            by = f"transformers {transformers.__version__}"
            raise MediaError(f"{by} cannot make the processor in {folder}: {first_line(error)}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tokens}, transformers {transformers.__version__}, {self._files})"

    def read(self, one: np.ndarray) -> Read:
        """What the processor makes of an input. It may raise anything."""
        with self._lock:
            last, found = self._last
            if last is one and found is not None:
                return found
            made = self._processor(text=self.mark, add_special_tokens=False, **self._asked(one))
            tokens = np.asarray(made["input_ids"][0], np.int64)
            places = np.flatnonzero(np.isin(tokens, self.tokens))
            if not len(places):
                raise ValueError(f"its text has no token {self.tokens[0]}, which config.json names as that of {self.kind}s")
            given = {name: np.asarray(each) for name, each in made.items() if name not in OF_TEXT}
            span = slice(int(places[0]), int(places[-1]) + 1)
            found = Read(self._processor.tokenizer.text, tokens, span, self._rows_of(given, span.stop - span.start), given)
            self._last = one, found
            return found

    def _asked(self, one: np.ndarray) -> dict[str, object]:
        """An input as the processor takes it, and how."""
        raise AssertionError("a kind of input says how it is asked")

    def _rows_of(self, given: Mapping[str, np.ndarray], count: int) -> int:
        """In how many rows of patches that were joined so many vectors lie, 0 where the processor does not tell."""
        return 0


class TheirForm(TheirProcessor):
    """A Form (seen.py). `between`: what stands once between images that follow one another."""

    kind, member = "image", "image_token"
    tried = np.zeros((TRIED, 2 * TRIED, 3), np.uint8)

    @property
    def between(self) -> str:
        return str(getattr(self._processor, "fake_image_token", ""))

    def stored(self, file: bytes) -> np.ndarray:
        """The image that a file of the store has."""
        return part_in(file).pixels

    def seen(self, picture: np.ndarray, name: str, is_alone: bool = True) -> Seen:
        check_ratio(picture.shape, name)
        try:
            found = self.read(picture)
            return Seen((Part(picture, rows=found.rows),), found.text)
        except Exception as error:  # as above
            raise MediaError(f"{name} cannot be read by this model's processor: {first_line(error)}") from error

    def numbered(self, texts: list[str]) -> list[str]:
        """The texts of a prompt's images with each one's number, where they have any: each was read as the first one."""
        begin, end = (str(getattr(self._processor, f"image_id_{side}_token", "")) for side in ("start", "end"))
        return [text.replace(f"{begin}0{end}", f"{begin}{at}{end}", 1) if begin else text for at, text in enumerate(texts)]

    def spelled(self, part: Part) -> np.ndarray:
        found = self.read(part.pixels)
        return found.tokens[found.span]

    def _asked(self, one: np.ndarray) -> dict[str, object]:
        return {"images": [Image.fromarray(one)], "return_tensors": "np"}

    def _rows_of(self, given: Mapping[str, np.ndarray], count: int) -> int:
        """In how many rows of patches that were joined so many vectors lie, 0 where the processor does not tell."""
        side = int(getattr(self._processor.image_processor, "merge_size", 1))
        _, rows, columns = given.get("image_grid_thw", np.zeros((1, 3), np.int64))[0] // side
        return int(rows) if rows * columns == count else 0


class TheirSounds(TheirProcessor):
    """How a model reads sounds among the tokens of its prompts, as a SoundForm."""

    kind, member = "sound", "audio_token"
    tried = np.zeros(TRIED_S * SAMPLE_RATE, np.float32)

    def __init__(self, folder: Path, tokens: tuple[int, ...]) -> None:
        super().__init__(folder, tokens)
        extractor = next(each for name in HEARERS if (each := getattr(self._processor, name, None)))
        if (rate := getattr(extractor, "sampling_rate", SAMPLE_RATE)) != SAMPLE_RATE:
            raise MediaError(f"the processor in {folder} reads sounds at {rate} Hz, and vnext at {SAMPLE_RATE}")
        extractor.dither = 0.0  # of random numbers, which nobody can draw again
        chunk = int(getattr(extractor, "chunk_length", 1))  # what is more than whole ones it leaves out
        self.samples = int(getattr(self._processor, "max_audio_len", SECONDS_MAX)) // chunk * chunk * SAMPLE_RATE

    def stored(self, file: bytes) -> np.ndarray:
        """The sound that a file of the store has."""
        return samples_in(file)

    def heard(self, sound: object, name: str) -> Listened:
        """As a SoundForm. Raises MediaError."""
        samples = read_whole(sound, name, self.samples)
        try:
            found = self.read(samples)
        except Exception as error:  # as above
            raise MediaError(f"{name} cannot be read by this model's processor: {first_line(error)}") from error
        if len(spelled := found.tokens[found.span]) < TOKENS_MIN:
            raise MediaError(f"{name} has {len(samples) / SAMPLE_RATE:.2f} seconds: the model reads longer ones")
        return Listened(samples, found.text, len(spelled), int(np.isin(spelled, self.tokens).sum()))

    def _asked(self, one: np.ndarray) -> dict[str, object]:
        return {"audio": [one], "sampling_rate": SAMPLE_RATE, "return_tensors": "pt"}


def _processor_in(folder: Path) -> ProcessorMixin:
    """The processor of the model in a folder, but not its part for videos."""
    model_type = str(json.loads((folder / "config.json").read_text())["model_type"])
    settings, _ = ProcessorMixin.get_processor_dict(folder)
    kind = getattr(transformers, vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(model_type) or settings["processor_class"])
    parts: dict[str, object] = {"tokenizer": transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)}
    if listens := HEARERS & set(kind.get_attributes()):
        extractor: FeatureExtractionMixin = transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        parts |= dict.fromkeys(listens, extractor)
    if "image_processor" in kind.get_attributes():
        parts["image_processor"] = parts["video_processor"] = _image_processor_in(folder, model_type)  # some ask it for settings
    own = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
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
