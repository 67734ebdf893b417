"""Adapter files: what an engine gets of a LoRARequest, read from the adapter's folder and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vnext.base.spelling import reason
from vnext.models.config.adapter_config import SETTINGS_NAME, WEIGHTS_NAME, adapter_digest, read_adapter_settings
from vnext.models.config.adapter_header import LinearLayers, check_adapter_header
from vnext.models.errors import ModelError
from vnext.runtime.protocol.lora_request import AdapterChoice, LoRARequest
from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.runtime.protocol.settings import EngineSettings

__all__ = ["FILE_NAMES", "KnownAdapters", "LinearLayers", "adapter_files", "module_of"]

FILE_NAMES = (SETTINGS_NAME, WEIGHTS_NAME)


def adapter_files(request: LoRARequest, max_lora_rank: int, layers: LinearLayers | None) -> AdapterFiles:
    """Name, digest and folder of an adapter. Its configuration is checked, and the shapes of its tensors against the model's
    `layers`, None while no model is loaded. Raises InvalidRequest."""
    if not request.lora_name or not request.lora_path:
        raise InvalidRequest("A LoRARequest needs a lora_name and a lora_path.", "lora_request")
    try:
        folder = Path(request.lora_path).expanduser().absolute()
        settings = read_adapter_settings(folder, max_lora_rank)
        if layers is not None:
            check_adapter_header(folder, settings, layers)
        return AdapterFiles(name=request.lora_name, digest=adapter_digest(folder), path=str(folder))
    except ModelError as error:
        raise InvalidRequest(f"{error}.", "lora_request") from error
    except (OSError, ValueError, RuntimeError) as error:  # of paths: a zero byte, a loop of links, an unknown user's home
        raise InvalidRequest(f"The adapter's folder {request.lora_path!r} is unreadable ({reason(error)}).", "lora_path") from error


def module_of(text: str) -> LoRARequest:
    """The adapter that --lora-modules names: name=path, or vLLM's JSON object. Raises InvalidRequest."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            raw = json.loads(text)
            name, path = raw["name"], raw["path"]
        except (ValueError, KeyError, TypeError):
            name = path = ""
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise InvalidRequest(f'--lora-modules has {text!r}: write name=path, or {{"name": ..., "path": ...}}.', "lora_modules")
    return LoRARequest(name, 1, path)


class KnownAdapters:
    """The adapters that an engine was asked for, each read from disk once."""

    def __init__(self, settings: EngineSettings, layers: LinearLayers) -> None:
        self._settings, self._layers = settings, layers
        self._files: dict[LoRARequest, AdapterFiles] = {}

    def of(self, count: int, lora_request: AdapterChoice) -> Sequence[AdapterFiles | None]:
        """The adapter of each of `count` prompts. Raises InvalidRequest."""
        if lora_request is None:
            return [None] * count
        if not self._settings.enable_lora:
            raise InvalidRequest("This engine serves no adapters: make it with LLM(..., enable_lora=True).", "lora_request")
        each = [lora_request] * count if isinstance(lora_request, LoRARequest) else lora_request
        if len(each) != count:
            counts = f"There are {count} prompts and {len(each)} lora_requests"
            raise InvalidRequest(f"{counts}: give one, or one for each.", "lora_request")
        for request in {request for request in each if request is not None} - self._files.keys():
            self._files[request] = adapter_files(request, self._settings.max_lora_rank, self._layers)
        return [None if request is None else self._files[request] for request in each]
