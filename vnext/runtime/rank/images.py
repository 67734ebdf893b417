"""Images and sounds at a rank: a tower makes vectors of them, which stand in steps where prompts have their tokens.

Owns the tower and the newest vectors, by the digests of what they are of. A tile, or a sound, is computed alone, at the latest in
the first step that computes a part of it, and in parts before where the state says so (facilities/encoding.py): its vectors have
the same bits in any step, however it is cut, and on every rank. With a disk tier they are files, too: it is computed once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vnext.base.spelling import reason
from vnext.base.version import __version__
from vnext.kernels.arrays import torch_dtype
from vnext.media.pictures import MediaError
from vnext.media.reader import own_form
from vnext.media.seen import OwnForm, part_in
from vnext.media.sounds import HOP, columns_of, is_sound, samples_in, spectrogram_of, states_of
from vnext.media.store import kept_in
from vnext.media.vectors import VectorFiles, Vectors
from vnext.models.config.model_config import ModelConfig
from vnext.models.errors import InputGone, ModelError
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder import embedded
from vnext.models.layers.kv_cache import make_kv_cache
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.layers.tower import BLOCK_SIZE, Parts, encode, listen, page_count, whole
from vnext.models.loading.checkpoint import fingerprint
from vnext.models.loading.weights import load_params
from vnext.models.registry import TowerParts, sound_parts, tower_parts
from vnext.runtime.hosts.handover.receiving import VectorReceiver
from vnext.runtime.hosts.handover.source import HandoverFailed
from vnext.runtime.hosts.wire import secret_of
from vnext.runtime.protocol.messages import InputsRead
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.tier import yield_to_others
from vnext.runtime.transport.ring.broadcast import FetchInputs
from vnext.state.events import AnyEvent, InputsSought, PrefixCacheReset
from vnext.state.facilities.sought import lacking_digests
from vnext.state.state import State

if TYPE_CHECKING:
    from vnext.models.config.tower_config import Tower

KEPT_BYTES = 256 << 20
BEHIND_MAX = 4
"""Inputs whose vectors wait to be written, beyond which no more are kept on disk."""
log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """What stands for an input: `vectors` [N, width], and behind them what first layers add to them in turn, each where `spelled`
    [N] has the token that stands for them."""

    vectors: torch.Tensor
    spelled: torch.Tensor

    def part(self, first: int, count: int) -> Encoded:
        return Encoded(*(each[first : first + count] for each in self))

    @property
    def file(self) -> Vectors:
        """As it is stored."""
        rows = self.vectors.contiguous().view(torch.uint8).numpy()
        return Vectors(rows, self.spelled.numpy(), str(self.vectors.dtype).removeprefix("torch."))

    @classmethod
    def of(cls, file: Vectors) -> Encoded:
        """The inverse of `file`."""
        vectors = torch.from_numpy(file.rows.copy()).view(torch_dtype(file.dtype))
        return cls(vectors, torch.from_numpy(file.spelled.copy()))


class Begun(NamedTuple):
    """An input of which `done` of `count` parts are computed; the first one tells the count, which is 0 before."""

    digest: bytes
    parts: Parts
    done: int = 0
    count: int = 0  # type: ignore[assignment]  # hides tuple.count


class Read(NamedTuple):
    """What was found of the inputs of a request, by their places and digests; None of one that memory has, or nobody."""

    id: int
    digests: dict[int, bytes]
    found: dict[bytes, Encoded]


class Shelf:
    """The files of vectors, of which one rank's are enough. Mutable; `put` returns before it has written, unless `at_once`. What a
    search finds is read by a thread, and `inputs` have it when `reports` says so."""

    def __init__(
        self, files: VectorFiles, writes: bool, at_once: bool = False, rank: int = 0, inputs: Inputs | None = None,
        receiver: VectorReceiver | None = None,
    ) -> None:
        """`receiver`: of vectors that other engines have, None where nobody has any."""
        self.files, self._at_once, self._rank, self._inputs = files, at_once, rank, inputs
        self._receiver, self._tickets = receiver, dict[int, str]()
        self._reader, self._reads = ThreadPoolExecutor(1, "inputs-read"), list[Future[Read]]()
        self._writer = ThreadPoolExecutor(1, "inputs-write", yield_to_others) if writes else None
        self._said, self._free = set[str](), threading.BoundedSemaphore(BEHIND_MAX)

    def read(self, digest: bytes) -> Encoded | None:
        """An input's vectors, None if they are not there."""
        found = self.files.read(digest)
        return None if found is None else Encoded.of(found)

    def put(self, digest: bytes, encoded: Encoded) -> None:
        """Keep the vectors of an input, unless the disk is behind with those before."""
        if self._writer is not None and self._free.acquire(blocking=False):
            written = self._writer.submit(self._write, digest, encoded.file)
            if self._at_once:
                written.result()

    def expect(self, request: FetchInputs) -> None:
        """The vectors of a request that is looked for next are at another engine, too."""
        self._tickets = {request.id: request.ticket}

    def fold(self, event: AnyEvent, state: State) -> None:
        """Look for inputs, and remove all files, behind those that are being written, where an event empties the caches."""
        if isinstance(event, InputsSought) and self._inputs is not None:
            digests = lacking_digests(state, event.id)
            lacking = {digest for digest in digests.values() if not self._inputs.has(digest)}
            self._reads.append(self._reader.submit(self._read_all, event.id, digests, lacking, self._tickets.pop(event.id, "")))
        if self._writer is not None and isinstance(event, PrefixCacheReset):
            self._writer.submit(self.files.clear)

    @property
    def is_busy(self) -> bool:
        """Whether a search goes on."""
        return bool(self._reads)

    def reports(self) -> list[InputsRead]:
        """What was found since the last call, which is in memory from here on. Nobody waits for what is written."""
        done = [read for read in self._reads if read.done()]
        self._reads = [read for read in self._reads if read not in done]
        return [self._kept(read.result()) for read in done]

    def _kept(self, read: Read) -> InputsRead:
        assert self._inputs is not None, "fold has looked for it"
        for digest, encoded in read.found.items():
            self._inputs.take(digest, encoded)
        there = tuple(place for place, digest in read.digests.items() if self._inputs.has(digest))
        return InputsRead(rank=self._rank, id=read.id, places=there)

    def _read_all(self, id_: int, digests: dict[int, bytes], lacking: set[bytes], ticket: str) -> Read:
        found = {digest: self.read(digest) for digest in lacking}
        if ticket and self._receiver is not None:
            try:
                for digest, file in self._receiver.files(ticket, [digest for digest, each in found.items() if each is None]):
                    vectors = self.files.vectors_in(file, digest)
                    found[digest] = None if vectors is None else Encoded.of(vectors)
            except HandoverFailed as error:
                self._warn(f"Inputs are encoded here too: {error}")
        return Read(id_, digests, {digest: encoded for digest, encoded in found.items() if encoded is not None})

    def close(self) -> None:
        """Write what has been put."""
        self._reader.shutdown(cancel_futures=True)
        if self._writer is not None:
            self._writer.shutdown()

    def _write(self, digest: bytes, file: Vectors) -> None:
        try:
            self.files.write(digest, file)
        except OSError as error:
            self._warn(f"Vectors of inputs are not kept on disk, and serving goes on: {reason(error)}")
        finally:
            self._free.release()

    def _warn(self, sentence: str) -> None:
        if (kind := sentence.partition(":")[0]) not in self._said:
            self._said.add(kind)
            log.warning("%s", sentence)


