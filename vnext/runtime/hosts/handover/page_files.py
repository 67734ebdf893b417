"""Page files: the pages of one rank on disk, one file each, named by the hash of the block.

Owns the folder, its lock and the format of a file: a header (magic, format version, bytes of the page, identity, name, checksum),
then the page. The identity is a digest of all that the bits of a page depend on beside its tokens. A file is written under another
name and renamed, so that it is whole or not there for every process that ends; after a power cut the checksum tells. Without
fsync: what a power cut takes is computed again. A file that is damaged, cut or of another identity is a miss.
The kernel drops the lock when its process ends. One that was killed and is held inside the system keeps it, without an end.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import xxhash

from vnext.base.spelling import reason
from vnext.runtime.hosts.handover.source import OTHER_PAGES, HandoverFailed
from vnext.runtime.protocol.settings import RankSettings, SettingsError

FORMAT_VERSION = 1
MAGIC = b"vnextKV\n"
NAME_BYTES = 16
LOCK_POLL_S = 0.05
LOCK_WAIT_S = 2.0  # where a rank was lost: one that can end does so within a moment
_HEAD = struct.Struct("<8sIQ16s16s16s")
HEADER_BYTES = _HEAD.size
TEMPORARY = ".part"
ABOUT = "about.json"
log = logging.getLogger(__name__)


class FolderInUse(SettingsError):
    """Another process has the lock of the folder."""


class PageFolder:
    """The folder of one rank, to read. Any thread may."""

    def __init__(self, parent: Path, identity: Mapping[str, object], page_bytes: int) -> None:
        """`page_bytes`: those of a page over all its memory."""
        self._about = json.dumps(dict(identity), sort_keys=True, indent=1)
        self.identity = blake2b(self._about.encode(), digest_size=NAME_BYTES).digest()
        self._folder = parent / self.identity.hex()
        self._page_bytes = page_bytes
        self.file_bytes = HEADER_BYTES + page_bytes

    def ask(self, names: Sequence[bytes]) -> None:
        """As vnext/runtime/hosts/handover/source.py, of which this is the transport in shared memory."""
        if not self._folder.is_dir():
            raise HandoverFailed(f"no blocks come from {self._folder.parent}: {OTHER_PAGES}")

    def fetch(self, name: bytes, buffer: bytearray | memoryview) -> bool:
        """Put a file into a buffer of `file_bytes`. False for one that is not there, or of another size."""
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                return file.readinto(buffer) == self.file_bytes
        except OSError:
            return False

    def raw(self, name: bytes) -> bytes:
        """The bytes of a file, b"" if it is not there."""
        try:
            return self._path(name).read_bytes()
        except OSError:
            return b""

    def is_right(self, name: bytes, buffer: bytes | bytearray | memoryview) -> bool:
        """Whether this is the file of a block as it was written."""
        *head, checksum = _HEAD.unpack_from(buffer)
        page = memoryview(buffer)[HEADER_BYTES:]
        right = [MAGIC, FORMAT_VERSION, self._page_bytes, self.identity, name]
        return head == right and checksum == self._checksum(name, (page,))

    def read(self, name: bytes, buffer: bytearray) -> bool:
        """Read a page into a buffer of `file_bytes`, behind HEADER_BYTES. False for one that is not there as it was written."""
        return self.fetch(name, buffer) and self.is_right(name, buffer)

    def close(self) -> None:
        """Nothing more is read."""

    def _path(self, name: bytes) -> Path:
        return self._folder / name[:1].hex() / name.hex()

    def _checksum(self, name: bytes, parts: Iterable[bytes | memoryview]) -> bytes:
        checksum = xxhash.xxh3_128(self.identity + name)
        for part in parts:
            checksum.update(part)
        return checksum.digest()


class PageFiles(PageFolder):
    """The folder of one rank, to write. Any thread may read; one thread writes and removes."""

    def __init__(
        self, parent: Path, identity: Mapping[str, object], page_bytes: int, max_age_s: float = 0.0, lock_wait_s: float = 0.0
    ) -> None:
        """`max_age_s`: files that are older are removed; 0 for never. Raises FolderInUse for a folder that another process still
        uses after `lock_wait_s`, SettingsError for one that cannot be written."""
        super().__init__(parent, identity, page_bytes)
        self._max_age_s = max_age_s
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            (self._folder / ABOUT).write_text(self._about)
        except OSError as error:
            raise SettingsError(f"--kv-disk-dir is {parent}: {reason(error)}: name a folder that you can write") from error
        if not _locked(self._lock, lock_wait_s):
            os.close(self._lock)
            raise FolderInUse(
                f"--kv-disk-dir is {parent}, which another engine with this model uses: give each its own folder, or end that one"
            )

    def close(self) -> None:
        """Let another engine use the folder."""
        os.close(self._lock)

    def list(self) -> list[tuple[float, bytes]]:
        """(time, name) of the files that look whole, oldest first; removes what is too old, torn or of another size."""
        found, oldest = [], time.time() - self._max_age_s if self._max_age_s else 0.0
        for entry in _entries_below(self._folder):
            with suppress(OSError):
                name, status = _name_of(entry.name), entry.stat()
                if name is None or status.st_size != self.file_bytes or status.st_mtime < oldest:
                    os.unlink(entry.path)
                else:
                    found.append((status.st_mtime, name))
        return sorted(found)

    def write(self, name: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write a page, the parts of which are `page_bytes` together. Raises OSError, with nothing left behind."""
        path = self._path(name)
        head = _HEAD.pack(MAGIC, FORMAT_VERSION, self._page_bytes, self.identity, name, self._checksum(name, parts))
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(temporary, "wb", buffering=0) as file:
                for part in (head, *parts):
                    _write_all(file.fileno(), memoryview(part).cast("B"))
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            with suppress(OSError):
                self._path(name).unlink()

    def keep(self, is_kept: Callable[[bytes], bool]) -> None:
        """Remove all other files."""
        self.remove([name for _, name in self.list() if not is_kept(name)])

    def touch(self, names: Iterable[bytes]) -> None:
        """Make these files the newest, in this order."""
        for name in names:
            with suppress(OSError):
                os.utime(self._path(name))


