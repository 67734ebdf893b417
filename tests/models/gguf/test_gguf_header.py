"""Headers of GGUF files: read as they were written, and refused with a sentence where they are broken, whatever is in them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_writing import convert, vocabulary_of, write

from perf import mutate_gguf
from vnext.models.errors import ModelError
from vnext.models.gguf import folder
from vnext.models.gguf.config import config_of
from vnext.models.gguf.folder import gguf_in, linked_files, outline
from vnext.models.gguf.header import ALIGNMENT, SIZE_BYTES_MAX, Header, Tensor, read_header
from vnext.models.gguf.members import STRETCHES
from vnext.models.loading.overlay import gguf_folder
from vnext.runtime.processes.launch import DEMO_MODEL

METADATA = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.rope.freq_base": 1e5, "a.flag": True, "a.text": "grüße",
    "a.list": ["ä", "", "b"], "a.numbers": [1, 2, 3],
}  # fmt: skip
NUMBERS = np.arange(96, dtype=np.float32).reshape(3, 32)
MUTATIONS = 2000
SPARSE_BYTES = 2**32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", METADATA, {"a.weight": (NUMBERS, "F32"), "b.weight": (NUMBERS, "Q8_0")})


def test_what_was_written_is_read(file: Path) -> None:
    header = read_header(file)
    found = {key: list(value) if isinstance(value, array) else value for key, value in header.metadata.items()}
    assert found == METADATA
    assert [(name, tensor.type, tensor.shape) for name, tensor in header.tensors.items()] == [
        ("a.weight", "F32", (3, 32)), ("b.weight", "Q8_0", (3, 32)),
    ]  # fmt: skip
    start, stop = header.tensors["a.weight"][2:]
    assert file.read_bytes()[start:stop] == NUMBERS.tobytes()


def test_the_package_reads_the_same(file: Path) -> None:
    header, theirs = read_header(file), gguf.GGUFReader(file)
    assert {each.name: each.data_offset for each in theirs.tensors} == {
        name: tensor.start for name, tensor in header.tensors.items()
    }


def test_without_texts_the_rest_is_the_same(file: Path) -> None:
    whole, rest = read_header(file), read_header(file, has_texts=False)
    texts = {key for key, value in whole.metadata.items() if isinstance(value, list)}
    assert texts and rest == whole._replace(metadata=whole.metadata | dict.fromkeys(texts, []))


def test_a_file_is_read_once_until_it_changes(file: Path) -> None:
    first = outline(file)
    assert outline(file) is first
    file.write_bytes(file.read_bytes() + b"more")
    assert outline(file) == first and outline(file) is not first
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="no GGUF file"):
        outline(file)


def no_header(file: Path, has_texts: bool) -> Header:
    raise AssertionError(f"{file} is read anew")


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """That to a file in the folder that shows it."""
    vocabulary = vocabulary_of(json.loads((DEMO_MODEL / "tokenizer.json").read_text()), "gpt-2")
    convert(DEMO_MODEL, tmp_path / "model.gguf", vocabulary)
    (found,) = linked_files(gguf_folder(tmp_path / "model.gguf", tmp_path / "folders"))
    return found


def test_a_start_passes_over_no_vocabulary(link: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = outline(link.resolve())
    monkeypatch.setattr("vnext.models.gguf.folder.read_header", no_header)
    assert outline(link) == whole and whole.names and whole.tensors == read_header(link).tensors


def test_an_outline_that_is_damaged_or_of_another_file_is_not_read(link: Path) -> None:
    file, kept = link.resolve(), next(link.parent.glob("*.outline.json"))
    right, data, rng = outline(file), kept.read_bytes(), random.Random(3)
    places = [rng.randrange(len(data)) for _ in range(40)]
    for broken in (b"", b"{}", data[:-9], *(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places)):
        kept.write_bytes(broken)
        folder._outline.cache_clear()
        assert outline(link) == right
    kept.write_bytes(data)
    moved = bytearray(file.read_bytes())
    at = moved.index(b"token_embd.weight")
    moved[at : at + 5] = b"taken"
    file.write_bytes(moved)
    assert "taken_embd.weight" in outline(link).tensors, "a file of the same size, changed since"


@pytest.mark.parametrize("has_texts", [True, False])
def test_any_change_of_a_header_is_read_or_refused(file: Path, has_texts: bool) -> None:
    """Bounded in memory: counts are believed only as far as the file goes."""
    data, size, rng = file.read_bytes(), read_header(file).size_bytes, random.Random(4)
    refused = 0
    tracemalloc.start()
    for number in range(MUTATIONS):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(size)
            broken[place : place + 1] = rng.choice((bytes([rng.randrange(256)]), b"\xff" * 8, b"", b"\0" * 4))
        broken = broken[: rng.choice((len(data), len(data), rng.randrange(len(data))))]
        tries = (refused_at_a_peak(broken, file.with_name(f"{number}-{again}.gguf"), has_texts) for again in range(3))
        was_refused, _ = next(found for found in tries if found[1] < 2**20)  # threads of other tests may allocate beside one of them
        refused += was_refused
    tracemalloc.stop()
    assert refused > MUTATIONS / 4


def refused_at_a_peak(data: bytes, file: Path, has_texts: bool) -> tuple[bool, int]:
    """Whether a file of these bytes is refused, and the most bytes that this took."""
    file.write_bytes(data)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        read_header(file, has_texts)
    except ModelError as error:
        assert str(file) in str(error) and "\n" not in str(error)
        return True, tracemalloc.get_traced_memory()[1] - before
    return False, tracemalloc.get_traced_memory()[1] - before


def test_any_change_of_a_model_is_loaded_or_refused(tmp_path: Path) -> None:
    """Some of the mutations of perf/mutate_gguf.py, down to the weights."""
    vocabulary = vocabulary_of(json.loads((DEMO_MODEL / "tokenizer.json").read_text()), "gpt-2")
    model = mutate_gguf.model_of(convert(DEMO_MODEL, tmp_path / "demo.gguf", vocabulary, "Q8_0"), whole=False)
    found = [mutate_gguf.judged(mutate_gguf.mutation([model], number), tmp_path) for number in range(60)]
    assert [verdict for verdict in found if verdict not in ("loaded", "refused")] == []
    assert found.count("loaded") > 5 and found.count("refused") > 20


@pytest.mark.parametrize("kind", [(8,), (9, 0), (9, 8)])
def test_a_header_has_no_gigabytes(file: Path, kind: tuple[int, ...]) -> None:
    """Nor does their reader: a text, numbers and texts that a sparse file would have."""
    data = bytearray(file.read_bytes())
    key = struct.pack("<Q", len(ALIGNMENT)) + ALIGNMENT.encode()
    data[24:24] = key + struct.pack(f"<{len(kind)}I", *kind) + struct.pack("<Q", SPARSE_BYTES // 32)
    file.write_bytes(data)
    os.truncate(file, SPARSE_BYTES)
    tracemalloc.start()
    with pytest.raises(ModelError, match=f"{SPARSE_BYTES // 32} (bytes|entries) at .* of {SIZE_BYTES_MAX}"):
        read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(("shape", "name"), [((3, 0), "a.weight"), ((3, 32), "")])
def test_tensors_have_numbers_and_names(tmp_path: Path, shape: tuple[int, ...], name: str) -> None:
    file = write(tmp_path / "m.gguf", METADATA, {name: (np.zeros(shape, np.float32), "F32")})
    with pytest.raises(ModelError, match=r"has the shape \[3, 0\]" if name else "an entry without a name at"):
        read_header(file)


@pytest.mark.parametrize("name", ["tokenizer.ggml.model", "tokenizer.ggml.pre", "llama.block_count", "general.architecture", ""])
def test_a_long_text_leaves_a_sentence_short(tmp_path: Path, name: str) -> None:
    """Wherever a file has it: in a member, or as the name of a tensor that ends behind the file's end."""
    members = {"llama.embedding_length": 32, "llama.attention.head_count": 2, "llama.feed_forward_length": 8, "llama.context_length": 64}
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "c"]}
    tensors = {"token_embd.weight" if name else "[" * 5000: (NUMBERS, "F32"), "blk.0.attn_norm.weight": (NUMBERS, "F32")}
    file = write(tmp_path / "m.gguf", METADATA | members | tokens | ({name: "[" * 5000} if name else {}), tensors)
    if not name:
        os.truncate(file, file.stat().st_size - 2 * NUMBERS.nbytes)
    with pytest.raises(ModelError) as found:
        gguf_folder(file, tmp_path / "folders")
    assert "[[[" in str(found.value) and len(str(found.value)) < 1200


