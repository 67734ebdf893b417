"""Hub: resolves a user's model name to a folder on this machine: an existing folder, a model by name, or a hub id to download.

Owns the choice, the hub's downloads and their errors, each one sentence with the name and the remedy. Reads no weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path

from vnext.base.spelling import close_to, reason
from vnext.base.tokenizer_files import TEMPLATES_FOLDER
from vnext.models.config.folder import CONFIG_NAME
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SPLIT, SUFFIX, is_gguf
from vnext.models.gguf.towers import is_tower
from vnext.models.loading.named import MODELS, fetch, here, is_requirement

log = logging.getLogger(__name__)
WANTED_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja")
READ = (".json", ".safetensors", SUFFIX, ".model", ".jinja")
UNWANTED_FILES = (
    "consolidated*",
    *(f"{TEMPLATES_FOLDER[:place]}[!{letter}]*/*" for place, letter in enumerate(TEMPLATES_FOLDER)),
    *(f"{TEMPLATES_FOLDER[:place]}/*" for place in range(1, len(TEMPLATES_FOLDER))),
    f"{TEMPLATES_FOLDER}?*/*",
    f"{TEMPLATES_FOLDER}/*/*",
)
"""All other folders: what is unwanted cannot be said with an exception, so it is said letter by letter."""


def resolve(model: str, revision: str = "", with_weights: bool = True, named: Path | None = None) -> Path:
    """The folder of a model, or its GGUF file: `model` itself when it is one, else what is fetched by its name.

    `named` is the folder of models that have names (named.py), None for none. Other names are hub ids, OWNER/NAME, or with the
    quantisation or the name of a GGUF file behind a colon; they are downloaded with a progress bar, and the hub's cache serves
    when the hub cannot be reached. `revision`: a branch, tag or commit on the hub, "" for its head. Without `with_weights` the
    hub's files of weights are not downloaded. Raises ModelError.
    """
    if (local := found_here(model, revision, named)) is not None:
        return local
    if named is not None and _has_name(model, named):
        return fetch(model, named)
    repository, _, wanted = model.partition(":")
    return download(repository, revision, with_weights, wanted)


def _has_name(model: str, named: Path | None) -> bool:
    return named is not None and (model in MODELS or is_requirement(model) or here(model, named) is not None)


def found_here(model: str, revision: str = "", named: Path | None = None) -> Path | None:
    """The folder or GGUF file that `model` is, None for a name, whose model may have to be fetched; arguments as of `resolve`.
    Raises ModelError for what can be neither."""
    try:
        local = Path(model).expanduser()
        is_here = bool(model) and (local.is_dir() or is_gguf(local))
        is_file = local.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a folder that may not be looked into, ~nobody, a zero byte
        raise ModelError(f"{model!r} cannot be opened ({reason(error)}); give an existing folder or a hub id") from error
    has_name = _has_name(model, named)
    if revision and (is_here or has_name):
        where = "on this machine" if is_here else "no model of the hub"
        raise ModelError(f"{model!r} is {where} and has no revision {revision!r}; leave --revision out")
    if is_here:
        if has_name:
            log.warning("%s is the folder %s, and not the model of this name.", model, local.absolute())
        _require_readable(local)
        return local
    if is_file:
        raise ModelError(f"{model!r} is a file; give a GGUF file, or the folder that holds config.json and the safetensors files")
    if has_name:
        return None
    if "://" in model:
        raise ModelError(f"{model!r} is a URL; download the file and give its path, or give a hub id such as owner/name")
    if local.suffix.lower() == SUFFIX and ":" not in model:
        raise ModelError(f"there is no file {model!r}; give an existing GGUF file, a folder or a hub id such as owner/name")
    repository = model.partition(":")[0]
    if not model or model[0] in "./~" or model[-1] == "/" or repository.count("/") > 1:
        raise ModelError(f"there is no folder {model!r}; give an existing folder or a hub id such as owner/name")
    if meant := close_to(repository.lower(), MODELS) if named is not None else "":
        raise ModelError(f"there is no folder and no model {model!r}: did you mean {meant}?")
    return None


def _require_readable(local: Path) -> None:
    """Raise ModelError where this user may not read a model's folder or file, or a file in the folder."""
    for path in (local, *sorted(local.glob("*"))):  # of a folder that may not be read, none
        if (path == local or path.suffix in READ) and path.exists() and not os.access(path, _needed(path)):
            raise ModelError(f"{path} may not be read by this user; change its owner or its permissions")