def open_files(
    settings: RankSettings, folder: Path, identity: Mapping[str, object], page_bytes: int, max_age_s: float = 0.0
) -> PageFiles | None:
    """The files of this rank; a rank that follows a lost one does without where the lost one still has the folder's lock. Raises
    SettingsError."""
    try:
        return PageFiles(folder, identity, page_bytes, max_age_s, LOCK_WAIT_S if settings.follows else 0.0)
    except FolderInUse:
        if not settings.follows:
            raise
        log.warning(
            "The engine goes on without its disk tier until it is started again: a rank that was lost has not ended and still has "
            "the lock of a folder in %s.", folder,
        )  # fmt: skip
        return None


def checksum_in(buffer: bytes | bytearray | memoryview) -> bytes:
    return bytes(_HEAD.unpack_from(buffer)[-1])


def _locked(handle: int, wait_s: float) -> bool:
    """Whether this process got the lock within `wait_s`."""
    end_s = time.monotonic() + wait_s
    while True:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end_s:
            return False
        time.sleep(LOCK_POLL_S)


def _entries_below(parent: Path) -> Iterator[os.DirEntry[str]]:
    """What is in the folders of a folder, but for those that cannot be read: others may clear it at any moment."""
    for folder in parent.iterdir():
        with suppress(OSError):
            yield from os.scandir(folder)


def _name_of(text: str) -> bytes | None:
    with suppress(ValueError):
        if len(name := bytes.fromhex(text)) == NAME_BYTES:
            return name
    return None


def _write_all(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data) :]
