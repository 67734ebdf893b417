"""Images and sounds of a log, which has their digests alone: the vectors that its engine made of them, as files of a disk tier.

A file counts as it does for that engine: it is of the same model, version, settings and numbers, and whole. Nothing is written or
removed. No tower is loaded: a run with other kernels or data types has the recorded vectors, as it has the recorded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from vnext.media.vectors import VectorFiles
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tower_config import THEIRS
from vnext.models.errors import ModelError
from vnext.replay.rerun.model_of_log import KeptAt
from vnext.replay.rerun.numerics import CannotRun
from vnext.runtime.rank.images import Encoded, InputVectors, inputs_form
from vnext.state.events import EngineStarted

IN_MEMORY = 64
"""Inputs whose vectors are."""


def form_there(path: Path, config: ModelConfig, there: Mapping[str, str]) -> str:
    """What of its processor's settings the vectors of an engine with this environment depend on. Raises ModelError."""
    if (tower := config.tower) is None or tower.form not in THEIRS:
        return inputs_form(path, config)
    from vnext.runtime.rank.their_images import form_of_log  # loads transformers

    return form_of_log(path, tower, there.get("dtype", ""), there.get("kernels", ""))


class KeptInputs(InputVectors):
    """The vectors that the engine of a log had."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, started: EngineStarted, kept: KeptAt) -> None:
        """For the model at `path`, whose activations are of `dtype`. Raises CannotRun."""
        tower, sound = config.tower, config.sound
        super().__init__(tower.image_token if tower is not None else sound.token if sound is not None else 0)
        there = started.environment
        try:
            form = form_there(path, config, there)
        except ModelError as error:
            raise CannotRun(str(error)) from error
        numbers = {"dtype": there.get("dtype"), "kernels": there.get("kernels"), "numbers": there.get("batch_invariant")}
        identity = {"model": started.model_digest, "version": kept.version, "form": form, **numbers}
        self._files = None if kept.folder is None else VectorFiles(kept.folder, identity, room_bytes=0)
        self._dtype, self._read = dtype, lru_cache(IN_MEMORY)(self._encoded)

    def why_lacking(self, digest: bytes) -> str:
        """Why there are no vectors of an input, "" where there are."""
        try:
            self._read(digest)
        except CannotRun as error:
            return str(error)
        return ""

    def _found(self, digest: bytes) -> Encoded:
        """Raises CannotRun."""
        return self._read(digest)

    def _encoded(self, digest: bytes) -> Encoded:
        if self._files is None:
            raise CannotRun("the log names no disk tier")
        path = self._files.folder / digest.hex()
        try:
            found = self._files.vectors_in(path.read_bytes(), digest)
        except OSError as error:
            if path.parent.is_dir():
                raise CannotRun(f"they are not in {path.parent}") from error
            raise CannotRun(f"{path.parent.parent} has none of the log's model, version and numbers") from error
        if found is None:
            raise CannotRun(f"{path} is damaged, or another's")
        encoded = Encoded.of(found)
        return encoded._replace(vectors=encoded.vectors.to(self._dtype))
