"""The reader: from the images, or sounds, of one prompt to the text that stands for them, and to their places among its tokens.

Owns the order of the two and what must agree: as many marks in the text as images, as many tokens as inputs have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import numpy as np

from vnext.media import anyres, grid, rows, tiles, whole
from vnext.media.custom import NOT_CUSTOM, Custom
from vnext.media.films import film_of
from vnext.media.pictures import MediaError, picture_of, pixels_of
from vnext.media.seen import FilmForm, Form, OwnForm, Seen, with_images
from vnext.media.sounds import SoundForm, file_of
from vnext.media.sources import MediaRules, bytes_at
from vnext.media.store import MediaStore, folder_of
from vnext.state.store.inputs import Input, with_inputs

if TYPE_CHECKING:
    from PIL.Image import Image

    from vnext.media.theirs import TheirForm, TheirSounds

FORMS: Mapping[str, Callable[..., OwnForm]] = MappingProxyType(
    {
        "anyres": anyres.form_in, "grid": grid.form_in, "omni": grid.omni_in, "capitals": grid.capitals_in, "rows": rows.form_in,
        "tiles": tiles.form_in, "whole": whole.form_in,
    }
)  # fmt: skip
"""By the name that a tower's configuration gives."""
IMAGES_MAX = 32
"""Of one prompt, videos among them."""
READ = MappingProxyType({"image": "images", "video": "videos", "audio": "sounds"})
"""Kinds of inputs -> several of them."""
Place: TypeAlias = tuple[bytes, int, int]
"""An input's digest, how many tokens it has, and how many of them are the form's."""
THEIRS, HEARD, SOUNDS = "theirs", "heard", "sounds"
"""The names of the forms of models for which transformers' processors read images, or sounds, and of others that read sounds."""


def form_of(folder: Path, sizes: str) -> Form:
    """The form of the images of the model in a folder; `sizes`: its name, the token of an image and other numbers. Raises
    MediaError."""
    found = their_form(folder, sizes) if sizes.split()[0] == THEIRS else own_form(folder, sizes)
    return cast("Form", found)


def their_form(folder: Path, sizes: str) -> TheirForm | TheirSounds:
    """The form of the images or sounds of a model whose tower transformers computes. Raises MediaError."""
    from vnext.media.theirs import TheirForm, TheirSounds  # loads transformers

    name, *tokens = sizes.split()
    return (TheirForm if name == THEIRS else TheirSounds)(folder, tuple(map(int, tokens)))


def sounds_of(folder: Path, sizes: str) -> SoundForm | TheirSounds:
    """The form of the sounds of the model in a folder. Raises MediaError."""
    if sizes.split()[0] == HEARD:
        return cast("TheirSounds", their_form(folder, sizes))
    token, samples = map(int, sizes.split()[1:])
    return SoundForm(token, samples)


def own_form(folder: Path, sizes: str) -> OwnForm:
    """The same, of a tower of ours."""
    name, *numbers = sizes.split()
    return FORMS[name](folder, *map(int, numbers))


class Shown(NamedTuple):
    """An image, a video or a sound, where ranks find it: the text that stands for it, its inputs, and which of READ it is."""

    text: str
    inputs: tuple[Place, ...]
    kind: str


