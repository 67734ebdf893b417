"""An update: new values for tensors of a model that runs, as folders of safetensors files or single files.

Owns the check that comes before anything changes, and the digest of weights: over names, dtypes, shapes and every byte of the
tensors that the model reads, so that a checkpoint and an update with the same tensors have the same one, however their files are
cut. `Checkpoint` reads the files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import numpy as np

from vnext.base.spelling import reason
from vnext.kernels.format import GGUF_BLOCKS
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import Checkpoint, Tensors, file_tensors, folder_tensors, overlaid
from vnext.models.loading.kept import Tie
from vnext.models.loading.sources.safetensors import DTYPES
from vnext.models.weight_index import index_of

NAMES_SHOWN = 3
EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
FINITE_ROWS = 1024
NOTHING_CHANGED = "nothing has changed"


def open_update(path: Path) -> Checkpoint:
    """The tensors in a folder, in one file, or in the files of an index. Raises ModelError."""
    if not path.exists():
        raise ModelError(f"there are no weights at {path}: give a folder or a file that the ranks can read; {NOTHING_CHANGED}")
    try:
        return Checkpoint(path, folder_tensors(path) if path.is_dir() else _file_tensors(path), 0).rooted()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({reason(error)}); {NOTHING_CHANGED}") from error


def _file_tensors(path: Path) -> Tensors:
    """The tensors of one file, or of those that an index names."""
    index = index_of(path)
    if not index:
        return file_tensors(path)
    found = {file: file_tensors(file) for file in dict.fromkeys(index.values())}
    return {name: found[file][name] for name, file in index.items() if name in found[file]}


def open_pieces(paths: Sequence[Path]) -> Checkpoint:
    """The tensors of an update that was sent in pieces. Raises ModelError."""
    pieces, seen = [open_update(path) for path in paths], set[str]()
    for piece in pieces:
        if twice := sorted(seen.intersection(piece.names())):
            raise ModelError(f"the update has {_named(twice)} twice; {NOTHING_CHANGED}")
        seen.update(piece.names())
    return overlaid(*pieces)


def check_update(
    update: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Collection[str] = (),
    partial: bool = False,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ModelError, in one sentence, unless the update has exactly the tensors of `shapes`, or if `partial` some of them, with
    these shapes and dtypes that can be read. Names in `ignored` may be there too. `stored`: the dtypes of weights that the model's
    checkpoint holds quantised, as Kept has them."""
    if other := [name for name, dtype in stored.items() if name in update and update.stored_dtype(name) != dtype]:
        has = f"{update.stored_dtype(other[0])} in the update, and the model's own quantised checkpoint holds it as"
        raise ModelError(
            f"tensor {other[0]!r} is {has} {stored[other[0]] or 'codes and scales'}: send it so, or start with the model's float "
            f"checkpoint, in which --quantization rounds each update; {NOTHING_CHANGED}"
        )
    missing = [name for name in shapes if name not in update and not partial]
    unknown = [name for name in update.names() if name not in shapes and name not in ignored]
    if missing:
        remedy = f"send every tensor of the model, or say that the update is partial; {NOTHING_CHANGED}"
        raise ModelError(f"the update in {update.path} lacks {_named(missing)}: {remedy}")
    if unknown:
        raise ModelError(f"the update in {update.path} has {_named(unknown)}, which this model does not; {NOTHING_CHANGED}")
    for name, shape in ((name, shape) for name, shape in shapes.items() if name in update):
        if (found := update.shape(name)) != shape:
            has = f"has the shape {list(found or ())} where the model has {list(shape)}"
            raise ModelError(f"tensor {name!r} of the update {has}; {NOTHING_CHANGED}")
        if update.stored_dtype(name) not in (*DTYPES, *GGUF_BLOCKS):
            raise ModelError(
                f"tensor {name!r} of the update has the dtype {update.stored_dtype(name)}; supported are {', '.join(DTYPES)}; "
                f"{NOTHING_CHANGED}"
            )


def check_ties(update: Checkpoint, whole: Checkpoint, ties: Mapping[str, Tie]) -> None:
    """Raise ModelError for a head that is the embedding's in this model, and another one in the update. `whole`: with the tensors
    that the update leaves as they are."""
    for head, (embedding, is_equal) in ties.items():
        if is_equal and head in update and embedding in whole and not whole.are_equal(embedding, head):
            raise ModelError(
                f"the update in {update.path} has {head!r} unlike {embedding!r}, and this model's head is its embedding: leave it "
                f"out, or start with a checkpoint that has both; {NOTHING_CHANGED}"
            )


def check_tower(update: Checkpoint, own: Checkpoint, names: Iterable[str]) -> None:
    """Raise ModelError for a tensor of a tower, which have these `names`, that is another one than the `own` checkpoint's."""
    for name in (name for name in names if name in update):
        if not own.are_equal(name, name, update):
            raise ModelError(
                f"the update in {update.path} has another {name!r}, which reads images or sounds and cannot be updated so far: "
                f"leave it out, or start another engine; {NOTHING_CHANGED}"
            )


def check_finite(update: Checkpoint, names: Iterable[str]) -> None:
    """Raise ModelError for a tensor with a number that is not finite."""
    for name in names:
        if update.dtype(name) is None:
            continue  # of a format, which looks itself
        part = update.part(name, update.shape(name) or (), ())
        if part.size and not _is_finite(part.reshape(len(part) if part.ndim else 1, -1)):
            raise ModelError(f"tensor {name!r} of the update has numbers that are not finite; {NOTHING_CHANGED}")
        update.release(name)


def _is_finite(part: np.ndarray) -> bool:
    exponent = EXPONENTS[str(part.dtype)]
    rows = (part[first : first + FINITE_ROWS].view(f"uint{8 * part.itemsize}") for first in range(0, len(part), FINITE_ROWS))
    return all(int((bits & exponent).max(initial=0)) < exponent for bits in rows)


def tensors_digest(tensors: Checkpoint, names: Iterable[str]) -> str:
    """A digest of these tensors, 32 hexadecimal digits."""
    digest = blake2b(digest_size=16)
    for name in sorted(names):
        shape = tensors.shape(name) or ()
        part = tensors.raw(name, shape, ())
        digest.update(f"{name} {part.dtype} {list(shape)}\n".encode())
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        tensors.release(name)
    return digest.hexdigest()


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(map(repr, sorted(names)[:NAMES_SHOWN]))}{more}"