@pytest.mark.parametrize(
    ("place", "code", "value", "sentence"),
    [
        (0, "4s", b"GGML", "does not begin with GGUF"),
        (4, "I", 1, "version 1"),
        (4, "I", 3 << 24, "version 50331648"),
        (8, "Q", 2**61, "entries at 16"),
        (16, "Q", 2**61, "entries at 24"),
    ],
)
def test_a_broken_beginning_is_named(file: Path, place: int, code: str, value: object, sentence: str) -> None:
    data = bytearray(file.read_bytes())
    struct.pack_into("<" + code, data, place, value)
    file.write_bytes(data)
    with pytest.raises(ModelError, match=sentence):
        read_header(file)


def test_a_file_without_what_a_model_needs(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocabulary is empty"):
        gguf_folder(file, tmp_path / "folders")
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(ModelError, match="architecture 'grok' is not read; read are llama, "):
        gguf_folder(write(tmp_path / "b.gguf", METADATA | words | {"general.architecture": "grok"}), tmp_path / "folders")
    with pytest.raises(ModelError, match=r"architecture \"\['llama'\]\" is not read"):
        gguf_folder(write(tmp_path / "c.gguf", METADATA | words | {"general.architecture": ["llama"]}), tmp_path / "folders")
    assert not (tmp_path / "folders").exists()


@pytest.mark.parametrize(
    ("packed", "sentence"),
    [
        (b"PK\3\4", "is a zip archive; unpack it, and give the GGUF file that is in it"),
        (gzip.compress(b"GGUF", mtime=0), "is packed by gzip; unpack it, and"),
        (lzma.compress(b"GGUF"), "is packed by xz; unpack it, and"),
        (bytes.fromhex("28b52ffd"), "is packed by zstd; unpack it, and"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is only a pointer of Git LFS to the file: run 'git lfs pull'"),
    ],
    ids=["zip", "gzip", "xz", "zstd", "git-lfs"],
)
def test_what_stands_in_the_place_of_a_gguf_file_is_named(packed: bytes, sentence: str, file: Path) -> None:
    file.write_bytes(packed + bytes(100))
    with pytest.raises(ModelError, match=f"^{re.escape(f'{file} {sentence}')}"):
        read_header(file)


@pytest.mark.parametrize("name", ["blob", "MODEL.GGUF"])
def test_a_file_of_any_name_is_shown_as_a_folder(name: str, tmp_path: Path) -> None:
    vocabulary = vocabulary_of(json.loads((DEMO_MODEL / "tokenizer.json").read_text()), "gpt-2")
    model = convert(DEMO_MODEL, tmp_path / "model.gguf", vocabulary)
    assert gguf_folder(model, tmp_path / "made").name == "model"
    assert gguf_folder(model.rename(tmp_path / name), tmp_path / "made").name == name.removesuffix(".GGUF")
    assert gguf_in(tmp_path) == (tmp_path / name if "." in name else None), "a folder is searched for endings"


def test_a_folder_with_several_models(file: Path) -> None:
    assert gguf_in(file.parent) == file
    file.with_name("other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="has several models, model.gguf, other.gguf: name one of these files"):
        gguf_in(file.parent)


def test_a_split_model_needs_all_its_files(file: Path, tmp_path: Path) -> None:
    first = file.rename(file.with_name("m-00001-of-00003.gguf"))
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(b"")
    assert gguf_in(tmp_path) == first
    with pytest.raises(ModelError, match=r"of 3 files of the model m-00003-of-00003\.gguf is missing"):
        gguf_folder(first, tmp_path / "folders")


@pytest.mark.parametrize("stretches", [(), (0.0,) * 4, (float("nan"),) * 4, (8.0, 1.0, 1.0, 1.0), (-1.0,) * 4])
def test_stretches_that_no_llama_has(stretches: tuple[float, ...]) -> None:
    assert config_of(header_of())["hidden_size"] == 8
    with pytest.raises(ModelError, match="as no Llama does"):
        config_of(header_of(), {STRETCHES: stretches})


def header_of(**changes: int) -> Header:
    """Of a Llama with one layer."""
    numbers = {"embedding_length": 8, "feed_forward_length": 8, "block_count": 1, "context_length": 64, "attention.head_count": 1}
    members = {f"llama.{name}": number for name, number in {**numbers, "attention.layer_norm_rms_epsilon": 1e-5, **changes}.items()}
    return Header({"general.architecture": "llama"} | members, {"token_embd.weight": Tensor("F32", (4, 8), 0, 128)}, 0)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("block_count", 16384, "states 16384 layers and has 1 tensors"),
        ("rope.dimension_count", 4, "llama.rope.dimension_count is 4, and only that of a head's 8 channels"),
        ("attention.value_length", 16, "llama.attention.value_length is 16, and only"),
        ("attention.head_count", 9, "9 attention heads for 8 channels"),
    ],
)
def test_numbers_that_do_not_fit(name: str, value: int, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        config_of(header_of(**{name: value}))


def test_a_load_does_not_import_what_writes_files(file: Path, tmp_path: Path) -> None:
    """Which takes longer than the load of a small model."""
    source = "import sys; from vnext.models.gguf.header import read_header, sizes; read_header(__import__('pathlib').Path(sys.argv[1]))"
    shows = "print(sorted({'gguf', 'yaml'} & {*sys.modules}), len(sizes()) > 30)"
    ran = subprocess.run([sys.executable, "-c", f"{source}; {shows}", str(file)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[] True\n"
