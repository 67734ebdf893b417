"""Images or sounds at a rank whose tower transformers computes, part by part. Owns its dtype, and how one that fails is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from vnext.base.installed import first_line
from vnext.kernels.arrays import torch_dtype
from vnext.kernels.cpu import native
from vnext.kernels.cpu.native import Level
from vnext.media.pictures import MediaError
from vnext.media.reader import their_form
from vnext.media.store import kept_in
from vnext.media.theirs import Read, TheirForm, TheirSounds
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import Tower
from vnext.models.errors import ModelError
from vnext.models.hosted.seeing import TheirTower, size_of
from vnext.models.hosted.stepping import PART
from vnext.models.layers.tower import Parts
from vnext.models.outside import parts_seen
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.images import KEPT_BYTES, Encoded, Inputs, open_inputs

BFLOAT16 = tuple(level.name for level in (Level.AVX512_BF16, Level.AMX, Level.NEON_BF16))
"""Instruction sets with products of bfloat16."""
log = logging.getLogger(__name__)


class TheirImages(Inputs):
    """A tower that transformers computes."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of inputs. Raises ModelError."""
        assert config.tower is not None, "a model with a tower"
        self._folder = folder
        super().__init__(config.tower.image_token, kept_bytes)
        try:
            self._form = their_form(path, config.tower.sizes)
            read, half = (self._read(each) for each in (self._form.tried, half_of(self._form.tried)))
        except MediaError as error:
            raise ModelError(f"{error}.") from error
        own = tower_dtype(dtype, native.level().name if native.is_built() else "")
        self.form, self._tower, self._dtype = form_text(self._form, own), TheirTower(path, config, own), dtype
        with torch.inference_mode():
            self._tower.vectors(read.tokens, read.span, read.given, read.rows)
            self._tower.count(half.tokens, half.span, half.given, half.rows)
        share = max(3 * config.tower.side**2 / size_of(read.given), 1.0) if config.tower.form == "theirs" else 1.0
        count = np.isin(read.tokens, self._form.tokens).sum()
        self._products = self._tower.products(size_of(read.given) * share) / (count * share)

    def cost(self, config: ModelConfig) -> float:
        """As Inputs, by what was counted of an image that is not smaller than the model's usual one, or of a sound."""
        assert config.tower is not None
        return config.input_cost * float(self._products) / config.tower.products

    def encoded(self, digest: bytes, units: int = 1) -> Parts:
        """As Inputs."""
        read = self._read(self._form.stored(kept_in(self._folder, digest, self._form.kind)))
        vectors = yield from self._tower.parts(read.tokens, read.span, read.given, read.rows)
        is_vector = torch.from_numpy(np.isin(read.tokens[read.span], self._form.tokens))
        return Encoded(vectors.to(self._dtype), torch.where(is_vector, self._token, torch.from_numpy(read.tokens[read.span])))

    def _read(self, one: np.ndarray) -> Read:
        try:
            return self._form.read(one)
        except Exception as error:  # foreign code may raise anything
            raise MediaError(f"the model's processor cannot read {self._form.kind}s: {first_line(error)}") from error


def half_of(one: np.ndarray) -> np.ndarray:
    """The first half of an image or a sound, along the longer side."""
    return np.array_split(one, 2, int(np.argmax(one.shape)))[0]


def form_text(form: TheirForm | TheirSounds, dtype: torch.dtype) -> str:
    """What of its processor's settings and numbers, and of how it is cut, a tower's vectors depend on."""
    return f"{form}, bands of {PART}, {dtype}"


def tower_dtype(dtype: torch.dtype, kernels: str) -> torch.dtype:
    """In what torch computes a tower of a model in `dtype`, beside kernels of this instruction set: products of bfloat16 take it
    six times as long as those of float32 on a processor that has none."""
    return dtype if kernels in BFLOAT16 else torch.float32


def form_of_log(path: Path, tower: Tower, dtype: str, kernels: str) -> str:
    """The `form` of an engine whose log has this data type and these kernels. Raises ModelError."""
    try:
        return form_text(their_form(path, tower.sizes), tower_dtype(torch_dtype(dtype), kernels))
    except MediaError as error:
        raise ModelError(f"{error}.") from error


def open_their_inputs(settings: RankSettings, path: Path, config: ModelConfig, numbers: Mapping[str, str]) -> Inputs:
    """As open_inputs, by transformers."""
    found = open_inputs(settings, path, config, numbers, TheirImages)
    if settings.rank == 0:
        name, _ = parts_seen(config.architecture)
        log.warning("The code of transformers computes the tower of %s, by one thread.", name)
    return found
