"""Pixels: what preprocessor_config.json says of numbers and sizes, and an image's pixels resized and made numbers.

Numbers are transformers': each resizing is Pillow's, of uint8 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vnext.base.spelling import reason
from vnext.media.pictures import MediaError

FORM_FILE = "preprocessor_config.json"
EDGE_MAX = 4096
RATIO_MAX = 200
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
RESCALED = 1 / 255
HALVES = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class PixelForm(NamedTuple):
    """How pixels are resized, and made numbers: times `factor`, less `mean`, by `deviation`."""

    resample: int = LANCZOS
    factor: float = RESCALED
    mean: tuple[float, ...] = HALVES
    deviation: tuple[float, ...] = HALVES


CLIP = PixelForm(BICUBIC, mean=CLIP_MEAN, deviation=CLIP_DEVIATION)


def settings_in(folder: Path, file: str = FORM_FILE) -> dict[str, Any]:
    """A model's preprocessor_config.json, or another file, {} where it has none. Raises MediaError."""
    path = folder / file
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise MediaError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise MediaError(f"{path} is no object of JSON")
    return found


def edge(sizes: object, key: str, name: str, most: int = EDGE_MAX) -> int:
    """A length in pixels among sizes. Raises MediaError for what is no number from 1 to `most`."""
    found = sizes.get(key) if isinstance(sizes, Mapping) else None
    if not isinstance(found, int) or not 0 < found <= most:
        raise MediaError(f"{FORM_FILE}: {name}.{key} is {found!r}: it must be 1 to {most}")
    return found


def pixel_form(raw: Mapping[str, object], usual: PixelForm = PixelForm()) -> PixelForm:
    """What preprocessor_config.json says of pixels. Raises MediaError for what is no number."""

    def numbers(key: str, does: str, common: tuple[float, ...], neutral: float) -> tuple[float, ...]:
        found = raw.get(key) or list(common) if raw.get(does, True) else [neutral] * 3
        if not isinstance(found, list) or len(found) != 3 or not all(isinstance(each, int | float) for each in found):
            raise MediaError(f"{FORM_FILE}: {key} is {found!r}: it must be three numbers")
        return tuple(float(each) for each in found)

    factor, resample = raw.get("rescale_factor", RESCALED), raw.get("resample", usual.resample)
    if not isinstance(factor, int | float) or not isinstance(resample, int):
        raise MediaError(f"{FORM_FILE}: rescale_factor {factor!r} and resample {resample!r} must be numbers")
    return PixelForm(
        resample=resample,
        factor=factor if raw.get("do_rescale", True) else 1.0,
        mean=numbers("image_mean", "do_normalize", usual.mean, 0.0),
        deviation=numbers("image_std", "do_normalize", usual.deviation, 1.0),
    )


def check_ratio(shape: tuple[int, ...], name: str) -> None:
    """Raise MediaError for an image, of height and width and more, that is far longer than wide."""
    height, width, *_ = shape
    if max(height, width) > RATIO_MAX * min(height, width):
        raise MediaError(f"{name} is {width} x {height} pixels: no side may be more than {RATIO_MAX} times the other")


def resized(picture: np.ndarray, height: int, width: int, form: PixelForm) -> np.ndarray:
    """An image uint8 [H, W, 3] in another size."""
    from PIL import Image

    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling(form.resample)))


def numbers_of(pixels: np.ndarray, form: PixelForm) -> np.ndarray:
    """What a tower reads of images uint8 [N, height, width, 3]: float32 [N, 3, height, width]."""
    scaled = (pixels.astype(np.float64) * form.factor).astype(np.float32)
    normal = (scaled - np.array(form.mean, np.float32)) / np.array(form.deviation, np.float32)
    return np.ascontiguousarray(normal.transpose(0, 3, 1, 2))
