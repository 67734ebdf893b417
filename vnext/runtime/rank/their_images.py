"""Images at a rank whose tower transformers computes, part by part. Owns its dtype, and how one that fails is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from vnext.base.installed import first_line
from vnext.kernels.cpu import native
from vnext.kernels.cpu.native import Level
from vnext.media.pictures import MediaError
from vnext.media.seen import part_in
from vnext.media.store import kept_in
from vnext.media.theirs import Read, TheirForm
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.hosted.seeing import TheirTower, size_of
from vnext.models.layers.tower import Parts
from vnext.models.outside import parts_seen
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.images import KEPT_BYTES, Encoded, Inputs, open_inputs

TRIED = 64
"""Pixels along the shorter side of the image that a tower is tried with."""
BFLOAT16 = (Level.AVX512_BF16, Level.AMX, Level.NEON_BF16)
"""Instruction sets with products of bfloat16."""
log = logging.getLogger(__name__)


class TheirImages(Inputs):
    """A tower of images that transformers computes."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of images. Raises ModelError."""
        assert config.tower is not None, "a model that reads images"
        self._folder = folder
        super().__init__(config.tower.image_token, kept_bytes)
        try:
            self._form = TheirForm(path, (config.tower.image_token, *config.tower.more_tokens))
        except MediaError as error:
            raise ModelError(f"{error}.") from error
        own = tower_dtype(dtype)
        self.form, self._tower, self._dtype = f"{self._form}, {own}", TheirTower(path, config, own), dtype
        read = self._read(np.zeros((TRIED, 2 * TRIED, 3), np.uint8))
        with torch.inference_mode():
            self._tower.vectors(read.tokens, read.span, read.given, read.rows)
        share, count = max(3 * config.tower.side**2 / size_of(read.given), 1.0), np.isin(read.tokens, self._form.tokens).sum()
        self._products = self._tower.products(read.given, share) / (count * share)

    def cost(self, config: ModelConfig) -> float:
        """As Inputs, by what was counted of an image that is not smaller than the model's usual one."""
        assert config.tower is not None
        return config.input_cost * float(self._products) / config.tower.products

    def encoded(self, digest: bytes, units: int = 1) -> Parts:
        """As Inputs, of an image."""
        read = self._read(part_in(kept_in(self._folder, digest, "image")).pixels)
        vectors = yield from self._tower.parts(read.tokens, read.span, read.given, read.rows)
        is_vector = torch.from_numpy(np.isin(read.tokens[read.span], self._form.tokens))
        return Encoded(vectors.to(self._dtype), torch.where(is_vector, self._token, torch.from_numpy(read.tokens[read.span])))

    def _read(self, picture: np.ndarray) -> Read:
        try:
            return self._form.read(picture)
        except Exception as error:  # foreign code may raise anything
            raise MediaError(f"the model's processor cannot read an image: {first_line(error)}") from error


def tower_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what torch computes a tower of a model in `dtype`: products of bfloat16 take it six times as long as those of float32 on a
    processor that has none."""
    has_bfloat16 = native.is_built() and native.level() in BFLOAT16
    return dtype if has_bfloat16 else torch.float32


def open_their_inputs(settings: RankSettings, path: Path, config: ModelConfig, numbers: Mapping[str, str]) -> Inputs:
    """As open_inputs, by transformers."""
    found = open_inputs(settings, path, config, numbers, TheirImages)
    if settings.rank == 0:
        name, _ = parts_seen(config.architecture)
        log.warning("The code of transformers computes images of %s, by one thread.", name)
    return found
