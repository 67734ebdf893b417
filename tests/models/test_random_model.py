"""Tests of checkpoints with random weights: their shapes, equal bytes for equal seeds, and one model in every library that loads them."""

from __future__ import annotations

import json
import random
import sys
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from engine_here import engines_here
from safetensors.torch import load_file
from tokenizers import Tokenizer

from vnext.api.llm import LLM
from vnext.models.registry import FAMILIES
from vnext.runtime.protocol.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TINY = ("llama-tiny", "qwen3-tiny")
PROMPT_LENGTH, ANSWER_LENGTH = 24, 24
# Parameters of the models that the shapes are those of.
PARAMETER_COUNTS = {"llama-135m": 134_515_008, "llama-1b": 1_235_814_400, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """The script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import random_model
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return random_model


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request: pytest.FixtureRequest, maker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / request.param
    maker.write_checkpoint(maker.SHAPES[request.param], folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> object:
    """The checkpoint as transformers loads it, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def random_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(PROMPT_LENGTH)] for _ in range(3)]


def test_shapes_have_the_size_of_the_models_they_are_named_after(maker: ModuleType) -> None:
    counted = {name: sum(map(prod, maker.tensor_shapes(maker.SHAPES[name]).values())) for name in PARAMETER_COUNTS}
    assert counted == PARAMETER_COUNTS


def test_same_seed_same_bytes_other_seed_other_weights(maker: ModuleType, tmp_path: Path) -> None:
    files = []
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        maker.write_checkpoint(maker.SHAPES["llama-tiny"], tmp_path / name, seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_pieces_make_up_the_tensor_whatever_their_size(maker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(maker.tensor_pieces((10, 100), np.random.default_rng(3))))
    monkeypatch.setattr(maker, "PIECE_ELEMENTS", 64)
    pieces = list(maker.tensor_pieces((10, 100), np.random.default_rng(3)))
    assert len(pieces) == 16
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_rounding_is_torchs(maker: ModuleType) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(maker.bfloat16_bits(values), expected)


def test_weights_have_a_sane_scale(checkpoint: Path, maker: ModuleType) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == maker.tensor_shapes(
        maker.SHAPES[checkpoint.name]
    )
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, name
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert tensor.float().std().item() == pytest.approx(maker.WEIGHT_STD, rel=0.05), name
            assert abs(tensor.float().mean().item()) < maker.WEIGHT_STD / 10, name


def test_tokenizer_covers_the_vocabulary_and_still_reads_texts(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    assert tokenizer.get_vocab_size() == vocab_size
    assert tokenizer.decode([vocab_size - 1]) == f" word{vocab_size - 1}"
    text = "Return a new list – naïve café.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_vocabulary_below_the_tokenizers_is_refused(maker: ModuleType) -> None:
    with pytest.raises(ValueError, match="make it larger"):
        maker.filled_tokenizer(1000)


def test_transformers_and_vnext_give_the_same_tokens(checkpoint: Path, reference: object, tmp_path: Path) -> None:
    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    if architecture not in FAMILIES:
        pytest.skip(f"vnext does not know {architecture}")
    prompts = random_prompts(reference.config.vocab_size)
    with torch.no_grad():
        inputs = torch.tensor(prompts)
        answers = reference.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=ANSWER_LENGTH
        )
    expected = answers[:, PROMPT_LENGTH:].tolist()
    assert len({token for answer in expected for token in answer}) > ANSWER_LENGTH, "no answers that tell models apart"
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_LENGTH)  # no id ends an answer: ignore_eos is not needed
    with engines_here(), LLM(checkpoint, dtype="float32", executor="inproc", log_dir=tmp_path) as llm:
        generated = llm.generate(prompts, params, use_tqdm=False)
    assert [answer.outputs[0].token_ids for answer in generated] == expected
