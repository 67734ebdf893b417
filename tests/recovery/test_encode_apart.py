"""Encoding apart: an engine that only encodes feeds the others by content address, and its loss costs time and no text."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_here import llm_here
from serving import ROOT

from vnext import LLM
from vnext.media.seen import Part
from vnext.media.sounds import file_of
from vnext.media.store import MediaStore, digest_of, folder_of
from vnext.options.reader import engine_settings
from vnext.runtime.client import encode
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.processes.run_dir import shared_twin
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import input_tokens

sys.path.append(str(ROOT / "tests" / "models" / "families" / "towers"))

from listener_cases import SPAN, save_listener, sounds  # noqa: E402
from tower_cases import SIDE, TILE_TOKENS, save_reader  # noqa: E402

RNG = np.random.default_rng(8)
SOUNDS = [file_of(each) for each in sounds(3)]
USUAL: dict[str, Any] = {"dtype": "float32", "block_size": 4, "threads": 1, "log": "off", "check_laws": True, "digest_interval": 1}
PAIR = {"data_parallel_size": 2, "encode_engines": 1}
THREE = {"data_parallel_size": 3, "encode_engines": 1, "prefill_engines": 1}


class Model:
    """A folder, the files of inputs, and prompts in which they are."""

    def __init__(self, path: Path, files: list[bytes], prompts: list[list[int]]) -> None:
        self.path, self.files, self.prompts = path, files, prompts
        self.vectors = sum(len(input_tokens(b"x" * 15, SPAN if files is SOUNDS else TILE_TOKENS)) for _ in files)
        with llm_here(path, **USUAL) as llm:
            self.right, self.right_behind = self.answers(llm), self.answers(llm, behind=11)

    def answers(self, llm: LLM, which: slice = slice(None), behind: int = 0) -> list[list[int]]:
        """Those of an engine's prompts, each with a token more if `behind`."""
        MediaStore(map(folder_of, llm._engine.addresses)).put(self.files, "the input")
        sampling, prompts = Sampling(seed=0, max_tokens=8, temperature=0.0, ignore_eos=True), self.prompts[which]
        found: dict[str, list[int]] = {str(place): [] for place in range(len(prompts))}
        given = [pack_tokens(each + [behind] * bool(behind)) for each in prompts]
        asked = [SubmitRequest(name=name, prompt=each, sampling=sampling, has_seed=True) for name, each in zip(found, given)]
        for output in llm._client.run(asked):
            assert not output.error
            found[output.name] += unpack_tokens(output.tokens).tolist()
        return [*found.values()]


@pytest.fixture(scope="module")
def reader_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart") / "reader"
    save_reader(path)
    return path


@pytest.fixture
def reader(reader_path: Path) -> Model:
    """With tiles that no engine has met."""
    files = [Part(each).file for each in RNG.integers(0, 256, (4, SIDE, SIDE, 3), dtype=np.uint8)]
    tiles = [input_tokens(digest_of(each), TILE_TOKENS).tolist() for each in files]
    prompts = [[5, *tiles[0], 6], [7, *tiles[1], 8, *tiles[2], *range(9, 20)], [5, *tiles[0], *tiles[3], 4], [*range(3, 20)]]
    return Model(reader_path, files, prompts)


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("apart") / "listener"
    save_listener(path)
    return Model(path, SOUNDS, [[*input_tokens(digest_of(each), SPAN).tolist(), 5, 6, 7] for each in SOUNDS])


def counted(llm: LLM) -> list[tuple[int, int]]:
    """The vectors that each rank has computed and read."""
    return [(each["computed"], each["read"]) for each in llm.collective_rpc("encoded")]


def since(before: tuple[int, int], llm: LLM) -> tuple[int, int]:
    """What the first rank has computed and read since then."""
    computed, read = counted(llm)[0]
    return computed - before[0], read - before[1]


