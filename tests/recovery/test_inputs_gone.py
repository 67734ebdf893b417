"""Files of images that go before their step, or are damaged: who shows them gets an error, and nobody else notices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_here import llm_here
from serving import ROOT

from vnext import LLM
from vnext.media.seen import Part
from vnext.media.store import MediaStore, digest_of, folder_of
from vnext.replay.cli.main import main as replay
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.events import pack_tokens, unpack_tokens
from vnext.state.params import Sampling
from vnext.state.store.inputs import input_tokens

sys.path.append(str(ROOT / "tests" / "models" / "families" / "towers"))

from tower_cases import SIDE, TILE_TOKENS, save_reader  # noqa: E402

TILES = [Part(each).file for each in np.random.default_rng(9).integers(0, 256, (3, SIDE, SIDE, 3), dtype=np.uint8)]
SPELLED = [input_tokens(digest_of(each), TILE_TOKENS).tolist() for each in TILES]
PROMPTS = [[5, *SPELLED[0], 6], [*range(3, 20)], [7, *SPELLED[1], 8, *SPELLED[2]], [9, *SPELLED[2], 4, *SPELLED[1], 3], [4, *SPELLED[0], 11]]
LACKING = [2, 3]
"""The prompts that show the third tile."""
USUAL: dict[str, Any] = {"dtype": "float32", "block_size": 4, "threads": 1, "check_laws": True, "digest_interval": 1, "log": "full"}
WAYS = {"whole": {}, "units": {"input_tokens": 4}, "in step": {"async_scheduling": False}, "cut": {"max_num_batched_tokens": 16}}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gone") / "reader"
    save_reader(path)
    return path


def answers(llm: LLM) -> tuple[list[list[int]], list[str]]:
    """The tokens and errors of all prompts, asked at once."""
    sampling = Sampling(seed=0, max_tokens=8, temperature=0.0, ignore_eos=True)
    asked = [SubmitRequest(name=str(place), prompt=pack_tokens(each), sampling=sampling) for place, each in enumerate(PROMPTS)]
    tokens, errors = [list[int]() for _ in PROMPTS], [""] * len(PROMPTS)
    for output in llm._client.run(asked):
        tokens[int(output.name)] += unpack_tokens(output.tokens).tolist()
        errors[int(output.name)] = output.error
    return tokens, errors


def gone(path: Path) -> None:
    path.unlink()


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.fixture(scope="module")
def right(reader: Path) -> list[list[int]]:
    """What an engine answers that lacks nothing."""
    with llm_here(reader, **USUAL | {"log": "off"}) as llm:
        MediaStore(map(folder_of, llm._engine.addresses)).put(TILES, "the image")
        return answers(llm)[0]


def check(llm: LLM, spoil: Callable[[Path], None], right: list[list[int]]) -> None:
    """The first round lacks a file, the second has it."""
    [folder] = map(folder_of, llm._engine.addresses)
    store = MediaStore([folder])
    *_, last = store.put(TILES, "the image")
    spoil(folder / last.hex())
    tokens, errors = answers(llm)
    assert [place for place, error in enumerate(errors) if error] == LACKING
    assert all("is gone from the engine's store: send it again" in errors[place] for place in LACKING)
    assert [each for place, each in enumerate(tokens) if place not in LACKING] == [right[0], right[1], right[4]]
    assert llm._client._client.recoveries == 0
    store.put(TILES, "the image")
    assert answers(llm) == (right, [""] * len(PROMPTS)), "nothing of what was gone is in the cache"


@pytest.mark.parametrize("spoil", [gone, damaged])
@pytest.mark.parametrize("way", WAYS)
def test_who_shows_what_is_gone_gets_an_error_and_nobody_else(
    reader: Path, right: list[list[int]], tmp_path: Path, way: str, spoil: Callable[[Path], None]
) -> None:
    with llm_here(reader, **USUAL | WAYS[way], log_dir=str(tmp_path)) as llm:
        check(llm, spoil, right)
        [log_dir] = llm.log_dirs
    assert replay(["verify", "--laws", log_dir]) == 0


def test_two_ranks_agree_on_what_is_gone(reader: Path, right: list[list[int]]) -> None:
    with LLM(str(reader), **USUAL | {"log": "off"}, tensor_parallel_size=2) as llm:
        check(llm, gone, right)