class InputVectors:
    """Puts vectors into steps. Who has some says where they are."""

    def __init__(self, stands_for: int) -> None:
        """`stands_for`: a token of the vocabulary in the place of inputs' tokens."""
        self._token = stands_for

    def with_vectors(self, batch: ForwardBatch, params: Any, parallel: Parallel) -> ForwardBatch:
        """The batch, tensors, with the embeddings of its tokens, among which vectors of inputs are. Raises as `_found`."""
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
        raise AssertionError("who has vectors finds them")


class Inputs(InputVectors):
    """The tower of one rank, and the newest of its vectors. `computed` counts those that it has made, `read` those from files."""

    shelf: Shelf | None = None
    """Where vectors outlive the rank."""
    form: str
    """What of its processor's settings the vectors depend on."""

    def __init__(self, stands_for: int, kept_bytes: int = KEPT_BYTES) -> None:
        """Has met no input. Raises ModelError."""
        super().__init__(stands_for)
        self._kept_bytes = kept_bytes
        self._begun: Begun | None = None  # the cache of keys and values is of one input
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()
        self._bytes = self.computed = self.read = 0

    def encoded(self, digest: bytes, units: int = 1) -> Parts:
        """An Encoded, computed in about so many parts. Raises MediaError for one that is gone, and ModelError."""
        raise AssertionError("a tower says how it encodes")

    def cost(self, config: ModelConfig) -> float:
        """As ModelConfig.input_cost, of the model's configuration."""
        return config.input_cost

    @torch.inference_mode()
    def advance(self, digest: bytes, done: int, units: int) -> None:
        """Compute the first `done` of an input's `units`, as far as they are not. Raises InputGone, ModelError."""
        if digest in self._kept:
            return
        begun = self._begun_of(digest) or Begun(digest, self.encoded(digest, units))
        while not begun.count or begun.done < begun.count * done // units:
            try:
                count = next(begun.parts)
            except MediaError as error:
                raise InputGone(str(error), digest) from error
            begun = begun._replace(done=begun.done + 1, count=count)
        self._begun = begun

    def _begun_of(self, digest: bytes) -> Begun | None:
        """What is begun of this input; what is of another one is given up."""
        begun, self._begun = self._begun, None
        if begun is None or begun.digest == digest:
            return begun
        begun.parts.close()
        return None

    def _found(self, digest: bytes) -> Encoded:
        """Raises InputGone."""
        if digest not in self._kept:
            if (begun := self._begun_of(digest)) is not None:
                self._compute(digest, begun.parts)
            elif not self._from_shelf(digest):
                self._compute(digest, self.encoded(digest))
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _compute(self, digest: bytes, parts: Parts) -> None:
        try:
            found: Encoded = whole(parts)
        except MediaError as error:
            raise InputGone(str(error), digest) from error
        self.computed += len(found.vectors)
        self._keep(digest, found)
        if self.shelf is not None:
            self.shelf.put(digest, found)

    def _from_shelf(self, digest: bytes) -> bool:
        """Whether the vectors of an input, which have left memory since they were found, are kept from here on."""
        found = None if self.shelf is None else self.shelf.read(digest)
        if found is not None:
            self.take(digest, found)
        return found is not None

    def take(self, digest: bytes, found: Encoded) -> None:
        """Have what a file holds."""
        if digest not in self._kept:
            self.read += len(found.vectors)
            self._keep(digest, found)

    def has(self, digest: bytes) -> bool:
        """Whether an input's vectors are in memory, where they stay longer then."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return digest in self._kept

    def _keep(self, digest: bytes, found: Encoded) -> None:
        self._kept[digest] = found
        self._bytes += found.vectors.nbytes
        while self._bytes > self._kept_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].vectors.nbytes


class OwnTower:
    """A tower of ours: its parameters, and a cache of keys and values for one input."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, states: int, parts: TowerParts) -> None:
        """`states`: that it computes of one. Raises ModelError."""
        self.config, self.project = parts.config(config), parts.project
        self.params = load_params(path, self.config, alone(), dtype, "cpu", assemble=parts.assemble)
        self.kv = make_kv_cache(self.config, page_count(states), BLOCK_SIZE, dtype, "cpu", alone())


