"""Store: the files and batches of a server, in a folder that outlives it.

Owns the layout (`files/ID` beside `files/ID.json`, `batches/ID.json` beside the results that are being written), the bounds,
and that a process that ends at any moment leaves each entry whole or absent. One process uses a folder at a time.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from vnext.base.spelling import reason
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.batches.lines import Fault
from vnext.server.context.api_keys import EVERYONE, Tenant
from vnext.server.context.errors import FileUnknown, StoreUnusable

FILE_BYTES_MAX = 200 * 2**20
STORE_BYTES_MAX = 10 * 2**30
ENTRIES_MAX = 10_000
WINDOW_S = 86_400
_ID = re.compile(r"(file|batch)-[0-9a-f]{24}")

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
log = logging.getLogger("vnext.server")
LIVE: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file as OpenAI's API shows it. `owner`: the mark of the tenant that made it, unset where all share everything."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    owner: str | UnsetType = UNSET


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch's file cannot be used."""

    data: list[Fault]
    object: str = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as OpenAI's API shows it. `owner` as in File."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None
    object: str = "batch"
    model: str | None = None
    usage: Usage | None = None
    owner: str | UnsetType = UNSET


Entry = TypeVar("Entry", File, Batch)


class Store:
    """See the module. Mutable. Raises FileUnknown for an id of nothing, StoreUnusable where it cannot write: then nothing has
    changed."""

    def __init__(self, folder: Path) -> None:
        """Make or read the folder. Raises StoreUnusable."""
        self._files_at, self._batches_at = folder / "files", folder / "batches"
        try:
            for path in (self._files_at, self._batches_at):
                path.mkdir(parents=True, exist_ok=True)
                with suppress(PermissionError):  # of a folder that another user has made
                    path.chmod(0o700)
            self._lock = (folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files: dict[str, File] = {each.id: each for each in _read(self._files_at, File)}
            self.batches: dict[str, Batch] = {each.id: each for each in _read(self._batches_at, Batch)}
        except BlockingIOError as error:
            raise StoreUnusable(f"the folder {folder} serves another server's batches: choose another with --batch-dir") from error
        except OSError as error:
            sentence = f"the folder {folder} for batches cannot be written ({reason(error)}): choose another with --batch-dir"
            raise StoreUnusable(sentence) from error

    def close(self) -> None:
        """Leave the folder to another process."""
        self._lock.close()

    def content(self, id_: str) -> Path:
        """Where the bytes of a file are."""
        self.file(id_)
        return self._files_at / id_

    def file(self, id_: str, tenant: Tenant = EVERYONE) -> File:
        return _found(self.files, id_, "file", tenant)

    def batch(self, id_: str, tenant: Tenant = EVERYONE) -> Batch:
        return _found(self.batches, id_, "batch", tenant)

    def draft(self, tenant: Tenant = EVERYONE) -> Path:
        """Where the bytes of a file to come are written. Raises InvalidRequest where the folder is full for this tenant."""
        files = self.files.values()
        has_room = _has_room(tenant, [(each.owner, each.bytes) for each in files], STORE_BYTES_MAX)
        if not (has_room and _has_room(tenant, [(each.owner, 1) for each in files], ENTRIES_MAX)):
            raise InvalidRequest("The server's folder for files is full: delete some with DELETE /v1/files/ID.", "file")
        return self._files_at / f"{secrets.token_hex(12)}.draft"

    def add_file(self, draft: Path, name: str, purpose: str, id_: str = "", owner: str | UnsetType = UNSET) -> File:
        """A draft's bytes become a file, of the given id or of a new one. Repeating it with an id does no harm."""
        id_ = id_ or new_id("file")
        path = self._files_at / id_
        with writing():
            if draft.is_file():
                os.rename(draft, path)
        found = File(id=id_, bytes=path.stat().st_size, created_at=int(time.time()), filename=name, purpose=purpose, owner=owner)
        _write(self._files_at, found)
        self.files[found.id] = found
        return found

    def delete_file(self, id_: str) -> Path:
        """Forget a file; returns where its bytes are left, which takes milliseconds to free. Raises InvalidRequest for the input of
        a batch in progress."""
        self.file(id_)
        if user := next((each.id for each in self.batches.values() if each.input_file_id == id_ and each.status in LIVE), None):
            raise InvalidRequest(f"The file {id_} is read by {user}: cancel that first.", "file_id")
        left = self._files_at / f"{id_}.draft"
        with writing():
            (self._files_at / f"{id_}.json").unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                (self._files_at / id_).rename(left)
        del self.files[id_]
        return left

    def add_batch(self, endpoint: str, input_: File, window: str, metadata: dict[str, str] | None, tenant: Tenant) -> Batch:
        """A new batch of a tenant. Raises InvalidRequest where there are too many."""
        if not _has_room(tenant, [(each.owner, 1) for each in self.batches.values()], ENTRIES_MAX):
            raise InvalidRequest(f"The server keeps {ENTRIES_MAX} batches, and too many are there: clear its folder for batches.")
        now_s = int(time.time())
        return self.put(
            Batch(
                id=new_id("batch"), endpoint=endpoint, input_file_id=input_.id, completion_window=window, created_at=now_s,
                expires_at=now_s + WINDOW_S, metadata=metadata, owner=tenant.owner or UNSET,
            )
        )  # fmt: skip

    def put(self, batch: Batch) -> Batch:
        """Keep a batch's new state on disk."""
        _write(self._batches_at, batch)
        self.batches[batch.id] = batch
        return batch

    def turn(self, id_: str, status: Status, **changes: Any) -> Batch:
        """A batch's next status, with the time at which it came."""
        stamp = {} if status == "validating" else {f"{status}_at": int(time.time())}
        return self.put(msgspec.structs.replace(self.batches[id_], status=status, **stamp, **changes))

    def results(self, id_: str) -> tuple[Path, Path]:
        """Where a batch's answers and errors are written while it runs."""
        return self._batches_at / f"{id_}.answers", self._batches_at / f"{id_}.errors"


@contextmanager
def writing() -> Iterator[None]:
    """Raises StoreUnusable where the disk is full, or the folder cannot be written for another reason."""
    try:
        yield
    except ConnectionError:
        raise  # of the client whose file is being written
    except OSError as error:
        why = reason(error)
        raise StoreUnusable(
            f"The server's folder for files and batches cannot be written ({why}): make room, then send the request again."
        ) from error


def private(path: str, flags: int) -> int:
    """An opener for `open`: only this user reads the file, which holds prompts and answers."""
    return os.open(path, flags, 0o600)


def append(path: Path, line: bytes) -> None:
    """Add a whole line to a file, or nothing. Raises StoreUnusable."""
    with writing(), open(path, "ab", buffering=0, opener=private) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def new_id(kind: str) -> str:
    """An id that no other file or batch has."""
    return f"{kind}-{secrets.token_hex(12)}"


def seen(entries: dict[str, Any], tenant: Tenant) -> list[Any]:
    """A tenant's entries, the newest first."""
    return [entry for entry in reversed(entries.values()) if tenant.sees(entry.owner or "")]


def _found(entries: Mapping[str, Entry], id_: str, kind: str, tenant: Tenant) -> Entry:
    if id_ not in entries or not tenant.sees(entries[id_].owner or ""):
        raise FileUnknown(f"There is no {kind} {id_[:60]!r}.")
    return entries[id_]


def _write(folder: Path, entry: File | Batch) -> None:
    """Replace an entry in one step. Raises StoreUnusable."""
    draft = folder / f"{entry.id}.draft"
    with writing():
        with open(draft, "wb", opener=private) as file:
            file.write(msgspec.json.encode(entry))
        os.replace(draft, folder / f"{entry.id}.json")


def _has_room(tenant: Tenant, held: Sequence[tuple[str | UnsetType, int]], most: int) -> bool:
    """Whether a tenant may hold more. Each of several gets as much as is left free, so there is always room for another."""
    free = most - sum(size for _, size in held)
    return free > (0 if tenant.is_admin else sum(size for owner, size in held if owner == tenant.owner))


def _read(folder: Path, kind: type[Any]) -> list[Any]:
    """The folder's whole entries, oldest first; drafts of a process that ended are deleted."""
    for draft in folder.glob("*.draft"):
        draft.unlink()
    paths = [path for path in folder.glob("*.json") if _ID.fullmatch(path.stem)]
    found = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (ValueError, RecursionError) as error:
            log.warning("%s is left alone: it describes no %s (%s)", path, kind.__name__.lower(), error)
    return sorted(found, key=lambda each: (each.created_at, each.id))


# ---- what batches have used --------------------------------------------------------------------------------------
# What the answers of a batch have cost together, as OpenAI's API shows it, by the names under which each of this server's APIs
# counts its tokens.


class Cached(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all complete answers."""

    input_tokens: int = 0
    input_tokens_details: Cached = Cached()
    output_tokens: int = 0
    output_tokens_details: Thought = Thought()
    total_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        cached = self.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens
        thought = self.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            input_tokens_details=Cached(cached_tokens=cached),
            output_tokens=self.output_tokens + other.output_tokens,
            output_tokens_details=Thought(reasoning_tokens=thought),
            total_tokens=self.total_tokens + other.total_tokens,
        )


class Spent(NamedTuple):
    """Of some answers: the tokens, and the name of the model."""

    usage: Usage = Usage()
    model: str | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """The members of an answer that are read here."""

    model: str | None = None
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    body: msgspec.Raw


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    response: _Response


_line_decoder, _body_decoder = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Body)


def spent_by(body: Any) -> Spent:
    """What one answer has cost; nothing for one that counts no tokens."""
    try:
        found = msgspec.convert(body, _Body)
    except msgspec.ValidationError:
        return Spent()
    return Spent(_usage(found.usage or {}), found.model)


def spent_in(path: Path) -> Spent:
    """What the whole lines of a file of results have cost."""
    usage, model = Usage(), None
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            found = _body_decoder.decode(_line_decoder.decode(line).response.body)
        except (ValueError, RecursionError):
            continue
        usage, model = usage + _usage(found.usage or {}), model or found.model
    return Spent(usage, model)


def _usage(given: Mapping[str, Any]) -> Usage:
    """Of a chat, a completion or embeddings (prompt and completion), a response, or Anthropic's message (input and output)."""
    anthropic = sum(_count(given, f"cache_{name}_input_tokens") for name in ("creation", "read"))
    read = _count(given, "prompt_tokens") + _count(given, "input_tokens") + anthropic
    written = _count(given, "completion_tokens") + _count(given, "output_tokens")
    cached = _count(given, "cache_read_input_tokens")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        cached += _count(given.get(name), "cached_tokens")
    thought = sum(_count(given.get(f"{name}_tokens_details"), "reasoning_tokens") for name in ("completion", "output"))
    return Usage(
        input_tokens=read,
        input_tokens_details=Cached(cached_tokens=cached),
        output_tokens=written,
        output_tokens_details=Thought(reasoning_tokens=thought),
        total_tokens=read + written,
    )


def _count(members: Any, name: str) -> int:
    found = members.get(name) if isinstance(members, Mapping) else None
    return found if isinstance(found, int) else 0
