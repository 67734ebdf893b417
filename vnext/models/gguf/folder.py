"""The folder of a GGUF file: a checkpoint's folder whose JSON files follow from the metadata, and whose weights are the file.

Everything that reads a checkpoint reads this folder. loading/overlay.py makes it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from vnext.models.errors import ModelError
from vnext.models.gguf.header import Header, read_header

SUFFIX = ".gguf"
LINK = "vnext-weights-{:05}.gguf"
LINKS = "vnext-weights-*.gguf"
FORM = 4
"""Of the JSON files: another number makes all folders anew."""
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


def files_of(file: Path) -> list[Path]:
    """The file, or all of a model that is split. Raises ModelError."""
    match = SPLIT.fullmatch(file.name)
    count = int(match[3]) if match else 1
    names = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, count + 1)] if match else [file.name]
    files = [file.with_name(name) for name in names]
    if missing := [each.name for each in files if not each.is_file()]:
        raise ModelError(f"of {count} files of the model {missing[0]} is missing beside {file}; download it")
    return files


def texts_of(files: list[Path]) -> dict[str, dict[str, object]]:
    """The JSON files of the folder by name, from the model's GGUF files. Raises ModelError."""
    from vnext.models.gguf.config import config_of
    from vnext.models.gguf.tokenizer import Vocabulary

    header = read_header(files[0])
    vocabulary = Vocabulary(header.metadata)
    begin = vocabulary.number("bos")
    generation: dict[str, object] = {"eos_token_id": vocabulary.ends()} | ({} if begin is None else {"bos_token_id": begin})
    return {
        "config.json": config_of(header, _stretches(files[0], header)) | generation,
        "generation_config.json": generation,
        "tokenizer.json": vocabulary.json(),
        "tokenizer_config.json": vocabulary.settings(),
    }


def _stretches(file: Path, header: Header) -> dict[str, tuple[float, ...]]:
    from vnext.models.gguf.members import BY_LENGTH, STRETCHES

    found = {}
    for name in (STRETCHES, *BY_LENGTH.values()):
        tensor = header.tensors.get(name)
        if tensor is None or tensor.type != "F32":
            continue
        with file.open("rb") as stream:
            stream.seek(tensor.start)
            data = stream.read(tensor.stop - tensor.start)
        found[name] = struct.unpack(f"<{len(data) // 4}f", data)
    return found
