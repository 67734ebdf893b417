"""From what a user calls a model to a folder on this machine: a folder already there, or a hub id to download.

Owns the choice, the download and its errors, each one sentence with the name and the remedy. Reads no weights.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from vnext.models.errors import ModelError

WANTED_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja")
UNWANTED_FILES = ("*/*", "consolidated*")


def resolve(model: str) -> Path:
    """The folder of a model: `model` itself when it is a folder, else a hub id, downloaded with a progress bar.

    A hub id already in the cache is used when the hub cannot be reached. Raises ModelError.
    """
    local = Path(model).expanduser()
    if model and local.is_dir():
        return local
    if local.is_file():
        raise ModelError(f"{model!r} is a file; give the folder that holds config.json and the safetensors files")
    if not model or model[0] in "./~" or model.count("/") > 1:
        raise ModelError(f"there is no folder {model!r}; give an existing folder or a hub id such as owner/name")
    return download(model)


def download(model: str) -> Path:
    """The cached snapshot of a hub id, fetched as far as it is missing. Raises ModelError."""
    try:
        return Path(snapshot_download(model, allow_patterns=list(WANTED_FILES), ignore_patterns=list(UNWANTED_FILES)))
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder nor a valid hub id such as owner/name") from error
    except GatedRepoError as error:
        raise ModelError(f"model {model!r} is gated; accept its terms on the hub and log in, then try again") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is neither a folder nor a hub model {model!r}; check the name or log in") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model {model!r} is not on this machine and the hub cannot be reached; go online once or give a folder"
        ) from error
    except Exception as error:  # the hub's client lets its transport's errors through, whose package varies
        raise ModelError(f"model {model!r} could not be downloaded ({error}); try again or give a folder") from error
