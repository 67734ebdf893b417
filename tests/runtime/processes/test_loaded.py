"""What a start loads: each process of a server, and a program with an engine, what it needs and nothing heavier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import ROOT, complete_all, serving

HEAVY = {
    "numpy": "/_multiarray_umath.", "ml_dtypes": "/ml_dtypes/", "torch": "/libtorch", "ssl": "/libssl", "llguidance": "/llguidance/",
    "tokenizers": "/tokenizers/", "zmq": "/zmq/",
}  # fmt: skip
"""Words in the paths of the files that a package maps."""
PROGRAM = """
import sys
from vnext import LLM, SamplingParams
with LLM(threads=1, log="off") as llm:
    answer = llm.generate("What is", SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1), use_tqdm=False)
    assert len(answer[0].prompt_logprobs) == len(answer[0].prompt_token_ids)
    print(*sorted({"numpy", "torch", "tqdm", "llguidance"} & set(sys.modules)))
"""


def loaded(process: psutil.Process) -> set[str]:
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return {package for package, word in HEAVY.items() if word in maps}


LIGHT = {"commands.cli": {"zmq"}, "runtime.engine.main": {"numpy", "zmq"}, "runtime.rank.main": {"numpy", "ml_dtypes"}}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells what a process maps")
def test_the_processes_of_a_server_load_what_they_need(tmp_path: Path) -> None:
    """After an answer with log-probabilities of its prompt."""
    body = {"model": "demo", "prompt": "def f(", "max_tokens": 3, "echo": True, "logprobs": 1}
    with serving(tmp_path, "--threads", "1", "--served-model-name", "demo") as server:
        light = {name: loaded(server.process_of(f"vnext.{name}")) for name in LIGHT}
        assert complete_all(server.url, [body], 1)[0]["choices"][0]["logprobs"]
        edge = loaded(server.process_of("vnext.server"))
    assert light == LIGHT
    assert edge == {"ssl", "tokenizers", "zmq"}  # aiohttp brings ssl


def test_a_program_needs_no_numpy() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "\n"), ran.stderr


def test_a_program_starts_its_engine_before_it_imports_what_reads_models() -> None:
    later = {"ctypes", "socket", "zmq", "tokenizers", "vnext.models", "vnext.runtime.protocol.messages", "vnext.text.tokenizer"}
    program = f"import sys; from vnext import LLM, SamplingParams; print(*sorted({later} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "\n"), ran.stderr
