"""A model whose weights of four bits stay so, by the CUDA kernel on the host shim."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[2] / name) for name in ("models", "models/gguf")]
from family_cases import CASES, Case, save_case
from gguf_writing import convert
from model_helpers import Chunk, load_model

from vnext.kernels.cuda.few_bits import DeviceFewBits
from vnext.kernels.table import Operations
from vnext.models.loading.overlay import gguf_folder


@pytest.mark.parametrize("type_", ["Q4_0", "Q4_1"])
@torch.inference_mode()
def test_a_model_keeps_its_four_bits(kernels: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str) -> None:
    """A token has the same bits whatever tokens are computed with it, and those of the floats within their rounding."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2, "initializer_range": 0.05}
    monkeypatch.setitem(CASES, "llama", Case("LlamaForCausalLM", "LlamaConfig", sizes))
    save_case(tmp_path / "checkpoint", "llama")
    path = gguf_folder(convert(tmp_path / "checkpoint", tmp_path / "model.gguf", type_=type_), tmp_path / "folders")
    tokens, blocks = [(7 * index + 3) % 97 for index in range(40)], list(range(8))

    def logits(quantization: str, cut: int) -> torch.Tensor:
        model = load_model(path, dtype=torch.bfloat16, quantization=quantization)
        assert isinstance(model.params.layers[0].attention.qkv.weight, DeviceFewBits) == (quantization == "codes")
        return torch.cat([model.logits(Chunk(tokens[first:last], first, blocks)) for first, last in ((0, cut), (cut, len(tokens)))])

    found, floats = logits("codes", 21), logits("none", 21)
    assert all(torch.equal(logits("codes", cut)[-1], found[-1]) for cut in (39, 7))
    assert ((found - floats).norm(dim=-1) / floats.norm(dim=-1)).median() < 0.02
