"""Images and sounds at a rank: a tower makes vectors of them, which stand in steps where prompts have their tokens.

Owns the tower and the newest vectors, by the digests of what they are of. A tile, or a sound, is computed alone, at the latest in
the first step that computes a part of it, and in parts before where the state says so (facilities/encoding.py): its vectors have
the same bits in any step, however it is cut, and on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vnext.media.pictures import MediaError
from vnext.media.reader import form_of
from vnext.media.seen import part_in
from vnext.media.sounds import samples_in
from vnext.media.spectrogram import spectrogram_of
from vnext.media.store import kept_in
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder import embedded
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.layers.sound_tower import listen
from vnext.models.layers.tower import BLOCK_SIZE, NO_BAND, Parts, encode, page_count, whole
from vnext.models.loading.weights import load_params
from vnext.models.registry import tower_parts

if TYPE_CHECKING:
    from vnext.models.config.tower_config import Tower

KEPT_BYTES = 256 << 20


class Encoded(NamedTuple):
    """What stands for an input: `vectors` [N, width], and behind them what first layers add to them in turn, each where `spelled`
    [N] has the token that stands for them."""

    vectors: torch.Tensor
    spelled: torch.Tensor

    def part(self, first: int, count: int) -> Encoded:
        return Encoded(*(each[first : first + count] for each in self))


class Begun(NamedTuple):
    """An input of which `done` of `count` parts are computed; the first one tells the count, which is 0 before."""

    digest: bytes
    parts: Parts
    done: int = 0
    count: int = 0  # type: ignore[assignment]  # hides tuple.count


class Inputs:
    """The tower of one rank, and the newest of its vectors. `computed` counts those that it has made."""

    def __init__(
        self, path: Path, config: ModelConfig, dtype: torch.dtype, states: int, stands_for: int, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """Has met no input. `states`: that the tower computes of one; `stands_for`: a token of the vocabulary in the place of
        inputs' tokens. Raises ModelError."""
        parts = tower_parts(config.architecture)
        self._config, self._project = parts.config(config), parts.project
        self._params = load_params(path, self._config, alone(), dtype, "cpu", assemble=parts.assemble)
        self._kv = make_kv_cache(self._config, page_count(states), BLOCK_SIZE, dtype, "cpu", alone())
        self._states, self._token, self._kept_bytes = states, stands_for, kept_bytes
        self._begun: Begun | None = None  # the cache of keys and values is of one input
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()
        self._bytes = self.computed = 0

    def encoded(self, digest: bytes, band: int = NO_BAND) -> Parts:
        """An Encoded, computed in parts. Raises MediaError for one that is gone, and ModelError."""
        raise AssertionError("a tower says how it encodes")

    @torch.inference_mode()
    def advance(self, digest: bytes, done: int, units: int) -> None:
        """Compute the first `done` of an input's `units`, as far as they are not. Raises ModelError."""
        if digest in self._kept:
            return
        begun, self._begun = self._begun, None
        if begun is None or begun.digest != digest:
            bands = max(-(-units // self._config.layer_count) - 1, 1)
            begun = Begun(digest, self.encoded(digest, -(-self._states // bands)))
        while not begun.count or begun.done < begun.count * done // units:
            try:
                count = next(begun.parts)
            except MediaError as error:
                raise ModelError(f"{error}.") from error
            begun = begun._replace(done=begun.done + 1, count=count)
        self._begun = begun

    def with_vectors(self, batch: ForwardBatch, params: Any, parallel: Parallel) -> ForwardBatch:
        """The batch, tensors, with the embeddings of its tokens, among which vectors of inputs are. Raises ModelError for an input
        that is gone."""
        tokens = torch.where(batch.token_ids < 0, self._token, batch.token_ids)
        found = [(slice(at, at + count), self._found(digest).part(first, count)) for at, count, digest, first in batch.inputs]
        for places, (_, spelled) in found:
            tokens[places] = spelled
        batch = batch._replace(token_ids=tokens)
        states = embedded(params, batch, parallel)
        width, deep = states.shape[1], list[tuple[slice, torch.Tensor]]()
        for places, (vectors, spelled) in found:
            states[places] = torch.where((spelled == self._token)[:, None], vectors[:, :width], states[places])
            if vectors.shape[1] > width:
                deep.append((places, vectors[:, width:].unflatten(1, (-1, width))))
        return batch._replace(states=states, deep=tuple(deep))

    def vectors(self, digest: bytes) -> torch.Tensor:
        """Of an input that has been encoded, [N, width]."""
        return self._found(digest).vectors

    def _found(self, digest: bytes) -> Encoded:
        found = self._kept.get(digest)
        if found is None:
            begun, self._begun = self._begun, None
            try:
                parts = begun.parts if begun is not None and begun.digest == digest else self.encoded(digest)
                found = self._kept[digest] = whole(parts)
            except MediaError as error:
                raise ModelError(f"{error}.") from error
            self.computed += len(found.vectors)
            self._bytes += found.vectors.nbytes
            while self._bytes > self._kept_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].vectors.nbytes
        self._kept.move_to_end(digest)
        return found


class Images(Inputs):
    """The tower of images."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of images. Raises ModelError."""
        assert config.tower is not None, "a model that reads images"
        self._tower: Tower = config.tower
        self._folder = folder
        super().__init__(path, config, dtype, self._tower.grid**2, self._tower.image_token, kept_bytes)
        try:
            self._form = form_of(path, self._tower.sizes)
        except MediaError as error:
            raise ModelError(f"{error}.") from error

    def encoded(self, digest: bytes, band: int = NO_BAND) -> Parts:
        """As Inputs, of an image's input."""
        part = part_in(kept_in(self._folder, digest, "image"))
        assert self._project is not None, "a tower of images ends in a projection"
        passing = yield from encode(self._params, self._kv, torch.from_numpy(self._form.numbers(part)), self._config, band)
        spelled = torch.from_numpy(self._form.spelled(part))
        vectors = self._project(self._params, passing, part.more, self._config)
        room = vectors.new_zeros((len(spelled), vectors.shape[1]))
        room[spelled == self._token] = vectors
        return Encoded(room, spelled)


class Sounds(Inputs):
    """The tower of sounds."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of sounds. Raises ModelError."""
        assert config.sound is not None, "a model that listens"
        self._sound, self._folder = config.sound, folder
        super().__init__(path, config, dtype, self._sound.states, 0, kept_bytes)

    def encoded(self, digest: bytes, band: int = NO_BAND) -> Parts:
        """As Inputs, of a sound."""
        samples = samples_in(kept_in(self._folder, digest, "sound"))
        if len(samples) > self._sound.samples:
            raise ModelError(f"The sound {digest.hex()} has {len(samples)} samples: the model reads {self._sound.samples}.")
        spectrogram = spectrogram_of(samples, self._sound.bands, self._sound.samples)
        states = yield from listen(self._params, self._kv, torch.from_numpy(spectrogram), self._config, band)
        return Encoded(states, torch.full((len(states),), self._token))
