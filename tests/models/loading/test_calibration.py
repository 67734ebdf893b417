"""Scales chosen by a text: the inputs that count are transformers' own, and what is held back is computed better."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from family_cases import CASES, save_case
from hybrids import save_hybrid
from model_helpers import Chunk, load_model

from vnext.commands.cli import main
from vnext.kernels.formats.rounding import SHARES, to_integers
from vnext.models.loading import calibration
from vnext.models.loading.calibration import column_squares
from vnext.models.loading.overlay import gguf_folder
from vnext.runtime.processes.launch import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[3]
TEXT, HELD_BACK = ROOT / "vnext" / "state" / "laws.py", sorted((ROOT / "vnext" / "server").rglob("[a-z]*.py"))[::3]
"""Programs, which the demo model was trained to write; so many that a line of one changes little."""
WINDOW = 48


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "starcoder2", "qwen3_moe"])
def test_squares_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every linear layer but the head, routers and experts."""
    monkeypatch.setattr(calibration, "WINDOW", WINDOW)
    monkeypatch.setitem(CASES, name, CASES[name]._replace(changes={**CASES[name].changes, "vocab_size": 3072}))
    folder = tmp_path / name
    save_case(folder, name)
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    found, count = column_squares(folder, TEXT)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][: calibration.WINDOWS_MAX]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    wanted: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            def hear(_: object, given: tuple[torch.Tensor], own: str = f"{module_name}.weight") -> None:
                x = given[0].detach().double().reshape(-1, given[0].shape[-1])
                wanted[own] = wanted.get(own, 0) + x.square().sum(0)

            module.register_forward_pre_hook(hear)
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]))
    assert count == len(windows) * WINDOW and found.keys() == wanted.keys() and len(found) >= 12
    for own, each in wanted.items():
        assert found[own] == pytest.approx((each / count).numpy(), rel=2e-3, abs=1e-6), own


def test_no_scale_does_better_by_the_errors_as_they_count() -> None:
    rng = np.random.default_rng(4)
    weight, columns = rng.standard_normal((64, 96)).astype(np.float32), (rng.random(96) ** 8).astype(np.float32)
    columns[64:] = 0

    def errors(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        lost = numbers * np.repeat(scales.astype(np.float32), 32, 1) - weight
        return (columns * np.square(lost)).reshape(64, 3, 32).sum(-1)

    found, plain = (to_integers(weight, 4, 32, np.dtype(np.float16), each) for each in (columns, None))
    assert np.isfinite(found.scales).all() and errors(found.numbers, found.scales).sum() < 0.8 * errors(plain.numbers, plain.scales).sum()
    groups = weight.reshape(64, 3, 32)
    largest = np.where(groups.max(-1) > -groups.min(-1), -1, 1) * np.abs(groups).max(-1) / 7
    for share in SHARES:
        scales = (largest * np.float32(share)).astype(np.float16)
        others = np.clip(np.rint(weight / np.repeat(scales.astype(np.float32), 32, 1)), -8, 7)
        assert (errors(found.numbers, found.scales) <= errors(others, scales) * 1.00001 + 1e-12).all()


def test_held_back_text_is_computed_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model in 4 bits, as a checkpoint and as GGUF, which may come from a GGUF file too."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [tokenizer.encode(path.read_text()).ids[:300] for path in HELD_BACK]

    def log_probabilities(folder: Path) -> torch.Tensor:
        model = load_model(folder)
        return torch.cat([model.logits(Chunk(ids, 0, range(1, 20))).log_softmax(-1) for ids in texts])

    true = log_probabilities(DEMO_MODEL)

    def divergence(model: Path) -> float:
        own = log_probabilities(gguf_folder(model, tmp_path / "folders") if model.suffix else model)
        return float((true.exp() * (true - own)).sum(-1).mean())

    assert main(["quantize", str(DEMO_MODEL), str(tmp_path / "whole.gguf"), "--scheme", "bf16"]) == 0
    found = {}
    for name, source, scheme in (("w4", DEMO_MODEL, "w4a16"), ("q4.gguf", DEMO_MODEL, "q4_0"), ("again.gguf", tmp_path / "whole.gguf", "q4_0")):
        for text in ((), ("--calibrate", str(TEXT))):
            out = tmp_path / f"{'by-text-' if text else ''}{name}"
            assert main(["quantize", str(source), str(out), "--scheme", scheme, *text]) == 0
            said = re.search(r"calibrated: the scales of 28 weights by their inputs over [\d,]+ tokens of", capsys.readouterr().out)
            assert bool(said) == bool(text)
            found[name, bool(text)] = divergence(out)
        assert found[name, True] < 0.98 * found[name, False], found
    assert found["q4.gguf", True] == found["again.gguf", True]


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("def f(x):\n    return x\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    save_hybrid(tmp_path / "hybrid", "qwen3_5")
    before, out = sorted(tmp_path.iterdir()), str(tmp_path / "out.gguf")
    capsys.readouterr()
    for model, text, sentence in (
        (DEMO_MODEL, tmp_path / "short.txt", "tokens, and a calibration needs 512 or more: give a longer text."),
        (DEMO_MODEL, tmp_path / "bytes.txt", "give --calibrate a file of UTF-8."),
        (DEMO_MODEL, tmp_path / "none.txt", "none.txt cannot be read as text"),
        (tmp_path / "hybrid", TEXT, "is not calibrated, only decoders whose layers all attend: leave --calibrate out."),
    ):
        assert main(["quantize", str(model), out, "--scheme", "q4_0", "--calibrate", str(text)]) == 2
        found = capsys.readouterr().err
        assert sentence in found and found.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["quantize", str(DEMO_MODEL), out, "--scheme", "q8_0", "--calibrate", str(TEXT)])
    assert "calibrate is for the scales of w4a16, q6_k, q5_k_m, q4_k_m, q3_k_m, q2_k, q5_1, q5_0, q4_1, q4_0, and scheme is q8_0: leave it out" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
