"""Images at a rank: a tower makes vectors of tiles, and these stand in steps where prompts have the tiles' tokens.

Owns the tower and the vectors of the newest tiles, by their digests. A tile is computed alone and whole, in the first step that
computes a part of it, so its vectors have the same bits in any step and on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vnext.media.pictures import MediaError
from vnext.media.store import tile_in
from vnext.media.tiles import form_in, numbers_of
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder import embedded
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.layers.tower import BLOCK_SIZE, encode, page_count
from vnext.models.loading.weights import load_params
from vnext.models.registry import tower_parts

if TYPE_CHECKING:
    from vnext.models.config.tower_config import Tower

KEPT_BYTES = 256 << 20


class Images:
    """The tower of one rank. `computed` counts the vectors that it has made."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of tiles. Raises ModelError."""
        parts = tower_parts(config.architecture)
        assert config.tower is not None, "a model that reads images"
        self._tower: Tower = config.tower
        self._config, self._folder, self._kept_bytes = parts.config(config), folder, kept_bytes
        self._params = load_params(path, self._config, alone(), dtype, "cpu", assemble=parts.assemble)
        self._kv = make_kv_cache(self._config, page_count(self._tower.grid**2), BLOCK_SIZE, dtype, "cpu", alone())
        try:
            self._form = form_in(path, self._tower.vectors)
        except MediaError as error:
            raise ModelError(f"{error}.") from error
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.computed = 0

    def with_vectors(self, batch: ForwardBatch, params: Any, parallel: Parallel) -> ForwardBatch:
        """The batch, tensors, with the embeddings of its tokens, among which vectors of images are. Raises ModelError for an image
        that is gone."""
        batch = batch._replace(token_ids=torch.where(batch.token_ids < 0, self._tower.image_token, batch.token_ids))
        states = embedded(params, batch, parallel)
        for at, count, digest, first in batch.inputs:
            states[at : at + count] = self._vectors(digest)[first : first + count]
        return batch._replace(states=states)

    def _vectors(self, digest: bytes) -> torch.Tensor:
        """Of a tile [N, width]."""
        found = self._kept.get(digest)
        if found is None:
            try:
                tile = tile_in(self._folder, digest, self._tower.side)
            except MediaError as error:
                raise ModelError(f"{error}.") from error
            pixels = torch.from_numpy(numbers_of(tile[None], self._form)[0])
            found = self._kept[digest] = encode(self._params, self._kv, pixels, self._config)
            self.computed += len(found)
            while len(self._kept) > max(1, self._kept_bytes // found.nbytes):
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return found
