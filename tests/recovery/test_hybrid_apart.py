"""Prefill and decode apart for a model with recurrent layers: a prompt's blocks come with the snapshot behind them, and the texts are
those of one engine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from serving import ROOT

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.handed_over import handed_over_by
from vnext.replay.reading.source import open_log
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.protocol.sampling_params import SamplingParams
from vnext.state.events import BlocksPromoted, BlocksReceived, PromotionEnded

sys.path.append(str(ROOT / "tests" / "models"))  # hybrids

from family_cases import VOCAB_SIZE  # noqa: E402
from hybrids import save_hybrid  # noqa: E402

PROMPTS = [[(7 * place + 11 * which) % VOCAB_SIZE for place in range(290 + 15 * which)] for which in range(3)]
"""Of the last one the length is a multiple of a block's."""
ASKED = [{"prompt_token_ids": prompt} for prompt in (*PROMPTS, PROMPTS[0], [5])]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
APART = {"data_parallel_size": 2, "prefill_engines": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hybrid") / "qwen3_5"
    save_hybrid(path, "qwen3_5")
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def engine(model: Path, folder: Path, **settings: object) -> LLM:
    usual = {"log_dir": str(folder / "logs"), "log": "full", "check_laws": True, "threads": 1, "digest_interval": 1}
    return LLM(str(model), **(usual | {"dtype": "float32", "snapshot_interval": 64} | settings))


def answered(llm: LLM) -> list[list[int]]:
    return [found.outputs[0].token_ids for found in llm.generate(ASKED, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with engine(model, tmp_path_factory.mktemp("alone")) as llm:
        return answered(llm)


@pytest.mark.parametrize(("ranks", "transport"), [(1, "shm"), (2, "tcp")], ids=["shared memory", "tcp, two ranks each"])
def test_texts_are_those_of_one_engine(model: Path, tmp_path: Path, alone: list[list[int]], ranks: int, transport: str) -> None:
    (tmp_path / "secret").write_text("a secret of both engines")
    over_tcp = {"handover_address": "127.0.0.2:0", "cluster_secret_file": str(tmp_path / "secret")} if transport == "tcp" else {}
    with engine(model, tmp_path, **APART, handover_transport=transport, tensor_parallel_size=ranks, **over_tcp) as llm:
        assert answered(llm) == alone
        prefill, decode = llm.log_dirs
    assert replay(["verify", "--laws", "--prefill", prefill, decode]) == 0 and replay(["exec", decode]) == 0
    came = handed_over_by([open_log(Path(prefill))], open_log(Path(decode)))
    assert came.difference == "" and came.requests >= 3 and came.blocks >= 18 + 18 + 19
    events = [item.event for item in fold(open_log(Path(decode))) if isinstance(item, Folded)]
    asked = [event for event in events if isinstance(event, BlocksPromoted)]
    ends = [event for event in events if isinstance(event, PromotionEnded)]
    assert all(event.edge for event in asked) and all(isinstance(event, BlocksReceived) for event in ends)
    assert [end.count for end in ends] == [event.count + 1 for event in asked], "each with its snapshot"


def test_a_killed_prefill_engine_costs_time_alone(model: Path, tmp_path: Path, alone: list[list[int]]) -> None:
    with engine(model, tmp_path, **APART) as llm:
        timer = threading.Timer(0.2, os.kill, (llm._engine.engines[0].child.pid, signal.SIGKILL))
        timer.start()
        assert answered(llm) == alone
        timer.join()
        assert answered(llm) == alone


def test_a_hand_over_without_snapshots_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="--snapshot-interval 0 makes none"):
        engine(model, tmp_path, **APART, snapshot_interval=0)
