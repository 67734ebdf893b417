"""Weights that an engine has mapped from a file of packed ones change as all do, and the file stays as it is."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from changing_engine import Tensors, made
from engine_here import engines_here
from safetensors.torch import save_file
from saved_adapters import DEMO

from vnext.api.llm import LLM
from vnext.kernels.cpu import native
from vnext.runtime.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled here")
PROMPTS = ["The module", "What is", "Return the"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SETTINGS = {
    "float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "two ranks": {"dtype": "bfloat16", "executor": "mp", "tensor_parallel_size": 2},
}  # fmt: skip


def engine_place(settings: dict[str, Any]) -> AbstractContextManager[object]:
    """Engine cores in this process, unless their ranks need processes of their own."""
    return nullcontext() if "executor" in settings else engines_here()


def tokens_of(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, False)]


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_updates_and_sleep(settings: dict[str, Any], new: Tensors, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "packed", tmp_path / "demo"
    given = {"packed_weights_dir": str(folder)} | settings
    shutil.copytree(DEMO, checkpoint)
    save_file(new, checkpoint / "model.safetensors")
    with engine_place(settings), made(model=str(checkpoint), **settings) as fresh:
        expected = tokens_of(fresh)
    with engine_place(settings):
        with made(**given) as llm:
            before = tokens_of(llm)
        files = contents(folder)
        with made(**given) as llm, made(**given) as beside:
            assert tokens_of(llm) == tokens_of(beside) == before
            llm.update_weights(new)
            assert tokens_of(llm) == expected != before and tokens_of(beside) == before
            llm.sleep(), llm.wake_up()
            assert tokens_of(llm) == expected
            llm.update_weights(str(DEMO))
            beside.sleep(), beside.wake_up()
            assert tokens_of(llm) == tokens_of(beside) == before
        assert contents(folder) == files != []
        with made(**given) as llm:
            assert tokens_of(llm) == before
        assert contents(folder) == files
