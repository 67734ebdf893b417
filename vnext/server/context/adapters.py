"""Served adapters: the LoRA adapters that requests may name as their model.

Owns their names, the folders from which they may come, and how many calls use each. Files are read for their digest, their
settings and the shapes of their tensors; an adapter gets into the engine with the first request that names it. The API servers of
one port share the names that come and go in a file, which each reads again when it is another one.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vnext.base.spelling import reason
from vnext.runtime.protocol.adapter_files import FILE_NAMES, LinearLayers, adapter_files, module_of
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.reasons import NOT_A_NUMBER
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.api_keys import EVERYONE, Tenant
from vnext.server.context.errors import ModelUnknown, NotANumber
from vnext.server.settings import ServerSettings

NAMES_MAX, NAME_CHARACTERS_MAX = 1_000, 256  # of a tenant; each stands in its /v1/models
Key = tuple[str | None, str]
"""An adapter's owner, None for one of the settings, and its name."""


class ServedAdapters:
    """The adapters by name; each tenant has names of its own beside those of all. `taken`: the names of the model itself;
    `layers`: those of the model that an adapter may change."""

    def __init__(self, settings: ServerSettings, taken: Sequence[str], is_enabled: bool, layers: LinearLayers) -> None:
        """Raises InvalidRequest for a module of the settings that is none."""
        self._taken, self._is_enabled, self._rank_max, self._layers = tuple(taken), is_enabled, settings.max_lora_rank, layers
        self._root = Path(settings.lora_root).expanduser().resolve() if settings.lora_root else None
        self._shared: Path | None = None
        self._stamp: tuple[int, int] | None = None
        modules = [module_of(module) for module in settings.lora_modules]
        self._allowed = {folder_of(module.lora_path) for module in modules}
        self._files: dict[Key, AdapterFiles] = {}
        self._live: Counter[Key] = Counter()
        self._changing = asyncio.Lock()
        for module in modules:
            self._check_name(module.lora_name, EVERYONE)
            self._files[None, module.lora_name] = adapter_files(module, self._rank_max, layers)
        if settings.shared_dir and settings.lora_root:
            self._shared = Path(settings.shared_dir) / "adapters.json"

    def names(self, tenant: Tenant) -> tuple[str, ...]:
        """Those that a tenant sees: its own, and those of the settings."""
        return tuple(dict.fromkeys(name for owner, name in self._known() if owner is None or tenant.sees(owner)))

    def everyones(self, names: Iterable[str]) -> list[str]:
        """Those of these names that are of the settings."""
        return [name for name in names if (None, name) in self._files]

    def files(self, name: str, tenant: Tenant) -> AdapterFiles | None:
        """The adapter that a tenant means by this name; None for the model itself, and for none that it sees."""
        return None if (key := self._key(name, tenant)) is None else self._files[key]

    @contextmanager
    def used(self, name: str, tenant: Tenant) -> Iterator[None]:
        """While a call of a tenant computes with the adapter of this name, if it is one's."""
        key = self._key(name, tenant)
        if key is not None:
            self._live[key] += 1
        try:
            yield
        finally:
            if key is not None:
                self._live[key] -= 1

    async def load(self, name: str, path: str, tenant: Tenant = EVERYONE) -> None:
        """Serve the adapter in the folder `path` under `name`, to those who see what is the tenant's. Raises InvalidRequest."""
        if not self._is_enabled:
            raise InvalidRequest("This server serves no adapters: start it with --enable-lora.", "lora_name")
        folder = folder_of(path)
        if folder not in self._allowed and self._root is None:
            raise InvalidRequest("lora_path was not named at the start: start the server with --lora-root FOLDER.", "lora_path")
        if folder not in self._allowed and not self._is_under_root(folder):
            raise InvalidRequest("lora_path is outside of the folder that --lora-root allows: put the adapter there.", "lora_path")
        async with self._changing:
            self._check_name(name, tenant)
            if sum(owner == tenant.owner for owner, _ in self._known()) >= NAMES_MAX:
                raise InvalidRequest(f"{NAMES_MAX} adapters are served, and no more at once: unload one first.", "lora_name")
            request = LoRARequest(name, 1, str(folder))
            try:
                files = await asyncio.to_thread(adapter_files, request, self._rank_max, self._layers)
            except InvalidRequest as error:  # in the client's own words, which may be a link
                raise InvalidRequest(error.message.replace(str(folder), path), "lora_path", error.code) from error
            with self._changed():
                self._check_name(name, tenant)
                self._files[tenant.owner, name] = files

    def _is_under_root(self, folder: Path) -> bool:
        """Whether a folder and the files of its adapter are, whatever links they are."""
        paths = (folder, *(folder_of(str(folder / name)) for name in FILE_NAMES))
        return self._root is not None and all(path.is_relative_to(self._root) for path in paths)

    async def unload(self, name: str, tenant: Tenant = EVERYONE) -> None:
        """Forget a name that is the tenant's. Raises ModelUnknown, and InvalidRequest while calls of this server use it; those of
        its siblings go on."""
        async with self._changing:
            key = self._key(name, tenant)
            if key is None or not tenant.sees(key[0] or ""):
                raise ModelUnknown(f"The adapter {name!r} is not served here: ask /v1/models for the names.")
            if count := self._live[key]:
                calls = f"{count} call{'s' * (count > 1)}"
                raise InvalidRequest(f"The adapter {name!r} is in use by {calls}: wait for their end.", "lora_name")
            with self._changed():
                self._files.pop(key, None)
            del self._live[key]

    def _known(self) -> dict[Key, AdapterFiles]:
        """The adapters by owner and name, as siblings have left them."""
        if self._shared is not None and (stamp := _stamp_of(self._shared)) != self._stamp:
            came = _came.decode(self._shared.read_bytes())
            own = {key: files for key, files in self._files.items() if key[0] is None}
            self._files, self._stamp = own | {(owner, files.name): files for owner, files in came}, stamp
        return self._files

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """While `_files` is changed, for siblings too."""
        if self._shared is None:
            yield
            return
        with self._shared.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # for as long as writing a short file takes
            self._known()
            yield
            written = self._shared.with_suffix(".new")
            came = [(owner, files) for (owner, _), files in self._files.items() if owner is not None]
            written.write_bytes(msgspec.json.encode(came))
            written.replace(self._shared)
            self._stamp = _stamp_of(self._shared)

    def _key(self, name: str, tenant: Tenant) -> Key | None:
        """That of a tenant's own adapter, or of everyone's, or of any that it sees."""
        known = self._known()
        own = [(owner, name) for owner in (tenant.owner, None) if (owner, name) in known]
        seen = (key for key in known if tenant.is_admin and key[1] == name)
        return own[0] if own else next(seen, None)

    def _check_name(self, name: str, tenant: Tenant) -> None:
        if len(name) > NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"A name of {len(name)} characters is too long: give at most {NAME_CHARACTERS_MAX}.", "lora_name")
        if not name or name in self._taken or {(None, name), (tenant.owner, name)} & self._known().keys():
            raise InvalidRequest(f"The name {name!r} is taken or empty: choose another, or unload it first.", "lora_name")


_came = msgspec.json.Decoder(list[tuple[str, AdapterFiles]])


def _stamp_of(path: Path) -> tuple[int, int] | None:
    """Another one for each file at this path; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def failed(reason: str, adapter: AdapterFiles | None) -> Exception:
    """The error of a request that an adapter, a grammar or the model has ended. Its client knows the adapter by its name, and has
    no business with the server's folders."""
    if reason == NOT_A_NUMBER:
        return NotANumber(f"{reason[:1].upper()}{reason[1:]}.")
    if adapter is None:
        return InvalidRequest(reason, code="constraint_failed")
    return InvalidRequest(reason.replace(adapter.path, adapter.name), "model", "adapter_failed")


def folder_of(path: str) -> Path:
    """The folder, with links resolved: what is allowed is decided by where it really is. Raises InvalidRequest."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, a loop of links, an unknown user's home
        raise InvalidRequest(f"lora_path {path!r} is no path of a folder ({reason(error)}).", "lora_path") from error
