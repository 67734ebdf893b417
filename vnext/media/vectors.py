"""Vectors: what a tower has made of an input, as a file under the input's digest, for the next who asks for the same input.

Owns the folder and the format of a file: a header (magic, identity, digest, counts, checksum), the vectors, and the tokens that
stand for them. The identity is a digest of all that vectors depend on beside their input. A file is whole or not there; one that is
damaged, cut or of another identity is a miss. The files that were used longest ago leave when there is no room. Processes need no
lock: all who write a file write the same one.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from vnext.media.store import make_room, write_whole
from vnext.state.store.inputs import DIGEST_SIZE

MAGIC = b"vnextIN\n"
CHECKSUM_BYTES = 16
DISK_SHARE = 8
"""Of a disk tier's bytes vectors have one part in so many."""
_HEAD = struct.Struct(f"<8s16s{DIGEST_SIZE}s8sQQ{CHECKSUM_BYTES}s")


class Vectors(NamedTuple):
    """Of one input: `rows` uint8 [N, bytes of a vector] of numbers of `dtype`, and the tokens int64 [N] that are `spelled` in their
    places."""

    rows: np.ndarray
    spelled: np.ndarray
    dtype: str


class VectorFiles:
    """The files of one identity. Any thread of any process may use them."""

    def __init__(self, parent: Path, identity: Mapping[str, object], room_bytes: int) -> None:
        """`room_bytes`: those of all files, of which the oldest leave."""
        self._about = json.dumps(dict(identity), sort_keys=True, indent=1)
        self.identity = blake2b(self._about.encode(), digest_size=16).digest()
        self.folder, self._room = parent / f"inputs-{self.identity.hex()}", room_bytes

    def raw(self, digest: bytes) -> bytes:
        """The bytes of a file, b"" if it is not there."""
        try:
            path = self.folder / digest.hex()
            found = path.read_bytes()
            os.utime(path)
        except OSError:
            return b""
        return found

    def read(self, digest: bytes) -> Vectors | None:
        """The vectors of an input; None where they are not there as they were written: who computes them writes them anew."""
        file = self.raw(digest)
        found = self.vectors_in(file, digest)
        if file and found is None:
            with suppress(OSError):
                (self.folder / digest.hex()).unlink()
        return found

    def write(self, digest: bytes, vectors: Vectors) -> None:
        """Keep the vectors of an input. Raises OSError, with nothing left behind."""
        path, parts = self.folder / digest.hex(), (vectors.rows.tobytes(), vectors.spelled.astype(np.int64).tobytes())
        dtype, (count, width) = vectors.dtype.encode(), vectors.rows.shape
        checksum = self._checksum(digest, dtype, count, width, *parts)
        file = b"".join((_HEAD.pack(MAGIC, self.identity, digest, dtype, count, width, checksum), *parts))
        if path.exists() or len(file) > self._room:
            return
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.folder.with_suffix(".json"), self._about.encode())
        make_room(self.folder, self._room - len(file))
        write_whole(path, file)

    def clear(self) -> None:
        with suppress(OSError):
            make_room(self.folder, 0)

    def vectors_in(self, file: bytes, digest: bytes) -> Vectors | None:
        """The vectors that a file holds; None where it is not that of this input."""
        if len(file) < _HEAD.size:
            return None
        *head, dtype, count, width, checksum = _HEAD.unpack_from(file)
        behind = _HEAD.size + count * width
        if head != [MAGIC, self.identity, digest] or len(file) != behind + 8 * count:
            return None
        rows, spelled = memoryview(file)[_HEAD.size : behind], memoryview(file)[behind:]
        if checksum != self._checksum(digest, name := dtype.rstrip(b"\0"), count, width, rows, spelled):
            return None
        found = np.frombuffer(rows, np.uint8).reshape(count, width)
        return Vectors(found, np.frombuffer(spelled, np.int64), name.decode())

    def _checksum(
        self, digest: bytes, dtype: bytes, count: int, width: int, rows: bytes | memoryview, spelled: bytes | memoryview
    ) -> bytes:
        checksum = xxhash.xxh3_128(self.identity + digest + b"%d %d " % (count, width) + dtype)
        checksum.update(rows)
        checksum.update(spelled)
        return checksum.digest()
