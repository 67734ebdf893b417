"""Folder: what a store of responses holds, one file for each, for the API server that follows one which is killed.

Owns the files of one place among the API servers of a port. They lie in the run directory, which its server's start makes and its
end removes: no text outlives the server. A process that ends at any moment leaves each file whole or absent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

Entry = TypeVar("Entry")
log = logging.getLogger("vnext.server")


class Folder:
    """See the module. `path` None: no files. Nothing raises: what cannot be written is lost with the process."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._is_writable = path, True

    def read(self, kind: type[Entry]) -> Iterator[tuple[str, Entry]]:
        """The ids and entries that earlier processes have left, the oldest first."""
        if self._path is None or not self._path.is_dir():
            return
        for path in sorted(self._path.iterdir(), key=lambda each: each.stat().st_mtime_ns):
            try:
                if path.suffix != ".draft":
                    yield path.name, msgspec.msgpack.decode(path.read_bytes(), type=kind)
                    continue
            except (ValueError, RecursionError, OSError) as error:
                log.warning("the stored response %s cannot be read: %s", path.name, error)
            with suppress(OSError):
                path.unlink()

    def write(self, id_: str, entry: msgspec.Struct) -> None:
        """Replace an entry in one step."""
        if self._path is None:
            return
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            draft = self._path / f"{id_}.draft"
            with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.msgpack.encode(entry))
            os.replace(draft, self._path / id_)
        except OSError as error:
            self.remove(id_)
            if self._is_writable:
                log.warning("an API server that ends loses its stored responses: %s cannot be written (%s)", self._path, error)
            self._is_writable = False

    def remove(self, id_: str) -> None:
        """Delete an entry, whether or not it is there."""
        for name in (id_, f"{id_}.draft") if self._path is not None else ():
            with suppress(OSError):
                (self._path / name).unlink()