def form_at(path: Path, tower: Tower) -> OwnForm:
    """That of the images of the model at `path`. Raises ModelError."""
    try:
        return own_form(path, tower.sizes)
    except MediaError as error:
        raise ModelError(f"{error}.") from error


def inputs_form(path: Path, config: ModelConfig) -> str:
    """What of a processor's settings the vectors depend on that towers of ours make. Raises ModelError."""
    images = () if config.tower is None else (form_at(path, config.tower),)
    return ", ".join(map(repr, (*images, *(() if config.sound is None else (config.sound,)))))


class Images(Inputs):
    """The tower of images."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of images. Raises ModelError."""
        assert config.tower is not None, "a model that reads images"
        self._tower: Tower = config.tower
        self._folder = folder
        super().__init__(self._tower.image_token, kept_bytes)
        self._own = OwnTower(path, config, dtype, self._tower.grid**2, tower_parts(config.architecture))
        self._form, self.form = form_at(path, self._tower), inputs_form(path, config)

    def encoded(self, digest: bytes, units: int = 1) -> Parts:
        """As Inputs, of an image's input."""
        part = part_in(kept_in(self._folder, digest, "image"))
        own = self._own
        assert own.project is not None, "a tower of images ends in a projection"
        passing = yield from encode(own.params, own.kv, torch.from_numpy(self._form.numbers(part)), own.config, units)
        spelled = torch.from_numpy(self._form.spelled(part))
        vectors = own.project(own.params, passing, part.more, own.config)
        room = vectors.new_zeros((len(spelled), vectors.shape[1]))
        room[spelled == self._token] = vectors
        return Encoded(room, spelled)


