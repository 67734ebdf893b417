"""A server of a model with recurrent layers, as a stranger meets it: long prompts, hits, /metrics, kills in mid stream, its log."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from serving import REQUEST_TIMEOUT_S, ROOT, Server, complete_all, eventually, in_background, serving

from vnext.replay.cli.main import main as replay

sys.path.append(str(ROOT / "tests" / "models"))  # hybrids

from family_cases import VOCAB_SIZE  # noqa: E402
from hybrids import save_hybrid  # noqa: E402

PROMPTS = [[(7 * place + 11 * which) % VOCAB_SIZE for place in range(300 + 40 * which)] for which in range(3)]
KILLED = ("vnext.runtime.rank.main", "vnext.runtime.engine.main")
OPTIONS = ("--dtype", "float32", "--threads", "1", "--served-model-name", "m", "--log", "full", "--snapshot-interval", "100")


def saved(folder: Path) -> Path:
    save_hybrid(folder, "qwen3_5")
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def texts(server: Server, tokens: int = 40) -> list[str]:
    common = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    return [each["choices"][0]["text"] for each in complete_all(server.url, [{**common, "prompt": prompt} for prompt in PROMPTS], 3)]


def has_recovered(server: Server, recoveries: float) -> bool:
    return server.metric("vnext_recoveries_total") > recoveries


DRAFTS = ("--speculative-config", '{"method": "suffix", "row_cost": 0}')


@pytest.mark.parametrize("drafts", [(), DRAFTS, (*DRAFTS, "--tensor-parallel-size", "2")], ids=["plain", "drafts", "drafts on two ranks"])
def test_a_hybrid_is_served_whole_whatever_is_killed(tmp_path: Path, drafts: tuple[str, ...]) -> None:
    with serving(tmp_path / "logs", str(saved(tmp_path / "qwen3_5")), *OPTIONS, *drafts) as server:
        assert "recurrent states of 0.0" in server.said and "(kept every 112 tokens)" in server.said
        began_s = time.monotonic()
        expected = texts(server, 120)
        took_s = time.monotonic() - began_s
        assert eventually(lambda: server.metric("vnext_state_snapshots") >= 3 and server.metric("vnext_state_pages_held") == 0)
        assert server.metric("vnext_state_pages") > server.metric("vnext_state_snapshots")
        before = server.metric("vnext_prefix_cache_hits_total")
        assert all(whole.startswith(part) for whole, part in zip(expected, texts(server, 4)))
        assert eventually(lambda: server.metric("vnext_prefix_cache_hits_total") == before + 288 + 336 + 368)
        assert server.metric("vnext_prefix_cache_lost_tokens_total") == 0
        assert not drafts or server.metric("vnext_spec_decode_num_accepted_tokens_total") > 0
        for module in KILLED:
            child, recoveries = server.process_of(module).pid, server.metric("vnext_recoveries_total")
            thread, found = in_background(partial(texts, server, 120))
            time.sleep(took_s / 2)
            os.kill(child, signal.SIGKILL)
            thread.join(REQUEST_TIMEOUT_S)
            assert found == [expected], module
            assert eventually(partial(has_recovered, server, recoveries)), module
        assert server.stop() == 0
    logs = [path for path in (tmp_path / "logs").iterdir() if path.is_dir()]
    assert len(logs) == 2 and [replay(["verify", "--laws", str(log)]) for log in logs] == [0, 0]
    assert replay(["exec", str(max(logs, key=lambda log: sum(file.stat().st_size for file in log.iterdir())))]) == 0
