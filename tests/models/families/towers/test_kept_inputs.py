"""Vectors of inputs as files: an engine that begins again computes none that were computed before, and damage costs time alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_here import engines_here
from listener_cases import SPAN, save_listener, sounds
from tower_cases import SIDE, TILE_TOKENS, save_reader

from vnext import LLM
from vnext.log.codec import Frame
from vnext.media.seen import Part
from vnext.media.sounds import file_of
from vnext.media.store import MediaStore, digest_of, folder_of
from vnext.media.vectors import VectorFiles, Vectors
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.rank.images import BEHIND_MAX, Encoded, Inputs, Shelf
from vnext.state.events import AnyEvent, InputEncoded, InputsFound, InputsSought, pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import input_tokens, inputs_in

TILES = [Part(each).file for each in np.random.default_rng(3).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)]
SOUNDS = [file_of(each) for each in sounds(2)]
HERE: dict[str, Any] = {"dtype": "float32", "block_size": 4, "executor": "inproc", "threads": 1, "log": "off"}


class Counted:
    """The vectors that ranks compute, and those that they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed = self.read = 0
        compute, read, late = Inputs._compute, Inputs.take, Inputs._from_shelf

        def computing(inputs: Inputs, *given: Any) -> None:
            before = inputs.computed
            compute(inputs, *given)
            self.computed += inputs.computed - before

        def reading(inputs: Inputs, *given: Any) -> None:
            before = inputs.read
            read(inputs, *given)
            self.read += inputs.read - before

        def in_a_step(inputs: Inputs, digest: bytes) -> bool:
            assert not late(inputs, digest), "a step reads a file"
            return False

        monkeypatch.setattr(Inputs, "_compute", computing)
        monkeypatch.setattr(Inputs, "take", reading)
        monkeypatch.setattr(Inputs, "_from_shelf", in_a_step)

    def taken(self) -> tuple[int, int]:
        """Those since the last call."""
        found, self.computed, self.read = (self.computed, self.read), 0, 0
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    with engines_here():
        yield Counted(monkeypatch)


@pytest.fixture(scope="module", params=["image", "sound"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes], list[int]]:
    """A folder, the files of two inputs, and the prompt with the first of them, or both."""
    path = tmp_path_factory.mktemp("kept") / request.param
    if request.param == "sound":
        save_listener(path)
        return path, SOUNDS, [*input_tokens(digest_of(SOUNDS[0]), SPAN).tolist(), 5]
    save_reader(path)
    first, second = (input_tokens(digest_of(each), TILE_TOKENS).tolist() for each in TILES[:2])
    return path, TILES, [5, *first, 6, *second, 7, *first, 8]


def answer(llm: LLM, files: list[bytes], prompt: list[int], count: int = 6) -> list[int]:
    MediaStore([folder_of(llm._address)]).put(files, "the input")
    sampling, found = Sampling(seed=0, max_tokens=count, temperature=0.0, ignore_eos=True), []
    for output in llm._client.run([SubmitRequest(name="a", prompt=pack_tokens(prompt), sampling=sampling, has_seed=True)]):
        assert not output.error
        found += unpack_tokens(output.tokens).tolist()
    return found


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "tier").rglob("inputs-*/*") if path.is_file()]


def eventually(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def forget_blocks(tmp_path: Path) -> None:
    """So that inputs begin, and are no hits."""
    for block in (tmp_path / "tier").rglob("*"):
        if len(block.name) == 32 and block.is_file():
            block.unlink()


@pytest.mark.parametrize("units", [{}, {"input_tokens": 4, "max_num_batched_tokens": 8}], ids=["whole", "units"])
def test_an_input_is_encoded_once_over_restarts(
    model: tuple[Path, list[bytes], list[int]], tmp_path: Path, counted: Counted, units: dict[str, int]
) -> None:
    path, files, prompt = model
    settings = HERE | units | {"kv_disk_dir": str(tmp_path / "tier")}
    with LLM(str(path), **HERE | units) as llm:
        right, (computed, _) = answer(llm, files, prompt), counted.taken()
    with LLM(str(path), **settings) as llm:
        assert answer(llm, files, prompt) == right and counted.taken() == (computed, 0)
    forget_blocks(tmp_path)
    with LLM(str(path), **settings) as llm:
        assert answer(llm, files, prompt) == right and counted.taken() == (0, computed), "0 encoder tokens"
    forget_blocks(tmp_path)
    for place, file in enumerate(kept(tmp_path)):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if place else data[:-9])
    for found in ((computed, 0), (0, computed)):
        with LLM(str(path), **settings) as llm:
            assert answer(llm, files, prompt) == right and counted.taken() == found, "damaged ones are written anew"
        forget_blocks(tmp_path)


def test_what_ranks_find_is_decided_with(model: tuple[Path, list[bytes], list[int]], tmp_path: Path, counted: Counted) -> None:
    path, files, prompt = model
    settings = HERE | {"input_tokens": 4, "kv_disk_dir": str(tmp_path / "tier"), "log": "full"}
    found = []
    for place in range(2):
        with LLM(str(path), **settings, log_dir=str(tmp_path / str(place))) as llm:
            found.append((answer(llm, files, prompt, 300 if files is TILES else 6), log := str(llm.log_dir)))
        assert replay(["verify", "--laws", log]) == replay(["exec", log]) == replay(["exec", log, "--solo"]) == 0
        assert files is SOUNDS or replay(["what-if", log, "--set", "input_tokens=3"]) == 0
        forget_blocks(tmp_path)
    (first, computed), (second, read) = ((tokens, [*events_in(log)]) for tokens, log in found)
    places = tuple(each.start for each in inputs_in(np.array(prompt, np.int32)))
    assert first == second and [each for each in computed if isinstance(each, InputsFound)] == [InputsFound(id=0)]
    assert any(isinstance(each, InputEncoded) for each in computed) and not any(isinstance(each, InputEncoded) for each in read)
    assert [each for each in read if isinstance(each, InputsSought | InputsFound)] == [InputsSought(id=0), InputsFound(id=0, places=places)]