class Sounds(Inputs):
    """The tower of sounds."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of sounds. Raises ModelError."""
        assert config.sound is not None, "a model that listens"
        self._sound, self._folder, self.form = config.sound, folder, inputs_form(path, config)
        super().__init__(self._sound.token if config.tower is None else config.tower.image_token, kept_bytes)
        self._own = OwnTower(path, config, dtype, self._sound.seen, sound_parts(config.architecture))

    def encoded(self, digest: bytes, units: int = 1) -> Parts:
        """As Inputs, of a sound. One that stands among a prompt's tokens is as long as it is."""
        samples = samples_in(kept_in(self._folder, digest, "sound"))
        if len(samples) > self._sound.samples:
            raise ModelError(f"The sound {digest.hex()} has {len(samples)} samples: the model reads {self._sound.samples}.")
        columns = columns_of(len(samples)) if self._sound.window else 2 * states_of(len(samples)) + 1
        length = min(self._sound.samples, (columns + 2) * HOP) if self._sound.window else self._sound.samples
        spectrogram = spectrogram_of(samples, self._sound.bands, length)
        if self._sound.token:
            spectrogram = spectrogram[:, :columns]
        own = self._own
        states = yield from listen(own.params, own.kv, torch.from_numpy(spectrogram), own.config, units)
        return Encoded(states, torch.full((len(states),), self._token))


class ImagesAndSounds(Images):
    """The towers of a model that reads both."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, folder: Path, kept_bytes: int = KEPT_BYTES) -> None:
        """`folder`: the store of both. Raises ModelError."""
        super().__init__(path, config, dtype, folder, kept_bytes)
        self._sounds = Sounds(path, config, dtype, folder, kept_bytes)

    def encoded(self, digest: bytes, units: int = 1) -> Parts:
        """As Inputs, of an image's input or a sound."""
        hears = is_sound(self._folder / digest.hex())
        return (yield from self._sounds.encoded(digest, units) if hears else super().encoded(digest, units))


def open_inputs(
    settings: RankSettings, path: Path, config: ModelConfig, numbers: Mapping[str, str], theirs: Callable[..., Inputs] | None = None
) -> Inputs:
    """What reads the inputs of the model at `path`. `numbers`: how this rank computes, with its `dtype`. `theirs`: what has a tower
    of transformers, None for one of ours. Raises ModelError."""
    made = (path, config, torch_dtype(numbers["dtype"]), Path(settings.media_dir))
    own = Images if config.sound is None else Sounds if config.tower is None else ImagesAndSounds
    inputs = (theirs or own)(*made)
    if settings.inputs_dir:
        identity = {"model": fingerprint(settings.model_path), "version": __version__, "form": inputs.form, **numbers}
        files = VectorFiles(Path(settings.inputs_dir).expanduser(), identity, settings.inputs_bytes)
        takes = settings.cluster_secret_file and settings.role != "encode"
        receiver = VectorReceiver(secret_of(settings.cluster_secret_file), files.identity) if takes else None
        inputs.shelf = Shelf(files, settings.rank == 0, settings.role == "encode", settings.rank, inputs, receiver)
    return inputs
