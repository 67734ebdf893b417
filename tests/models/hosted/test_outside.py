"""A family from outside, in a file or a package, is served as those of vnext; a bad one is refused in one sentence."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from model_helpers import Chunk, load_model

from vnext import LLM, SamplingParams
from vnext.base.installed import first_line
from vnext.models import outside
from vnext.models.config.folder import architecture
from vnext.models.errors import ModelError
from vnext.models.registry import family
from vnext.runtime.processes.launch import DEMO_MODEL, StartRefused

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "family.py"
NAME = "CwmForCausalLM"
PROMPT = [(7 * index + 3) % 97 for index in range(150)]


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test brings is gone behind it."""
    monkeypatch.setattr(outside, "_from_files", {})
    for each in (family, outside.from_package):
        each.cache_clear()


def save_cwm(path: Path, vocab_size: int = 97) -> torch.nn.Module:
    """A small random CWM."""
    cases = pytest.importorskip("hosted_cases", reason="transformers makes the models: pip install transformers")
    return cases.save_hosted(path, "cwm", forced=False, vocab_size=vocab_size)


@torch.inference_mode()
def test_the_example_computes_what_transformers_does(tmp_path: Path) -> None:
    oracle = save_cwm(tmp_path)
    outside.use_file(EXAMPLE)
    model = load_model(tmp_path)
    assert model.family.parse.__module__ == "vnext_family_family" and model.config.windows == (0, 40, 40)
    expected, found = oracle(torch.tensor([PROMPT])).logits[0], model.logits(Chunk(PROMPT, 0, range(10)))
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_an_engine_serves_it(tmp_path: Path) -> None:
    save_cwm(tmp_path, json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"])
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    with LLM(str(tmp_path), family=str(EXAMPLE), model_impl="vnext", threads=1, log="off") as llm:
        (answer,) = llm.generate("def f(x):", SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 5


@pytest.mark.parametrize("fault", ["", "layer_windows(raw, kinds)"])
def test_a_model_in_60_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    """A family and its check, which finds a fault in the family: no windows."""
    check = runpy.run_path(str(EXAMPLE.with_name("check_family.py")))["main"]
    assert sum(len(file.read_text().splitlines()) for file in (EXAMPLE, Path(check.__code__.co_filename))) <= 60
    save_cwm(tmp_path / "model", json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"])
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path / "model")
    file = tmp_path / "own.py"
    file.write_text(EXAMPLE.read_text().replace(fault, "()") if fault else EXAMPLE.read_text())
    assert check(str(tmp_path / "model"), str(file)) == bool(fault)
    same = [int(count) for count in re.findall(r"the first (\d+) of 64", capsys.readouterr().out)]
    assert same == [64, 64] or (fault and 35 <= same[0] < 64), "a window of 40 shows behind 40 tokens"


def test_a_package_offers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no family of ours knows the architecture."""
    points = EntryPoints([EntryPoint(name, "vnext.models.families.llama", outside.GROUP) for name in ("OwnForCausalLM", "Olmo2ForCausalLM")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: points.select(**asked))
    assert architecture({"architectures": ["OwnForCausalLM"]}) == "OwnForCausalLM"
    assert family("OwnForCausalLM") == family("LlamaForCausalLM") != family("Olmo2ForCausalLM")


BAD = {
    "": " defines no ARCHITECTURES: a family has ARCHITECTURES, parse, assemble",
    "1 / 0": " cannot be imported (ZeroDivisionError: division by zero)",
    None: " is no Python file: name one that defines ARCHITECTURES, parse, assemble",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "own.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ModelError, match=f"^--family {file}{re.escape(BAD[text])}$"):
        outside.use_file(file)
    with pytest.raises(StartRefused, match="^--family"):
        LLM(str(DEMO_MODEL), family=str(file))


def test_a_bad_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("AForCausalLM", "no.such.module", outside.GROUP), EntryPoint("BForCausalLM", "json", outside.GROUP)])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: points.select(**asked))
    with pytest.raises(ModelError, match="^the family AForCausalLM cannot be imported .ModuleNotFoundError"):
        family("AForCausalLM")
    with pytest.raises(ModelError, match="^the family BForCausalLM of an installed package defines no parse: a family has parse, assemble$"):
        family("BForCausalLM")


@pytest.mark.parametrize(
    "said, line",
    [("", "ValueError"), ("\n it broke.\nhere", "it broke"), ("Install it by:\n\n`pip install timm`.\nThen", "Install it by: `pip install timm`"),
     ("only this:", "only this:")],
)  # fmt: skip
def test_what_a_package_raises_is_one_line(said: str, line: str) -> None:
    assert first_line(ValueError(said)) == line


def test_a_checkpoint_names_no_code(tmp_path: Path) -> None:
    """Whatever stands in its config.json."""
    file, name = tmp_path / "own.py", "OwnForCausalLM"
    file.write_text(EXAMPLE.read_text().replace(NAME, name))
    raw = {"architectures": [name], "family": str(file), "vnext_family": str(file), "model_type": "own"}
    assert architecture(raw) == name
    with pytest.raises(ModelError, match="is not supported"):
        family(name)
    outside.use_file(file)
    assert family(name).parse is not None
