"""The folder of a GGUF file: a checkpoint's folder whose JSON files follow from the metadata, and whose weights are the file.

Everything that reads a checkpoint reads this folder. It stands below the user's state, under a name that follows from the file's
place, size and time, and is made once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import struct
from pathlib import Path

from vnext.models.errors import ModelError
from vnext.models.gguf.config import STRETCHES, config_of
from vnext.models.gguf.header import Header, read_header
from vnext.models.gguf.tokenizer import Vocabulary

SUFFIX = ".gguf"
LINK = "vnext-weights-{:05}.gguf"
LINKS = "vnext-weights-*.gguf"
FORM = 1
"""Of what is written: another number makes all folders anew."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def linked_files(folder: Path) -> list[Path]:
    """The GGUF files of such a folder, in order; [] of another one."""
    return sorted(folder.glob(LINKS))


def gguf_in(folder: Path) -> Path | None:
    """The one model that a folder without config.json holds as GGUF, its first file if it is split; None where there is none.
    Raises ModelError where there are several."""
    if (folder / "config.json").is_file():
        return None
    found = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not (match := SPLIT.fullmatch(path.name)) or int(match[2]) == 1]
    if len(found) > 1:
        raise ModelError(f"{folder} has several models, {', '.join(path.name for path in found)}: name one of these files")
    return found[0] if found else None


def folder_of(file: Path, parent: Path) -> Path:
    """The checkpoint's folder of a GGUF file, in `parent`. Raises ModelError."""
    files = _all(file.resolve())
    stats = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    digest = hashlib.blake2b(json.dumps([FORM, stats]).encode(), digest_size=8).hexdigest()
    found = parent / digest / file.name.removesuffix(SUFFIX)
    if not found.is_dir():
        texts = _texts(files)
        try:
            _make(found, texts, files)
        except OSError as error:
            raise ModelError(f"the folder {found} for {file.name} cannot be made ({error}); make room for it") from error
    return found


def _all(file: Path) -> list[Path]:
    """The file, or all of a model that is split. Raises ModelError."""
    match = SPLIT.fullmatch(file.name)
    count = int(match[3]) if match else 1
    names = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)] if match else [file.name]
    files = [file.with_name(name) for name in names]
    if missing := [each.name for each in files if not each.is_file()]:
        raise ModelError(f"of {count} files of the model {missing[0]} is missing beside {file}; download it")
    return files


def _texts(files: list[Path]) -> dict[str, object]:
    header = read_header(files[0])
    vocabulary = Vocabulary(header.metadata)
    begin = vocabulary.number("bos")
    generation = {"eos_token_id": vocabulary.ends()} | ({} if begin is None else {"bos_token_id": begin})
    return {
        "config.json": config_of(header, _stretches(files[0], header)) | generation,
        "generation_config.json": generation,
        "tokenizer.json": vocabulary.json(),
        "tokenizer_config.json": vocabulary.settings(),
    }


def _stretches(file: Path, header: Header) -> tuple[float, ...] | None:
    tensor = header.tensors.get(STRETCHES)
    if tensor is None or tensor.type != "F32":
        return None
    with file.open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(tensor.stop - tensor.start)
    return struct.unpack(f"<{len(data) // 4}f", data)


def _make(found: Path, texts: dict[str, object], files: list[Path]) -> None:
    """Make the folder under a name of its own first: another start may be making the same one."""
    draft = found.parent.with_name(f"{found.parent.name}.{secrets.token_hex(4)}")
    (inner := draft / found.name).mkdir(parents=True)
    for name, value in texts.items():
        (inner / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    for number, file in enumerate(files, 1):
        (inner / LINK.format(number)).symlink_to(file)
    try:
        os.rename(draft, found.parent)
    except OSError:
        shutil.rmtree(draft)
        if not found.is_dir():
            raise
