"""The store: tiles of images, and sounds, on their way from the process that reads them to the ranks, as files under their digests.

Owns the files: whole or not there, each written once, and the bound on their bytes. Equal ones are one file. Old files go when
there is no room for new ones; ranks keep the vectors of what they have computed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from vnext.media.pictures import DIGEST_SIZE, MediaError, digest_of

FOLDER = "media"
"""In an engine's run directory, beside the socket of its clients."""
ROOM_BYTES = 4 << 30
KEPT_S = 600.0
"""How long a file stays, whatever else comes."""


def folder_of(address: str) -> Path:
    """The store of the engine whose clients have this address."""
    return Path(address.removeprefix("ipc://")).parent / FOLDER


class MediaStore:
    """The stores of one process's engines. `put` may block for a disk."""

    def __init__(self, folders: Iterable[Path], room_bytes: int = ROOM_BYTES) -> None:
        self._folders, self._room = tuple(folders), room_bytes

    def put(self, tiles: np.ndarray, name: str) -> None:
        """Keep tiles uint8 [N, side, side, 3] of the image `name`. Raises MediaError where there is no room."""
        self._keep({digest_of(tile).hex(): tile for tile in tiles}, name)

    def put_sound(self, samples: np.ndarray, name: str) -> bytes:
        """Keep samples float32 [N] of the sound `name`; returns their digest. Raises MediaError as `put`."""
        self._keep({(digest := sound_digest(samples)).hex(): samples}, name)
        return digest

    def _keep(self, named: Mapping[str, np.ndarray], name: str) -> None:
        try:
            for folder in self._folders:
                folder.mkdir(mode=0o700, exist_ok=True)
                new = {folder / each: tile for each, tile in named.items() if not _is_there(folder / each)}
                _make_room(folder, self._room - sum(tile.nbytes for tile in new.values()))
                for path, tile in new.items():
                    part = path.with_name(f"part-{secrets.token_hex(8)}")
                    tile.tofile(part)
                    part.replace(path)
        except OSError as error:
            raise MediaError(f"{name} cannot be kept here: {error.strerror}") from error


def tile_in(folder: Path, digest: bytes, side: int) -> np.ndarray:
    """A tile uint8 [side, side, 3]. Raises MediaError for one that is not there as it was written."""
    try:
        pixels = np.fromfile(folder / digest.hex(), dtype=np.uint8).reshape(side, side, 3)
    except (OSError, ValueError) as error:
        raise MediaError(f"the image {digest.hex()} is not in {folder}") from error
    if digest_of(pixels) != digest:
        raise MediaError(f"the image {digest.hex()} in {folder} is damaged")
    return pixels


def sound_in(folder: Path, digest: bytes) -> np.ndarray:
    """A sound float32 [N]. Raises MediaError for one that is not there as it was written."""
    try:
        samples = np.fromfile(folder / digest.hex(), dtype=np.float32)
    except (OSError, ValueError) as error:
        raise MediaError(f"the sound {digest.hex()} is not in {folder}") from error
    if sound_digest(samples) != digest:
        raise MediaError(f"the sound {digest.hex()} in {folder} is damaged")
    return samples


def sound_digest(samples: np.ndarray) -> bytes:
    """A name of samples float32 [N], 15 bytes."""
    return blake2b(b"sound\0" + np.ascontiguousarray(samples).data, digest_size=DIGEST_SIZE).digest()


def _is_there(path: Path) -> bool:
    """Whether the file is there, which is new then."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _make_room(folder: Path, room: int) -> None:
    """Remove the oldest files until what is there fits into `room`. Raises OSError where only new ones are left."""
    with os.scandir(folder) as entries:
        found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries)
    size = sum(each for _, each, _ in found)
    for changed_s, bytes_, path in found:
        if size <= room:
            return
        if changed_s > time.time() - KEPT_S:
            break
        Path(path).unlink(missing_ok=True)
        size -= bytes_
    if size > room:
        raise OSError(0, "what came in the last minutes has taken all room")
