"""Transforms: what image processors of transformers ask of torchvision, by torch alone.

Some of them exist for torchvision only. Of it they use few functions, which compute by torch's own: with these in their place an
image becomes the same numbers, bit for bit, and torchvision need not be installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from PIL.Image import Resampling
from torch.nn.functional import interpolate, pad as padded
from transformers import image_processing_backends

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
"""The modules on the way to `functional`."""
_importing = threading.Lock()


class InterpolationMode(Enum):
    """How `resize` finds the pixels between pixels: by torch's names."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(
    image: torch.Tensor, size: Sequence[int], interpolation: InterpolationMode = InterpolationMode.BILINEAR, antialias: bool = True
) -> torch.Tensor:
    """Images [..., C, H, W] of uint8 or float32 at another size (height, width)."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    channels, height, width = image.shape[-3:]
    flat = image.reshape(-1, channels, height, width)
    found = interpolate(flat, tuple(size), mode=interpolation.value, align_corners=False, antialias=antialias)
    return found.reshape(image.shape[:-2] + torch.Size(size))


def pad(image: torch.Tensor, padding: Sequence[int], fill: float | None = 0, padding_mode: str = "constant") -> torch.Tensor:
    """Images [..., H, W] with so many more pixels at the left, the top, the right and the bottom."""
    left, top, right, bottom = padding
    return padded(image, (left, right, top, bottom), padding_mode, fill or 0)


def normalize(image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Images float32 [..., C, H, W], less the mean of each channel, in its deviations, both [C]."""
    lower = image.sub_ if inplace else image.sub
    return lower(torch.as_tensor(mean)[:, None, None]).div_(torch.as_tensor(std)[:, None, None])


def module_of(model_type: str) -> ModuleType:
    """The module of transformers with a model's image processor, which computes by torchvision where it is installed."""
    name = f"transformers.models.{model_type}.image_processing_{model_type}"
    with _importing:
        if name in sys.modules or find_spec(NAMES[0]) is not None:
            return import_module(name)
        with _lent():
            return import_module(name)


@contextmanager
def _lent() -> Iterator[None]:
    """Let an import find this module as torchvision's; what processors share has it from here on."""
    vars(image_processing_backends).update(
        tvF=sys.modules[__name__],
        pil_torch_interpolation_mapping={Resampling[each.name]: each for each in InterpolationMode},
        is_torchvision_greater_or_equal=lambda version: True,
    )
    lent = {name: ModuleType(name) for name in NAMES}
    vars(lent[NAMES[-1]])["functional"] = sys.modules[__name__]
    sys.modules.update(lent)
    try:
        yield
    finally:
        for name in lent:
            del sys.modules[name]
