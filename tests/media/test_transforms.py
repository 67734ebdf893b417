"""What processors ask of torchvision, by torch alone: the numbers are torchvision's, and nothing stays behind under its name."""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vnext.media.transforms import NAMES, module_of

SIZES = ((40, 70, 3), (33, 20, 3), (700, 500, 3), (64, 300, 3))
NUMBERS: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("lfm2_vl", "Lfm2VlImageProcessor"): ({"max_tiles": 4, "tile_size": 256}, "2f875dfca78a73d7acd2f6cf"),
    ("cohere2_vision", "Cohere2VisionImageProcessor"): ({"size": {"height": 64, "width": 64}, "max_patches": 4}, "8602bd8fb6a9d7e5e23b8ec2"),
    ("perception_lm", "PerceptionLMImageProcessor"): ({"tile_size": 56, "max_num_tiles": 4, "resample": 1}, "aff3c0a21c8ee48e06e8ff74"),
    ("kimi_k25", "Kimi_K25ImageProcessor"): ({"max_patches": 64}, "6fd7c5178af91580e96aac4f"),
}
"""What each processor makes of SIZES, by torchvision 0.28.0 with torch 2.13.0."""


@pytest.mark.parametrize("model_type, name", NUMBERS)
def test_numbers_are_those_of_torchvision(model_type: str, name: str) -> None:
    settings, right = NUMBERS[model_type, name]
    processor, made = getattr(module_of(model_type), name)(**settings), blake2b(digest_size=12)
    for size in SIZES:
        picture = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
        for key, each in sorted(processor([Image.fromarray(picture)], return_tensors="np").items()):
            made.update(f"{key} {each.shape} {each.dtype}".encode() + np.ascontiguousarray(each).tobytes())
    assert made.hexdigest() == right
    assert not sys.modules.keys() & set(NAMES) or hasattr(sys.modules[NAMES[0]], "__version__"), "an import has left its stand-in"
