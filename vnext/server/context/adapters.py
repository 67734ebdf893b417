"""Served adapters: the LoRA adapters that requests may name as their model.

Owns their names, the folders from which they may come, and how many calls use each. Files are read for their digest, their
settings and the shapes of their tensors; an adapter gets into the engine with the first request that names it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vnext.runtime.protocol.lora_request import FILE_NAMES, LinearLayers, LoRARequest, adapter_files, module_of
from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.reasons import NOT_A_NUMBER
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.api_keys import EVERYONE, Tenant
from vnext.server.context.errors import ModelUnknown, NotANumber
from vnext.server.settings import ServerSettings

NAMES_MAX, NAME_CHARACTERS_MAX = 1_000, 256  # each stands in /v1/models


class ServedAdapters:
    """The adapters by name. `taken`: the names of the model itself; `layers`: those of the model that an adapter may change."""

    def __init__(self, settings: ServerSettings, taken: Sequence[str], is_enabled: bool, layers: LinearLayers) -> None:
        """Raises InvalidRequest for a module of the settings that is none."""
        self._taken, self._is_enabled, self._rank_max, self._layers = tuple(taken), is_enabled, settings.max_lora_rank, layers
        self._root = Path(settings.lora_root).expanduser().resolve() if settings.lora_root else None
        modules = [module_of(module) for module in settings.lora_modules]
        self._allowed = {folder_of(module.lora_path) for module in modules}
        self._files: dict[str, AdapterFiles] = {}
        self._owners: dict[str, str] = {}
        self._live: Counter[str] = Counter()
        self._changing = asyncio.Lock()
        for module in modules:
            self._check_name(module.lora_name)
            self._files[module.lora_name] = adapter_files(module, self._rank_max, layers)

    def names(self, tenant: Tenant) -> tuple[str, ...]:
        """Those that a tenant sees: its own, and those of the settings."""
        return tuple(name for name in self._files if self.is_seen(name, tenant))

    def is_seen(self, name: str, tenant: Tenant) -> bool:
        """Whether a tenant may ask for this adapter."""
        return name in self._files and (name not in self._owners or tenant.sees(self._owners[name]))

    def files(self, name: str) -> AdapterFiles | None:
        """The adapter of this name; None for the model itself."""
        return self._files.get(name)

    def take(self, name: str) -> None:
        """A call begins to compute with the adapter of this name, if it is one's."""
        self._live[name] += 1

    def give(self, name: str) -> None:
        """Such a call has ended."""
        self._live[name] -= 1

    async def load(self, name: str, path: str, tenant: Tenant = EVERYONE) -> None:
        """Serve the adapter in the folder `path` under `name`, to those who see what is the tenant's. Raises InvalidRequest."""
        if not self._is_enabled:
            raise InvalidRequest("This server serves no adapters: start it with --enable-lora.", "lora_name")
        folder = folder_of(path)
        if folder not in self._allowed and not self._is_under_root(folder):
            raise InvalidRequest("lora_path is outside of the folder that --lora-root allows: put the adapter there.", "lora_path")
        async with self._changing:
            self._check_name(name)
            if len(self._files) >= NAMES_MAX:
                raise InvalidRequest(f"{NAMES_MAX} adapters are served, and no more at once: unload one first.", "lora_name")
            request = LoRARequest(name, 1, str(folder))
            try:
                self._files[name] = await asyncio.to_thread(adapter_files, request, self._rank_max, self._layers)
            except InvalidRequest as error:  # in the client's own words, which may be a link
                raise InvalidRequest(error.message.replace(str(folder), path), "lora_path", error.code) from error
            self._owners[name] = tenant.owner

    def _is_under_root(self, folder: Path) -> bool:
        """Whether a folder and the files of its adapter are, whatever links they are."""
        paths = (folder, *(folder_of(str(folder / name)) for name in FILE_NAMES))
        return self._root is not None and all(path.is_relative_to(self._root) for path in paths)

    async def unload(self, name: str, tenant: Tenant = EVERYONE) -> None:
        """Forget a name that is the tenant's. Raises ModelUnknown, and InvalidRequest while calls use it."""
        async with self._changing:
            if name not in self._files or not tenant.sees(self._owners.get(name, "")):
                raise ModelUnknown(f"The adapter {name!r} is not served here: ask /v1/models for the names.")
            if count := self._live[name]:
                raise InvalidRequest(f"The adapter {name!r} is in use by {count} calls: wait for their end.", "lora_name")
            del self._files[name], self._live[name]
            self._owners.pop(name, None)

    def _check_name(self, name: str) -> None:
        if len(name) > NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"A name of {len(name)} characters is too long: give at most {NAME_CHARACTERS_MAX}.", "lora_name")
        if not name or name in self._taken or name in self._files:
            raise InvalidRequest(f"The name {name!r} is taken or empty: choose another, or unload it first.", "lora_name")


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
        raise InvalidRequest(f"lora_path {path!r} is no path of a folder ({error}).", "lora_path") from error