class ImageReader:
    """Reads images, or sounds, for one model, and puts their inputs where its ranks find them. `shown` stands for each in a message
    of a conversation, by the kinds that it reads. Any thread may call it."""

    def __init__(self, model_path: Path, sizes: str, addresses: Iterable[str], rules: MediaRules = MediaRules()) -> None:
        """`sizes`: the form of images, of sounds or of both, as the engine tells them; `addresses`: of the engines. Raises
        MediaError."""
        forms = {form.split()[0] in (SOUNDS, HEARD): form for form in sizes.split(", ")}
        self._form = form_of(model_path, forms[False]) if False in forms else None
        self._sounds = sounds_of(model_path, forms[True]) if True in forms else None
        self._store, self._rules = MediaStore(map(folder_of, addresses)), rules
        self._films: FilmForm | None = getattr(self._form, "films", None)
        known = {"image": self._form, "video": self._films, "audio": self._sounds}
        self.shown = {kind: form.shown for kind, form in known.items() if form is not None}
        self._shares = self._form is not None and self._films is not None and len(self._form.tokens) == 1

    @property
    def kind(self) -> str:
        """What it reads, videos aside."""
        return " and ".join(READ[kind] for kind in ("image", "audio") if kind in self.shown)

    def bytes_at(self, address: str, name: str) -> bytes:
        """The file at an address. Blocks, for seconds where that is elsewhere. Raises MediaError."""
        return bytes_at(address, self._rules, name)

    def film(self, video: object, name: str, custom: Custom = NOT_CUSTOM) -> Shown:
        """A video in any form: an address, a file's bytes, or (frames, how many of them a second). Blocks. Raises MediaError."""
        if (form := self._films) is None:
            raise self._unread("a video", name)
        form = form.customized(custom, name)
        if isinstance(video, str):
            video = self.bytes_at(video, name)
        return self._kept(form.seen(film_of(video, name, lambda clip: form.choose(clip, name)), name), name, "video")

    def heard(self, sound: object, name: str, custom: Custom = NOT_CUSTOM) -> Shown:
        """A sound in any form: an address, a file's bytes, or (samples [N], their rate). Blocks. Raises MediaError."""
        if (form := self._sounds) is None:
            raise self._unread("a sound", name)
        if custom != NOT_CUSTOM:
            raise MediaError(f"{name} is read in one way only: leave mm_processor_kwargs and media_io_kwargs out")
        found = form.heard(self.bytes_at(sound, name) if isinstance(sound, str) else sound, name)
        [digest] = self._store.put([file_of(found.samples)], name, [(None if self._form is None else 0, None)])
        return Shown(found.text, ((digest, found.length, found.vectors),), "audio")

    def _unread(self, kind: str, name: str) -> MediaError:
        reads = " and ".join(READ[each] for each in self.shown)
        return MediaError(f"{name} is {kind}, and this model reads {reads} only")

    def seen(self, image: object, name: str, is_alone: bool, custom: Custom = NOT_CUSTOM) -> Shown:
        """An image in any form: an address, a file's bytes, an array, or an image of Pillow. Blocks. Raises MediaError."""
        if (form := self._form) is None:
            raise self._unread("an image", name)
        if isinstance(image, str):
            image = self.bytes_at(image, name)
        if isinstance(image, bytes):
            image = picture_of(image, name)
        elif hasattr(image, "convert"):
            image = pixels_of(cast("Image", image), name)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape[2:] != (3,) or not image.size:
            raise MediaError(f"{name} is no image: give an address, a file's bytes, Pillow's image or uint8 [height, width, 3]")
        if custom.min_pixels or custom.max_pixels:
            if not isinstance(form, grid.GridForm):
                raise MediaError(f"{name} has the size that this model reads: leave min_pixels and max_pixels out")
            form = form.customized(custom, name)
        return self._kept(form.seen(image, name, is_alone), name, "image")

    def _kept(self, seen: Seen, name: str, kind: str) -> Shown:
        assert self._form is not None, "images and videos have asked"
        digests = self._store.put([part.file for part in seen.parts], name, [(part.rows or None, part.step) for part in seen.parts])
        spelled = [self._form.spelled(part) for part in seen.parts]
        counts = [int(np.isin(tokens, self._form.tokens).sum()) for tokens in spelled]
        return Shown(seen.text, tuple(zip(digests, map(len, spelled), counts, strict=True)), kind)

    def written(self, text: str, images: Sequence[Shown]) -> str:
        """A prompt's text in which each mark is the text of its image, video or sound. Raises MediaError."""
        texts = {kind: [image.text for image in images if image.kind == kind] for kind in READ}
        if self._shares and texts["image"] and texts["video"]:
            raise MediaError("the prompt has images and videos, and this model reads either: leave one of the two out")
        if self._films is not None:
            text = with_images(text, texts["video"], self._films.mark, "videos")
        if self._sounds is not None:
            text = with_images(text, texts["audio"], self._sounds.mark, SOUNDS)
        if self._form is None or (self._shares and texts["video"]):
            return text  # a video's frames are images
        text = with_images(text, getattr(self._form, "numbered", list)(texts["image"]), self._form.mark, "images")
        between = getattr(self._form, "between", "")
        return text.replace(2 * between, between) if between else text

    def packed(self, tokens: Sequence[int], images: Sequence[Shown]) -> bytes:
        """The tokens of a written prompt as the engine gets them: int32 bytes, in which inputs are. Raises MediaError where the
        tokenizer is another model's."""
        given, inputs = np.array(tokens, dtype=np.int32), list[Input]()
        kinds = dict.fromkeys(() if self._form is None else self._form.tokens, "image")
        if self._form is not None and self._films is not None and not self._shares:
            kinds[self._form.tokens[-1]] = "video"
        kinds |= {} if self._sounds is None else {self._sounds.tokens[0]: "audio"}
        places, behind, queues = np.flatnonzero(np.isin(given, [*kinds])), 0, {kind: deque[Place]() for kind in READ}
        for image in images:
            queues[image.kind if image.kind in kinds.values() else "image"].extend(image.inputs)
        while behind < len(places) and (queue := queues[kinds[int(given[places[behind]])]]):
            digest, length, count = queue.popleft()
            own = places[behind : behind + count]
            if len(own) < count or own[-1] - own[0] != length - 1:
                break
            inputs.append(Input(int(own[0]), length, digest))
            behind += count
        wanted = sum(count for image in images for _, _, count in image.inputs)
        if behind != wanted or len(places) != wanted or any(queues.values()):
            raise MediaError(f"the tokenizer makes {len(places)} tokens of {self.kind} where the model has {wanted}")
        return with_inputs(given, inputs).tobytes()
