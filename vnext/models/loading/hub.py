"""Hub: resolves a user's model name to a folder on this machine: an existing folder, or a hub id to download.

Owns the choice, the download and its errors, each one sentence with the name and the remedy. Reads no weights.
"""

from __future__ import annotations

import os
from pathlib import Path

from vnext.base.tokenizer_files import TEMPLATES_FOLDER
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SUFFIX

WANTED_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja")
UNWANTED_FILES = (
    "consolidated*",
    *(f"{TEMPLATES_FOLDER[:place]}[!{letter}]*/*" for place, letter in enumerate(TEMPLATES_FOLDER)),
    *(f"{TEMPLATES_FOLDER[:place]}/*" for place in range(1, len(TEMPLATES_FOLDER))),
    f"{TEMPLATES_FOLDER}?*/*",
    f"{TEMPLATES_FOLDER}/*/*",
)
"""All other folders: what is unwanted cannot be said with an exception, so it is said letter by letter."""


def resolve(model: str, revision: str = "", with_weights: bool = True) -> Path:
    """The folder of a model, or its GGUF file: `model` itself when it is one, else a hub id, downloaded with a progress bar.

    A hub id already in the cache is used when the hub cannot be reached. `revision`: a branch, tag or commit on the hub, "" for
    its head. Without `with_weights` the files of weights are not downloaded. Raises ModelError.
    """
    try:
        local = Path(model).expanduser()
        if model and (local.is_dir() or (local.suffix == SUFFIX and local.is_file())):
            if revision:
                raise ModelError(f"{model!r} is on this machine and has no revision {revision!r}; leave --revision out")
            return local
        is_file = local.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a folder that may not be looked into, ~nobody, a zero byte
        raise ModelError(f"{model!r} cannot be opened ({error}); give an existing folder or a hub id") from error
    if is_file:
        raise ModelError(f"{model!r} is a file; give a GGUF file, or the folder that holds config.json and the safetensors files")
    if not model or model[0] in "./~" or model[-1] == "/" or model.count("/") > 1:
        raise ModelError(f"there is no folder {model!r}; give an existing folder or a hub id such as owner/name")
    return download(model, revision, with_weights)


def download(model: str, revision: str = "", with_weights: bool = True) -> Path:
    """The cached snapshot of a hub id; downloads the missing files. Raises ModelError."""
    place = "name a folder for downloaded models in HF_HOME, or give a model's folder"
    try:
        from huggingface_hub import constants, errors, snapshot_download  # a good part of a second, and no folder needs it

        if not os.path.isabs(constants.HF_HUB_CACHE):
            raise RuntimeError(constants.HF_HUB_CACHE)  # as it does itself for such a user, mostly
        wanted = WANTED_FILES if with_weights else WANTED_FILES[1:]
        patterns = {"allow_patterns": list(wanted), "ignore_patterns": list(UNWANTED_FILES)}
        return Path(snapshot_download(model, revision=revision or None, **patterns))
    except RuntimeError as error:
        if os.path.isabs(os.path.expanduser("~")):
            raise ModelError(f"model {model!r} could not be downloaded ({error}); try again or give a folder") from error
        raise ModelError(f"model {model!r} cannot be downloaded: this user has no home, so {place}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"model {model!r} has no revision {revision!r} on the hub; name a branch, a tag or a commit") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder nor a valid hub id such as owner/name") from error
    except errors.GatedRepoError as error:
        raise ModelError(f"model {model!r} is gated; accept its terms on the hub and log in, then try again") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"there is neither a folder nor a hub model {model!r}; check the name or log in") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {model!r}, no hub model of this name on this machine, and the hub cannot be reached; "
            "correct the name, or go online once"
        ) from error
    except PermissionError as error:
        raise ModelError(f"model {model!r} cannot be downloaded: {error.filename} may not be written; {place}") from error
    except Exception as error:  # the hub's client lets its transport's errors through, whose package varies
        raise ModelError(f"model {model!r} could not be downloaded ({error}); try again or give a folder") from error
