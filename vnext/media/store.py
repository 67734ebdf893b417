"""The store: images and sounds as models read them, on their way to the ranks, as files under their digests.

Owns the files: whole or not there, each written once, and the bound on their bytes. Equal ones are one file. Old files go when
there is no room for new ones; ranks keep the vectors of what they have computed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from vnext.media.pictures import MediaError, NoRoom
from vnext.state.store.inputs import DIGEST_SIZE, hash_of, with_rows

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

    def put(self, files: Sequence[bytes], name: str, places: Sequence[tuple[int | None, int | None]] = ()) -> list[bytes]:
        """Keep the files of the image or sound `name`; returns their digests, which tell of each its (rows, step), as `digest_of`
        has them. Raises NoRoom."""
        digests = [digest_of(file, *own) for file, own in zip(files, places or ((None, None),) * len(files), strict=True)]
        named = {digest.hex(): file for digest, file in zip(digests, files, strict=True)}
        try:
            for folder in self._folders:
                folder.mkdir(mode=0o700, exist_ok=True)
                new = {folder / each: file for each, file in named.items() if not _is_there(folder / each)}
                make_room(folder, self._room - sum(map(len, new.values())), KEPT_S)
                for path, file in new.items():
                    write_whole(path, file)
        except OSError as error:
            raise NoRoom(f"{name} cannot be kept here: {error.strerror}") from error
        return digests


def kept_in(folder: Path, digest: bytes, kind: str) -> bytes:
    """The file of an input of this kind. Raises MediaError for one that is not there as it was written."""
    try:
        file = (folder / digest.hex()).read_bytes()
    except OSError as error:
        raise MediaError(f"the {kind} {digest.hex()} is not in {folder}") from error
    if not digest_of(file).startswith(hash_of(digest)):
        with suppress(OSError):  # the next to send it writes it anew
            (folder / digest.hex()).unlink()
        raise MediaError(f"the {kind} {digest.hex()} in {folder} is damaged")
    return file


def digest_of(file: bytes, rows: int | None = None, step: int | None = None) -> bytes:
    """The name of a file, 15 bytes, which ends with the number of `rows` where that counts, and the `step` (store/inputs.py)."""
    found = blake2b(file, digest_size=DIGEST_SIZE).digest()
    return found if rows is None else with_rows(found, rows, step)


def _is_there(path: Path) -> bool:
    """Whether the file is there, which is new then."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def write_whole(path: Path, file: bytes) -> None:
    """Write a file that is whole or not there. Raises OSError, with nothing left behind."""
    part = path.with_name(f"part-{secrets.token_hex(8)}")
    try:
        part.write_bytes(file)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def make_room(folder: Path, room: int, kept_s: float = 0.0) -> None:
    """Remove the oldest files until what is there fits into `room`. Raises OSError where only those of the last `kept_s` are
    left."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another API server has renamed or removed it since
                found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    size = sum(each for _, each, _ in found)
    for changed_s, bytes_, path in sorted(found):
        if size <= room:
            return
        if kept_s and changed_s > time.time() - kept_s:
            break
        Path(path).unlink(missing_ok=True)
        size -= bytes_
    if size > room:
        raise OSError(0, "what came in the last minutes has taken all room")
