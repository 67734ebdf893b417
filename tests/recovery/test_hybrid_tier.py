"""The disk tier of a model with recurrent layers: blocks and snapshots of states outlive memory, the engine and its ranks, with the
same bits, and what is damaged of either costs time alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from serving import ROOT

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.state.events import BlocksPromoted, PromotionEnded, SnapshotsChanged

sys.path.append(str(ROOT / "tests" / "models"))  # hybrids

from family_cases import VOCAB_SIZE  # noqa: E402
from hybrids import save_hybrid  # noqa: E402

PROMPT = [(7 * place + 3) % VOCAB_SIZE for place in range(300)]
BLOCKS, EDGES = 18, 5
"""Full blocks of the prompt behind which one may begin, and its snapshots: behind 64, 128, 192, 256 and 288 tokens."""
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["minimax", "kimi_linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hybrid") / request.param
    save_hybrid(path, request.param)
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def engine(model: Path, folder: Path, **settings: object) -> LLM:
    usual = {"kv_disk_dir": str(folder / "tier"), "log_dir": str(folder / "logs"), "log": "full", "check_laws": True}
    more = {"threads": 1, "digest_interval": 1, "dtype": "float32", "snapshot_interval": 64}
    return LLM(str(model), **(usual | more | settings))


def answered(llm: LLM, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's came from the cache."""
    (found,) = llm.generate([{"prompt_token_ids": prompt}], SAMPLED, use_tqdm=False)
    return found.outputs[0].token_ids, found.num_cached_tokens


def files(folder: Path, snapshots: bool) -> list[Path]:
    """Those of snapshots, or of blocks, in the folders of all ranks."""
    about = [each for each in (folder / "tier").rglob("about.json") if ("state_bytes" in each.read_text()) is snapshots]
    return [path for each in about for path in each.parent.rglob("*") if len(path.name) == 32 and path.is_file()]


def eventually_written(folder: Path, ranks: int = 1) -> None:
    end = time.monotonic() + 60
    while len(files(folder, False)) < ranks * BLOCKS or len(files(folder, True)) < ranks * EDGES:
        assert time.monotonic() < end, f"{len(files(folder, False))} blocks and {len(files(folder, True))} snapshots are written"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_goes_on_from_a_snapshot_on_disk_with_the_same_bits(model: Path, tmp_path: Path, ranks: int) -> None:
    with engine(model, tmp_path, tensor_parallel_size=ranks) as llm:
        tokens, hits = answered(llm)
        eventually_written(tmp_path, ranks)
    assert hits == 0
    with engine(model, tmp_path, tensor_parallel_size=ranks) as llm:
        assert answered(llm) == (tokens, 16 * BLOCKS)
        assert answered(llm) == (tokens, 16 * BLOCKS), "what came is a hit for the next one"
        log_dir = llm.log_dir
    assert replay(["verify", "--laws", log_dir]) == 0
    if ranks == 1:
        assert replay(["exec", log_dir]) == 0, "each token, computed again from the prompt"


def test_what_memory_evicts_comes_back_and_the_disk_keeps_its_bound(model: Path, tmp_path: Path) -> None:
    """Whatever of a prefix is missing, and no more snapshots are on disk than there is room for."""
    with engine(model, tmp_path, num_blocks_override=40, max_model_len=512, max_num_seqs=1, kv_disk_bytes="4M") as llm:
        expected = {}
        for turn in range(2):
            for first in range(4):
                prompt = [first, *PROMPT]
                tokens, hits = answered(llm, prompt)
                assert expected.setdefault(first, tokens) == tokens
                assert hits >= 256 or turn == 0
                time.sleep(0.3 * (turn == 0))
        log_dir = llm.log_dir
    assert replay(["verify", "--laws", log_dir]) == 0
    folded = [item for item in fold(open_log(Path(log_dir))) if isinstance(item, Folded)]
    assert sum(isinstance(item.event, BlocksPromoted) for item in folded) >= 4
    tier = folded[-1].after.tier
    assert tier is not None and tier.snapshots is not None and 0 < len(tier.snapshots.disk) <= tier.snapshots.capacity


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "blocks"])
def test_what_is_damaged_is_computed(model: Path, tmp_path: Path, snapshots: bool) -> None:
    """Behind blocks that are right no snapshot is, or not even a block is; each that is not leaves the disk."""
    with engine(model, tmp_path) as llm:
        tokens, _ = answered(llm)
        eventually_written(tmp_path)
    for number, path in enumerate(sorted(files(tmp_path, snapshots))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1 << number % 8
        path.write_bytes(data)
    with engine(model, tmp_path) as llm:
        assert answered(llm) == (tokens, 0)
        assert answered(llm) == (tokens, 16 * BLOCKS)
        log_dir = llm.log_dir
    folded = [item for item in fold(open_log(Path(log_dir))) if isinstance(item, Folded)]
    ends = [item.event.count for item in folded if isinstance(item.event, PromotionEnded)]
    assert ends[0] == BLOCKS * snapshots, "all blocks and no snapshot, or not even a block"
    assert any(isinstance(item.event, SnapshotsChanged) and item.event.gone for item in folded) is snapshots


def test_a_killed_rank_and_a_killed_engine_core_leave_snapshots(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as llm:
        tokens, _ = answered(llm)
        eventually_written(tmp_path)
        for victim in (lambda: llm.collective_rpc("process_id")[0], lambda: llm._engine.engines[0].child.pid):
            timer = threading.Timer(0.05, os.kill, (victim(), signal.SIGKILL))
            timer.start()
            answered(llm, PROMPT[::-1])
            timer.join()
            assert answered(llm) == (tokens, 16 * BLOCKS)


def test_a_tier_without_snapshots_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="--snapshot-interval 0 makes none"):
        engine(model, tmp_path, snapshot_interval=0)
