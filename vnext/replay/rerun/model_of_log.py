"""The folder of the model that a log was recorded with, the digests of its files, and where its inputs are. Loads no weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from vnext.base.spelling import reason
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import fingerprint, weights_digest
from vnext.models.loading.named import here
from vnext.replay.rerun.numerics import CannotRun
from vnext.runtime.processes.launch import DEMO_MODEL, model_folder, named_models
from vnext.state.events import EngineStarted


class KeptAt(NamedTuple):
    """The disk tier with the vectors of a log's inputs, None where there was none, and the version of vnext that made them."""

    folder: Path | None
    version: str


def folder_of(started: EngineStarted, model: str | None) -> Path:
    """The model's folder: the one that the log names, as long as it is here. Only a model that the user names may be downloaded; a
    name in a log must be a folder or a file here, or a model that was fetched, or the bundled one."""
    if model is None and os.path.isdir(made := started.environment.get("folder", "")):
        return Path(made)
    name = started.model if model is None else model
    if name in ("", "demo") and not Path(name or "demo").is_dir():
        return DEMO_MODEL
    try:
        if model is None and not os.path.exists(os.path.expanduser(name)) and here(name, named_models("")) is None:
            raise CannotRun(f"the log names the model {name!r}, which is not here: give the model with --model")
        return model_folder(name)
    except ModelError as error:
        raise CannotRun(str(error)) from error


def digests_of(folder: Path, whole: bool) -> tuple[str, str]:
    """The digest of a checkpoint and, if `whole`, that of every byte of its weights, else "". Raises CannotRun."""
    try:
        return fingerprint(folder), weights_digest(folder) if whole else ""
    except (ModelError, OSError) as error:
        raise CannotRun(reason(error, with_file=True)) from error