def events_in(log: str) -> Iterator[AnyEvent]:
    return (event for item in open_log(Path(log)).items() if isinstance(item, Frame) for event in item.events)


def test_a_reset_and_another_model_find_nothing(tmp_path: Path, counted: Counted) -> None:
    save_reader(tmp_path / "reader")
    settings, prompt = HERE | {"kv_disk_dir": str(tmp_path / "tier")}, [5, *input_tokens(digest_of(TILES[0]), TILE_TOKENS).tolist(), 6]
    with LLM(str(tmp_path / "reader"), **settings) as llm:
        right = answer(llm, TILES, prompt)
    assert len(kept(tmp_path)) == 1 and counted.taken() == (TILE_TOKENS, 0)
    with LLM(str(tmp_path / "reader"), **settings | {"dtype": "bfloat16"}) as llm:
        answer(llm, TILES, prompt)
        assert counted.taken() == (TILE_TOKENS, 0)
        llm.reset_prefix_cache()
        eventually(lambda: len(kept(tmp_path)) == 1, "what is of another identity stays")
    forget_blocks(tmp_path)
    with LLM(str(tmp_path / "reader"), **settings) as llm:
        assert answer(llm, TILES, prompt) == right and counted.taken() == (0, TILE_TOKENS)


def test_blocks_behind_an_input_are_of_one_form(tmp_path: Path, counted: Counted) -> None:
    """Pixels are the same in another form, in which a tower makes other vectors of them, and these are in the blocks."""
    save_reader(path := tmp_path / "reader")
    prompt = [5, *input_tokens(digest_of(TILES[0]), TILE_TOKENS).tolist(), *range(6, 20)]
    tier, file = {"kv_disk_dir": str(tmp_path / "tier")}, path / "preprocessor_config.json"
    with LLM(str(path), **HERE, **tier) as llm:
        answer(llm, TILES, prompt)
    counted.taken()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.9, 0.1, 0.2]}))
    with LLM(str(path), **HERE) as llm:
        right, found = answer(llm, TILES, prompt), counted.taken()
    with LLM(str(path), **HERE, **tier) as llm:
        assert answer(llm, TILES, prompt) == right and counted.taken() == found == (TILE_TOKENS, 0)


def vectors(seed: int) -> Vectors:
    rng = np.random.default_rng(seed)
    return Vectors(rng.integers(0, 256, (5, 24), dtype=np.uint8), rng.integers(0, 99, 5), "float32")


def test_a_file_is_as_it_was_written_or_a_miss(tmp_path: Path) -> None:
    files, digest = VectorFiles(tmp_path, {"model": "a"}, 10_000), b"d" * 15
    assert files.read(digest) is None
    files.write(digest, vectors(1))
    found = files.read(digest)
    assert found is not None and found.dtype == "float32"
    assert all(np.array_equal(*pair) for pair in zip(found[:2], vectors(1)[:2]))
    assert VectorFiles(tmp_path, {"model": "b"}, 10_000).read(digest) is None
    raw = files.raw(digest)
    assert files.vectors_in(raw, b"e" * 15) is None
    for at in range(len(raw)):
        assert files.vectors_in(raw[:at], digest) is None
        assert files.vectors_in(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :], digest) is None


def test_a_slow_disk_holds_few_vectors_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, write = threading.Event(), VectorFiles.write

    def slowly(files: VectorFiles, digest: bytes, vectors: Vectors) -> None:
        going_on.wait(30)
        write(files, digest, vectors)

    monkeypatch.setattr(VectorFiles, "write", slowly)
    shelf = Shelf(VectorFiles(tmp_path, {}, 10_000), writes=True)
    for place in range(2 * BEHIND_MAX):
        shelf.put(bytes([place]) * 15, Encoded.of(vectors(place)))
    going_on.set()
    shelf.close()
    assert [shelf.read(bytes([place]) * 15) is not None for place in range(2 * BEHIND_MAX)] == BEHIND_MAX * [True] + BEHIND_MAX * [False]
    shelf = Shelf(shelf.files, writes=True)
    shelf.put(b"9" * 15, Encoded.of(vectors(9)))
    shelf.close()
    assert shelf.read(b"9" * 15) is not None


def test_the_oldest_files_leave(tmp_path: Path) -> None:
    whole = VectorFiles(tmp_path, {}, 10_000)
    VectorFiles(tmp_path, {}, 0).write(b"0" * 15, vectors(0))
    assert not whole.folder.exists(), "one that has no room is not kept"
    whole.write(b"0" * 15, vectors(0))
    few = VectorFiles(tmp_path, {}, 2 * len(whole.raw(b"0" * 15)))
    for place in (1, 2):
        time.sleep(0.02)
        few.write(b"%d" % place * 15, vectors(place))
        time.sleep(0.02)
        few.raw(b"0" * 15)
    assert [whole.read(b"%d" % place * 15) is not None for place in range(3)] == [True, False, True]
    few.clear()
    assert not [*few.folder.iterdir()]
