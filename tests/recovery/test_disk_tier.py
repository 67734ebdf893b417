"""The disk tier of a real engine: a prefix outlives memory, its engine and its ranks, and damage on disk costs time alone."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.state.events import TierOpened

TEXT = "The quick brown fox jumps over the lazy dog. " * 24
OTHER = "A hundred years of solitude, and one more line of it. " * 10
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def engine(tmp_path: Path, **settings: object) -> LLM:
    usual = {"kv_disk_dir": str(tmp_path / "tier"), "log_dir": str(tmp_path / "logs"), "log": "full", "check_laws": True}
    return LLM(**(usual | {"threads": 1, "digest_interval": 1} | settings))


def answered(llm: LLM, text: str = TEXT) -> tuple[list[int], int, int]:
    """The tokens of an answer, and how many of the prompt's came from the cache."""
    (found,) = llm.generate([text], GREEDY, False)
    return found.outputs[0].token_ids, found.num_cached_tokens, len(found.prompt_token_ids)


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "tier").rglob("*") if len(path.name) == 32 and path.is_file()]


def eventually_written(tmp_path: Path, count: int) -> None:
    end = time.monotonic() + 60
    while len(files(tmp_path)) < count:
        assert time.monotonic() < end, f"{len(files(tmp_path))} of {count} blocks are written"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_turn_after_a_restart_hits_its_prefix_with_the_same_bits(tmp_path: Path, ranks: int) -> None:
    settings = {"tensor_parallel_size": ranks, "dtype": "float32"}
    with engine(tmp_path, **settings) as llm:
        tokens, hits, length = answered(llm)
        eventually_written(tmp_path, ranks * (length // 16))
    assert hits == 0
    with engine(tmp_path, **settings) as llm:
        again, hits, length = answered(llm)
        log_dir = llm.log_dir
    assert again == tokens and hits >= 0.95 * length
    assert replay(["verify", "--laws", log_dir]) == 0
    if ranks == 1:
        assert replay(["exec", log_dir]) == 0, "each token, computed again from the prompt"


def test_flipped_bytes_and_torn_files_are_misses_and_never_texts(tmp_path: Path) -> None:
    with engine(tmp_path) as llm:
        tokens, _, length = answered(llm)
        eventually_written(tmp_path, length // 16)
    for number, path in enumerate(sorted(files(tmp_path))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1 << number % 8
        path.write_bytes(data if number % 2 else data[:-7])
    with engine(tmp_path) as llm:
        assert answered(llm) == (tokens, 0, length)
        assert answered(llm)[0] == tokens


def test_another_models_folder_is_no_hit_and_a_second_engine_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path) as llm:
        _, _, length = answered(llm)
        eventually_written(tmp_path, length // 16)
        with pytest.raises(StartFailed, match="which another engine with this model uses"):
            engine(tmp_path)
        with engine(tmp_path, kv_cache_dtype="int8") as other:
            assert answered(other)[1] == 0


def test_what_memory_evicts_comes_back_from_disk(tmp_path: Path) -> None:
    with engine(tmp_path, num_blocks_override=64, max_model_len=768, kv_disk_bytes="4M") as llm:
        tokens, _, length = answered(llm)
        eventually_written(tmp_path, length // 16)
        for place in range(3):
            answered(llm, str(place) + 2 * OTHER)
        again, hits, _ = answered(llm)
        assert again == tokens and hits >= 0.95 * length
        log_dir = llm.log_dir
    assert replay(["verify", "--laws", log_dir]) == 0


def test_a_killed_rank_and_a_killed_engine_core_leave_the_tier(tmp_path: Path) -> None:
    with engine(tmp_path) as llm:
        tokens, _, length = answered(llm)
        eventually_written(tmp_path, length // 16)
        timer = threading.Timer(0.05, lambda: os.kill(llm._engine.engines[0].child.pid, signal.SIGKILL))
        timer.start()
        answered(llm, OTHER)
        timer.join()
        again, hits, _ = answered(llm)
        assert again == tokens and hits >= 0.95 * length


def test_a_lost_rank_that_keeps_the_folder_s_lock_costs_the_tier_and_no_token(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As one that the system does not let end. This process waits for the lock, and has it as soon as the rank lets go."""
    with engine(tmp_path) as llm, open(next((tmp_path / "tier").rglob("lock")), "rb") as lock:
        tokens, _, length = answered(llm)
        eventually_written(tmp_path, length // 16)
        waiting = threading.Thread(target=fcntl.flock, args=(lock, fcntl.LOCK_EX))
        waiting.start()
        os.kill(llm.collective_rpc("process_id")[0], signal.SIGKILL)
        waiting.join()
        assert [answered(llm)[0] for _ in range(2)] == [tokens] * 2
        log_dir = llm.log_dir
    assert "The engine goes on without its disk tier until it is started again: a rank that was lost" in capfd.readouterr().err
    assert replay(["verify", "--laws", log_dir]) == 0
    events = [item.event for item in fold(open_log(Path(log_dir))) if isinstance(item, Folded)]
    assert [event.capacity > 0 for event in events if isinstance(event, TierOpened)] == [True, False]
    with engine(tmp_path) as llm:
        assert answered(llm)[:2] == (tokens, length // 16 * 16), "the next start has it again"
