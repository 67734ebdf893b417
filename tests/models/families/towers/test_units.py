"""Inputs in units: vectors and answers have the bits of those that are encoded whole, whatever comes between, and logs tell it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_here import engines_here
from listener_cases import SPAN, save_listener, sounds
from msgspec.structs import replace
from seeing_cases import CASES, save_seeing
from tower_cases import IMAGE, SIDE, TILE_TOKENS, save_reader

from vnext import LLM
from vnext.log.codec import Frame
from vnext.media.reader import form_of
from vnext.media.seen import Part
from vnext.media.sounds import file_of
from vnext.media.store import MediaStore, digest_of, folder_of
from vnext.models.config.model_config import load_config
from vnext.models.layers.tower import KEYS, band_of, bands, parts_of
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.runtime.rank.images import Images, Inputs, Sounds
from vnext.state.events import AnyEvent, EngineRecovered, InputEncoded, pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import Input, input_tokens, with_inputs

RNG = np.random.default_rng(11)
PICTURES = RNG.integers(0, 256, (2, 50, 61, 3), dtype=np.uint8)
TILES = [Part(each).file for each in RNG.integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)]
SOUNDS = [file_of(each) for each in sounds(3)]
SAMPLED = Sampling(seed=3, max_tokens=10, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module", params=["tiles", *CASES, "sounds"])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[bytes]]:
    """How to make a rank's inputs, and the digests of two."""
    path, store = tmp_path_factory.mktemp("units") / request.param, tmp_path_factory.mktemp("store")
    if request.param == "sounds":
        save_listener(path)
        files, kind = SOUNDS[:2], Sounds
    else:
        save_seeing(path, request.param) if request.param in CASES else save_reader(path)
        form, kind = form_of(path, load_config(path).tower.sizes), Images
        files = [form.seen(each, "it", True).parts[-1].file for each in PICTURES]
    return partial(kind, path, load_config(path), torch.float32, store), MediaStore([store]).put(files, "it")


