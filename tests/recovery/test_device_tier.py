"""The disk tier of an engine whose rank computes on the device's twin: the files and the answers of an engine on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from device_twin import compute_on_twins
from engine_here import engines_here

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.gpu.device import Mark
from vnext.runtime.gpu.pages import DevicePages
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.state.events import PromotionEnded

TEXT = "The quick brown fox jumps over the lazy dog. " * 12
TEXTS = [f"{number} of a hundred years of solitude, and one more line of it. " * 6 for number in range(6)]
ON_DEVICE = {"device": "cuda", "executor": "inproc", "enforce_eager": True, "num_blocks_override": 600, "digest_interval": 16}
DRAFTED = {"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 3, "row_cost": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ON_CPU = {"device": "cpu", "enforce_eager": False}


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compute_on_twins(monkeypatch)
    with engines_here():
        yield


def engine(folder: Path | None, **settings: Any) -> LLM:
    tier = {} if folder is None else {"kv_disk_dir": str(folder)}
    return LLM(**(ON_DEVICE | {"threads": 1, "dtype": "float32", "log": "off", "check_laws": True} | tier | settings))


def answered(llm: LLM, text: str = TEXT) -> tuple[list[int], int, int]:
    """The tokens of an answer, and how many of the prompt's came from the cache."""
    (found,) = llm.generate([text], GREEDY, False)
    return found.outputs[0].token_ids, found.num_cached_tokens, len(found.prompt_token_ids)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if len(path.name) == 32 and path.is_file()}


def written(folder: Path, texts: Sequence[str] = (TEXT,), **settings: Any) -> tuple[list[int], int]:
    """An engine answers, with each block of the prompts on disk behind it: the last answer's tokens, and its prompt's length."""
    with engine(folder, **settings) as llm:
        found, count, end = [answered(llm, text) for text in texts], 0, time.monotonic() + 60
        count = sum(length // 16 for _, _, length in found)
        while len(files(folder)) < count and time.monotonic() < end:
            time.sleep(0.01)
    tokens, hits, length = found[-1]
    assert hits == 0 and len(files(folder)) >= count
    return tokens, length


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"speculative_config": DRAFTED}],
    ids=["float32", "int8", "draft model"],
)  # fmt: skip
def test_the_first_turn_after_a_restart_hits_its_prefix_with_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The files are those of an engine on the CPU, bit for bit, and either engine reads the other's."""
    tokens, length = written(tmp_path / "cpu", **ON_CPU, **settings)
    assert written(tmp_path / "device", **settings) == (tokens, length)
    left, right = files(tmp_path / "cpu"), files(tmp_path / "device")
    assert all(left[name] == right[name] for name in left.keys() & right.keys()) and len(left.keys() & right.keys()) >= length // 16
    with engine(tmp_path / "cpu", log="full", log_dir=str(tmp_path / "logs"), **settings) as llm:
        again, hits, _ = answered(llm)
    assert again == tokens and hits == (length - 1) // 16 * 16
    (log,) = (tmp_path / "logs").iterdir()
    assert replay(["verify", "--laws", str(log)]) == 0
    with engine(tmp_path / "device", **ON_CPU, **settings) as llm:
        assert answered(llm)[:2] == (tokens, hits)


def test_what_memory_evicts_comes_back_beside_running_steps(tmp_path: Path) -> None:
    """The cache holds two of seven prompts: pages are filled soon after steps have used them for others."""
    settings, texts = {"num_blocks_override": 64, "max_model_len": 640, "max_num_batched_tokens": 128}, [*TEXTS, TEXT] * 2
    written(tmp_path / "tier", (*TEXTS, TEXT))
    with engine(None, **settings) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(texts, GREEDY, False)]
    with engine(tmp_path / "tier", log="full", log_dir=str(tmp_path / "logs"), **settings) as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(texts, GREEDY, False)] == expected
        assert [answered(llm, text)[0] for text in texts[:7]] == expected[:7], "one after the other: memory lacks the first"
    (log,) = (tmp_path / "logs").iterdir()
    assert replay(["verify", "--laws", str(log)]) == 0
    ends = [item.event for item in fold(open_log(log)) if isinstance(item, Folded) and isinstance(item.event, PromotionEnded)]
    assert sum(event.count for event in ends) > 0


def test_flipped_bytes_are_misses_and_never_texts(tmp_path: Path) -> None:
    tokens, length = written(tmp_path)
    for path in [path for path in tmp_path.rglob("*") if len(path.name) == 32 and path.is_file()]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with engine(tmp_path) as llm:
        assert answered(llm) == (tokens, 0, length)


def test_pages_that_are_filled_with_one_another_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are right, and so is what the engine knows of them; only the pages are not."""
    tokens, length = written(tmp_path)
    send = DevicePages.send

    def swapped(self: DevicePages, pages: Sequence[int], rows: Sequence[int], after: Mark) -> Mark:
        return send(self, [page ^ 1 for page in pages], rows, after)

    monkeypatch.setattr(DevicePages, "send", swapped)
    with engine(tmp_path) as llm:
        again, hits, _ = answered(llm)
    assert hits == (length - 1) // 16 * 16 and again != tokens