def _needed(path: Path) -> int:
    return os.R_OK | os.X_OK if path.is_dir() else os.R_OK


def download(model: str, revision: str = "", with_weights: bool = True, wanted: str = "") -> Path:
    """The cached snapshot of a hub id, or its GGUF file for `wanted`, a quantisation or a file's name; downloads what is missing.
    Raises ModelError."""
    place = "name a folder for downloaded models in HF_HOME, or give a model's folder"
    try:
        from huggingface_hub import constants, errors, snapshot_download  # most of a second, and no folder needs it

        if not os.path.isabs(constants.HF_HUB_CACHE):
            raise RuntimeError(constants.HF_HUB_CACHE)  # as it does itself for such a user, mostly
        if not wanted:
            allowed, ignored = list(WANTED_FILES if with_weights else WANTED_FILES[1:]), list(UNWANTED_FILES)
            found = Path(snapshot_download(model, revision=revision or None, allow_patterns=allowed, ignore_patterns=ignored))
            if not with_weights or any((found / name).is_file() for name in (CONFIG_NAME, "tokenizer.json")):
                return found
        return _gguf_file(model, revision, wanted)
    except ModelError:
        raise
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


def _gguf_file(model: str, revision: str, wanted: str) -> Path:
    """The downloaded GGUF file of a repository that `wanted` names, with the further files of a split model and its tower's."""
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        names = [each.rfilename for each in HfApi().model_info(model, revision=revision or None).siblings or ()]
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception:  # the hub cannot be reached, and what was downloaded before serves
        before = Path(snapshot_download(model, revision=revision or None, local_files_only=True))
        names = [path.relative_to(before).as_posix() for path in before.rglob(f"*{SUFFIX}")]
    chosen = gguf_files(model, names, wanted)
    near = (name for name in names if name.endswith(SUFFIX) and Path(name).parent == Path(chosen[0]).parent)
    patterns = [*map(escape, chosen + sorted(name for name in near if is_tower(Path(name)))[:1])]
    return Path(snapshot_download(model, revision=revision or None, allow_patterns=patterns)) / chosen[0]


def gguf_files(model: str, names: Iterable[str], wanted: str) -> list[str]:
    """Of the files of a repository the GGUF file that `wanted` names, by its quantisation or itself, "" for the only one; of a
    split model all parts, in order. Raises ModelError."""
    every = sorted(name for name in names if name.endswith(SUFFIX) and not is_tower(Path(name)))
    first = [name for name in every if not (match := SPLIT.fullmatch(name)) or int(match[2]) == 1]
    quantised = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}(?:[-./].*)?", re.IGNORECASE)
    found = [name for name in first if wanted in (name, name.rpartition("/")[2])] or [
        name for name in first if not wanted or quantised.fullmatch(name.removesuffix(SUFFIX))
    ]
    if not first:
        raise ModelError(f"the hub's model {model!r} has neither config.json nor a GGUF file; name another one")
    if len(found) != 1:
        which = f"{len(found) or 'no'} GGUF files named {wanted!r}" if wanted else f"{len(first)} GGUF files"
        raise ModelError(f"the hub's model {model!r} has {which}; name one behind a colon: {', '.join(found or first)}")
    split = SPLIT.fullmatch(found[0])
    return [name for name in every if (part := SPLIT.fullmatch(name)) and part[1] == split[1]] if split else found