@pytest.mark.parametrize("settings", [PAIR, THREE, THREE | {"input_tokens": 4}, PAIR | {"tensor_parallel_size": 2}], ids=["E and one", "E, P and D", "units", "ranks"])
@pytest.mark.parametrize("kind", ["reader", "listener"])
def test_answers_are_those_of_one_engine_and_only_one_encodes(kind: str, settings: dict[str, int], request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(kind)
    with LLM(str(model.path), **USUAL, **settings) as llm:
        assert model.answers(llm) == model.right
        *others, encoding = counted(llm) if "tensor_parallel_size" not in settings else counted(llm)[:-1]
        assert encoding == (model.vectors, 0) and {computed for computed, _ in others} == {0}
        assert max(read for _, read in others) == model.vectors
        before = counted(llm)
        assert model.answers(llm) == model.right and counted(llm) == before, "the same again: nothing is encoded"
        assert model.answers(llm, behind=11) == model.right_behind
        assert [computed for computed, _ in counted(llm)] == [computed for computed, _ in before], "one that knows a prefix encodes nothing"


@pytest.fixture(scope="module")
def pair(reader_path: Path) -> Iterator[LLM]:
    """Of all tests that lose no process."""
    with LLM(str(reader_path), **USUAL, **PAIR) as llm:
        yield llm
        assert llm._client._client.live_count == 0, "a test has left a request behind"


def test_an_engine_that_is_killed_while_it_encodes_costs_no_text(reader: Model) -> None:
    with LLM(str(reader.path), **USUAL, **PAIR) as llm:
        _is_killed_while_it_encodes(reader, llm)


def _is_killed_while_it_encodes(reader: Model, pair: LLM) -> None:
    [*_, rank] = pair.collective_rpc("process_id")
    core = pair._engine.engines[1].child.pid
    os.kill(rank, signal.SIGSTOP)  # so that it is in the middle
    killer = threading.Timer(0.5, lambda: [os.kill(each, signal.SIGKILL) for each in (core, rank)])
    killer.start()
    began_s = time.monotonic()
    assert reader.answers(pair) == reader.right and time.monotonic() - began_s > 0.4
    killer.join()
    end_s = time.monotonic() + 60
    while not pair._client._client.engines[1].is_up:  # its successor
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert counted(pair)[0] == (reader.vectors, 0), "the other one has encoded"
    assert reader.answers(pair, behind=12) and counted(pair)[0][0] == reader.vectors


def test_an_engine_that_is_slow_is_not_waited_for(reader: Model, pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PATIENCE_S", 0.3)
    [*_, rank], before = pair.collective_rpc("process_id"), counted(pair)[0]
    os.kill(rank, signal.SIGSTOP)
    try:
        assert reader.answers(pair) == reader.right
    finally:
        os.kill(rank, signal.SIGCONT)
    assert since(before, pair) == (reader.vectors, 0)
    assert reader.answers(pair, behind=12) and since(before, pair) == (reader.vectors, 0)


def test_vectors_that_are_gone_or_damaged_are_computed(reader: Model, pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, put, before = shared_twin(pair._engine.run_dir), encode.Encode.put, counted(pair)[0]

    def damaged(stream: encode.Encode, output: Any) -> None:
        for place, file in enumerate(sorted(folder.glob("inputs-*/*"))):
            file.write_bytes(file.read_bytes()[:-5]) if place % 2 else file.unlink()
        put(stream, output)

    monkeypatch.setattr(encode.Encode, "put", damaged)
    assert reader.answers(pair) == reader.right
    computed, read = since(before, pair)
    assert computed > 0 and computed + read == reader.vectors
    assert folder.is_dir()


def test_a_client_that_leaves_ends_the_encoding(reader: Model, pair: LLM) -> None:
    client, [*_, rank] = pair._client._client, pair.collective_rpc("process_id")
    os.kill(rank, signal.SIGSTOP)
    MediaStore(map(folder_of, pair._engine.addresses)).put(reader.files, "the input")
    sampling = Sampling(seed=0, max_tokens=8, temperature=0.0)

    async def leave() -> tuple[int, int]:
        with closing(client.submit_all([SubmitRequest(name="a", prompt=pack_tokens(reader.prompts[0]), sampling=sampling)])):
            live = client.live_count
        return live, sum(each.live_count for each in client.engines)

    try:
        assert pair._client._wait(leave()) == (1, 0)
    finally:
        os.kill(rank, signal.SIGCONT)
    assert reader.answers(pair) == reader.right


def test_an_engine_that_only_encodes_answers_nobody(reader: Model, pair: LLM) -> None:
    encoding, wish = pair._client._client.engines[1], SubmitRequest(name="a", prompt=pack_tokens([3, 4]), sampling=Sampling(seed=0, max_tokens=2))

    async def asked() -> None:
        with closing(encoding.submit_all([wish])) as stream:
            async for _ in stream:
                pass

    with pytest.raises(Exception, match="only encodes images and sounds for others"):
        pair._client._wait(asked())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data_parallel_size": 2, "encode_engines": 2}, "encode_engines is 2 of data_parallel_size 2: leave at least one to answer"),
        ({"data_parallel_size": 2, "encode_engines": 1, "prefill_engines": 1}, "leave at least one to decode"),
        ({"role": "encode"}, "role is encode, and cluster_secret_file is missing"),
        ({"role": "encode", "encode_engines": 1, "data_parallel_size": 2}, "encode_engines is 1, which gives engines their roles, and role is encode"),
        (PAIR | {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, and vectors of inputs go to ranks of one host"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_get_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        engine_settings(**settings)


def test_a_model_without_a_tower_has_nothing_to_encode() -> None:
    with pytest.raises(StartFailed, match="this model reads no images and no sounds"):
        LLM(**USUAL, **PAIR)