def test_parts_of_a_layer_are_about_as_many_as_asked_for_and_alike() -> None:
    """A state's keys and values cost a quarter of what else a layer makes of it, or less."""
    for states in (729, 1024, 1500, 4096):
        for wanted in range(1, 41):
            band = band_of(states, wanted)
            assert abs(parts_of(states, band) - wanted) <= 1 + wanted // 20
            spans = [span for each in (band, KEYS * band) for span in bands(states, each)]
            assert len(spans) == max(parts_of(states, band), 2) and sum(span.stop - span.start for span in spans) == 2 * states
            assert max(span.stop - span.start for span in bands(states, KEYS * band)) <= 4 * band
            assert max(span.stop - span.start for span in bands(states, band)) <= -(-2 * states // (wanted + 1))


@pytest.mark.parametrize("units", [1, 2, 3, 5, 40, 1000])
@torch.inference_mode()
def test_units_have_the_bits_of_the_whole(inputs: tuple[Any, list[bytes]], units: int) -> None:
    """Also where a rank begins late or again, and where another input comes between."""
    made, (first, second) = inputs
    parts = list(made().encoded(first, units))
    assert {*parts} == {len(parts)}
    whole = {digest: made().vectors(digest) for digest in (first, second)}
    for done in sorted({0, 1, units // 2, units - 1, units}):
        ahead, late, torn = made(), made(), made()
        for at in range(1, done + 1):
            ahead.advance(first, at, units)
        late.advance(first, done, units)
        again = late._begun.done
        late.advance(first, max(done - 1, 0), units)  # a step that is computed anew
        assert late._begun.done == again == max(late._begun.count * done // units, 1)
        assert done == 0 or ahead._begun.done == again, "units have like shares"
        torn.advance(first, done, units)
        torn.advance(second, 1, units)
        assert torn._begun.digest == second
        torn.advance(first, done, units)
        assert torch.equal(torn.vectors(second), whole[second])
        for each in (ahead, late, torn):
            assert torch.equal(each.vectors(first), whole[first])
        ahead.advance(first, units, units)
        assert ahead._begun is None and ahead.computed * 2 == torn.computed


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("units") / "reader"
    save_reader(path)
    return path


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("units") / "listener"
    save_listener(path)
    return path


def seen(*tiles: int) -> np.ndarray:
    places = [Input(2 + at * (TILE_TOKENS + 1), TILE_TOKENS, digest_of(TILES[tile])) for at, tile in enumerate(tiles)]
    return with_inputs(np.array([5, 6, *([IMAGE] * TILE_TOKENS + [7]) * len(tiles), 8], dtype=np.int32), places)


def heard(sound: int) -> np.ndarray:
    return np.concatenate((input_tokens(digest_of(SOUNDS[sound]), SPAN), np.array([3, 5], dtype=np.int32)))


def asked(listens: bool, length: int) -> list[SubmitRequest]:
    """A stream, and requests with inputs beside it."""
    stream = heard(0) if listens else np.array([5, 6], dtype=np.int32)
    others = [heard(1), heard(2), heard(1)] if listens else [seen(0), seen(1, 0), seen(2)]
    wanted = [("stream", stream, replace(SAMPLED, max_tokens=length))] + [(str(at), each, SAMPLED) for at, each in enumerate(others)]
    return [SubmitRequest(name=name, prompt=pack_tokens(each), sampling=own, has_seed=True) for name, each, own in wanted]


def answers(llm: LLM, requests: list[SubmitRequest]) -> dict[str, list[int]]:
    MediaStore([folder_of(llm._address)]).put([*TILES, *SOUNDS], "an input")
    found: dict[str, list[int]] = {}
    for output in llm._client.run(requests):
        assert not output.error
        found.setdefault(output.name, []).extend(unpack_tokens(output.tokens).tolist())
    return found


def events_in(log: str) -> Iterator[AnyEvent]:
    return (event for item in open_log(Path(log)).items() if isinstance(item, Frame) for event in item.events)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "chunks": {"max_num_batched_tokens": 7}, "ranks": {"tensor_parallel_size": 2}, "stages": {"pipeline_parallel_size": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "alone": {"async_scheduling": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("listens", "settings"), [(listens, settings) for listens in (False, True) for settings in SETTINGS if not (listens and settings == "stages")]
)
def test_answers_are_those_of_whole_inputs(
    reader: Path, listener: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool, settings: str
) -> None:
    path, is_here = str(listener if listens else reader), settings not in ("ranks", "stages")
    common: dict[str, Any] = {"dtype": "float32", "block_size": 4, "threads": 1, "executor": "inproc" if is_here else "mp"}
    advanced, advance = list[tuple[int, int]](), Inputs.advance
    monkeypatch.setattr(Inputs, "advance", lambda self, digest, *share: advanced.append(share) or advance(self, digest, *share))
    requests = asked(listens, 30 if listens else 300)
    with engines_here() if is_here else nullcontext():
        with LLM(path, **common, log="off") as llm:
            whole = answers(llm, requests)
        assert advanced == []
        with LLM(path, **common, **SETTINGS[settings], input_tokens=8, log_dir=str(tmp_path)) as llm:
            assert answers(llm, requests) == whole
            log = str(llm.log_dir)
    units = [event.units for event in events_in(log) if isinstance(event, InputEncoded)]
    assert units.count(1) > 2 and (not is_here or 0 < len(units) - len(advanced) <= 4), "the last units are of the step itself"
    assert replay(["verify", "--laws", log]) == 0
    assert listens or replay(["what-if", log, "--set", "input_tokens=3"]) == 0


def test_ranks_that_lose_units_begin_from_the_first_one(reader: Path, tmp_path: Path) -> None:
    requests, common = asked(False, 500), {"dtype": "float32", "block_size": 4, "threads": 1}
    with LLM(str(reader), **common, log="off") as llm:
        whole = answers(llm, requests)
    with LLM(str(reader), **common, executor="mp", input_tokens=1, log_dir=str(tmp_path)) as llm:
        log, ended = str(llm.log_dir), 0
        MediaStore([folder_of(llm._address)]).put(TILES, "an input")
        found: dict[str, list[int]] = {}
        for output in llm._client.run(requests):
            found.setdefault(output.name, []).extend(unpack_tokens(output.tokens).tolist())
            if not ended and len(found["stream"]) > 30:
                ended = next(each.pid for each in psutil.Process().children(True) if "vnext.runtime.rank.main" in each.cmdline())
                os.kill(ended, signal.SIGKILL)
    assert ended and found == whole
    begun, lost = Counter[tuple[int, int]](), list[Counter[tuple[int, int]]]()
    for event in events_in(log):
        if isinstance(event, EngineRecovered):
            lost.append(begun.copy())
            begun.clear()
        elif isinstance(event, InputEncoded):
            begun[event.id, event.place] += event.units
    assert len(lost) == 1 and any(0 < count < begun[which] for which, count in lost[0].items()), (lost, begun)
    assert replay(["verify", "--laws", log]) == 0
