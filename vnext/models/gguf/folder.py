"""The folder of a GGUF file: a checkpoint's folder whose JSON files follow from the metadata, and whose weights are the file.

Everything that reads a checkpoint reads this folder. loading/overlay.py makes it. Beside the link to each file lies its outline: to
pass over a vocabulary of 262,144 takes as long as to import numpy, and a start asks in several processes where the tensors are.
"""

from __future__ import annotations

import re
import struct
from array import array
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import msgspec

from vnext.base.tokenizer_files import file_state
from vnext.models.errors import ModelError
from vnext.models.gguf.header import MAGIC, Header, Tensor, library_folder, name_map, read_header
from vnext.models.gguf.towers import ARCHITECTURE as TOWER, PIXELS, is_tower, whole_model

SUFFIX = ".gguf"
LINK = "vnext-weights-{:05}.gguf"
LINKS = "vnext-weights-*.gguf"
FORM = 8
"""Of the JSON files: another number makes all folders anew."""
FILES_KEPT = 64
"""Files whose outlines a process keeps: a large model is split into so many."""
PRODUCTS = 3
"""Behind a tower, which the package's table numbers as if they were layers, from 0."""
SLOPES = ("alpha_p", "alpha_n")
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Outline(msgspec.Struct, frozen=True):
    """What a load needs of a GGUF file beside its tensors. `names`: of the tensors of the first layer and of those of none, by the
    package's names of modules. `slopes`: what Apertus's activation learned, which stands among the metadata."""

    architecture: str
    size_bytes: int
    tensors: dict[str, Tensor]
    names: dict[str, str]
    slopes: dict[str, list[float]]


class _Kept(msgspec.Struct):
    """An outline as JSON, its digest, and what it was made of."""

    outline: str
    digest: str
    sources: list[tuple[int, int]]


_kept_decoder, _outline_decoder = msgspec.json.Decoder(_Kept), msgspec.json.Decoder(Outline)


def linked_files(folder: Path) -> list[Path]:
    """The GGUF files of such a folder, in order; [] of another one."""
    return sorted(folder.glob(LINKS))


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its ending or, as a blob of Ollama has none, by its first bytes. Raises OSError."""
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def plain_name(path: Path) -> str:
    """The name of a folder or a GGUF file without the latter's ending."""
    return path.stem if path.suffix.lower() == SUFFIX else path.name


def gguf_in(folder: Path) -> Path | None:
    """The one model that a folder without config.json holds as GGUF, its first file if it is split; None where there is none.
    Raises ModelError where there are several."""
    if (folder / "config.json").is_file():
        return None
    named = sorted(path for path in folder.glob("*") if path.suffix.lower() == SUFFIX and not is_tower(path))
    found = [path for path in named if not (match := SPLIT.fullmatch(path.name)) or int(match[2]) == 1]
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
    """The JSON files of the folder by name, from the model's GGUF files, with its tower's. Raises ModelError."""
    from vnext.models.gguf.config import config_of
    from vnext.models.gguf.tokenizer import Vocabulary

    header, towers = read_header(files[0]), files[len(files_of(files[0])) :]
    if header.metadata.get("general.architecture") == TOWER:
        raise ModelError("the file is a tower, by which a model sees or hears: name the model's own file, beside which it may lie")
    vocabulary = Vocabulary(header.metadata)
    begin = vocabulary.number("bos")
    generation: dict[str, object] = {"eos_token_id": vocabulary.ends()} | ({} if begin is None else {"bos_token_id": begin})
    config, form = config_of(header, _stretches(files[0], header)), dict[str, object]()
    if towers:
        config, form = whole_model(config, header, read_header(towers[0]))
    return {
        "config.json": config | generation,
        **({PIXELS: form} if form else {}),
        "generation_config.json": generation,
        "tokenizer.json": vocabulary.json(),
        "tokenizer_config.json": vocabulary.settings(),
        **{_beside(LINK.format(number)): _written(each) for number, each in enumerate(files, 1)},
    }


def outline(file: Path) -> Outline:
    """That of a GGUF file, as it is now. Raises ModelError."""
    return _outline(file, file_state(file))


@lru_cache(maxsize=FILES_KEPT)
def _outline(file: Path, _state: tuple[int, ...]) -> Outline:
    try:
        kept = _kept_decoder.decode(file.with_name(_beside(file.name)).read_bytes())
        if kept.sources == _sources(file) and kept.digest == _digest(kept.outline):
            return _outline_decoder.decode(kept.outline)
    except (OSError, ValueError):
        pass  # none is there, or a damaged one
    return _read(file)


def _read(file: Path) -> Outline:
    header = read_header(file, has_texts=False)
    architecture = str(header.metadata.get("general.architecture"))
    try:
        count = PRODUCTS if architecture == TOWER else 1
        names = {key: name for key, (_, name) in name_map(architecture, count).mapping.items()}
    except StopIteration:  # an architecture that the package does not know
        names = {}
    learned = {name: found for name in SLOPES if isinstance(found := header.metadata.get(f"xielu.{name}"), array)}
    slopes = {name: [float(each) for each in found] for name, found in learned.items()}
    return Outline(architecture, header.size_bytes, header.tensors, names, slopes)


def _written(file: Path) -> dict[str, object]:
    text = msgspec.json.encode(_read(file)).decode()
    return {"outline": text, "digest": _digest(text), "sources": _sources(file)}


def _beside(name: str) -> str:
    return f"{name}.outline.json"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _sources(file: Path) -> list[tuple[int, int]]:
    """What tells the file, and the package's modules that say what is in it, from others. Raises OSError."""
    library = library_folder()
    found = [each.stat() for each in (file, library / "constants.py", library / "tensor_mapping.py")]
    return [(each.st_size, each.st_mtime_ns) for each in found]


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
