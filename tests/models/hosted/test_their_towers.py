"""Towers that transformers computes: answers are its own, for any chunk, batch, hit and preemption; what cannot be gets a sentence."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_here import llm_here
from PIL import Image
from safetensors.torch import load_file, save_file
from their_cases import CASES, TEXT, VECTOR, VISION, save

from tests.e2e.serving import eventually
from vnext import LLM, SamplingParams
from vnext.kernels.cpu.native import Level
from vnext.media.pictures import MediaError
from vnext.media.seen import Part
from vnext.media.store import MediaStore, kept_in
from vnext.media.theirs import TheirForm, _processor_in
from vnext.models.config.model_config import load_config, parse_config
from vnext.models.errors import ModelError
from vnext.models.hosted import seeing, stepping
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.unread import has_tower, tower_tensors, unread
from vnext.runtime.rank.their_images import TheirImages

COUNT, TURNED = 6, ("qwen2_vl", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl")
PICTURES = [np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8) for size in ((40, 70, 3), (33, 20, 3), (32, 32, 3))]
SETTINGS: dict[str, dict[str, Any]] = {
    "few pages": {"max_model_len": 100, "num_blocks_override": 26, "enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "ranks": {"tensor_parallel_size": 2},
}  # fmt: skip
CROSSED = (
    ("qwen2_vl", "few pages"), ("glm4v_moe", "ranks"), ("internvl", "drafts"), ("minicpmv4_6", "few pages"),
    ("lfm2_vl", "drafts"),
)  # fmt: skip
ASKED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


def right(model: Any, path: Path, text: str, which: Sequence[int]) -> tuple[list[int], list[float], int]:
    """transformers' greedy answer, its log-probabilities, and the length of the prompt."""
    processor = _processor_in(path)
    text = text.replace("<image>", processor.image_token)
    pictures = [Image.fromarray(PICTURES[at]) for at in which]
    given = processor(text=text, images=pictures, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        found = model.generate(
            **given, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
        )
    length = given["input_ids"].shape[1]
    answer = found.sequences[0, length:].tolist()
    return answer, [float(each[0].log_softmax(-1)[token]) for each, token in zip(found.logits, answer)], length


def answers(llm: LLM, path: Path, asked: Sequence[tuple[str, Sequence[int]]]) -> list[Any]:
    mark = _processor_in(path).image_token
    prompts = [
        {"prompt": text.replace("<image>", mark), "multi_modal_data": {"image": [PICTURES[at] for at in which]}} for text, which in asked
    ]
    return llm.generate(prompts, ASKED, use_tqdm=False)


@pytest.mark.parametrize("key", CASES)
def test_answers_are_those_of_transformers(folder: Path, key: str) -> None:
    path = folder / key
    model = save(path, key)
    asked = [("d3 <image> e4 f5 <image> g6", (0, 1)), ("<image> <image> h7", (1, 2)), ("i8 <image>", (2,))]
    if key in TURNED:  # their generate() turns images that touch as one, and what follows one at the end of a prompt by its rows
        asked = [*asked[:1], ("<image> e4 <image> h7", (1, 2)), ("i8 <image> k10", (2,))]
    with llm_here(path, dtype="float32", block_size=4, max_num_batched_tokens=29, max_num_seqs=3) as llm:
        found = answers(llm, path, asked)
        [again] = answers(llm, path, asked[:1])
    for answer, own in zip(found, asked):
        expected, logprobs, length = right(model, path, *own)
        assert (list(answer.outputs[0].token_ids), len(answer.prompt_token_ids)) == (expected, length)
        chosen = [each[token].logprob for each, token in zip(answer.outputs[0].logprobs, expected)]
        assert chosen == pytest.approx(logprobs, rel=0, abs=1e-4)
    assert again.outputs[0].logprobs == found[0].outputs[0].logprobs and again.num_cached_tokens >= length - 8
    assert unread(path) == "" and has_tower(path, load_config(path))


@pytest.mark.parametrize("key, name", [*(("aya_vision", name) for name in SETTINGS), *CROSSED])
def test_no_setting_changes_a_bit(folder: Path, key: str, name: str) -> None:
    path = folder / f"{key} {name}"
    save(path, key)
    asked = [("d3 <image> e4", (0,)), ("i8 <image>", (2,)), ("<image> f5", (1,))]
    with llm_here(path, dtype="float32", block_size=4) as llm:
        alone = [answers(llm, path, [each])[0].outputs[0].logprobs for each in asked]
    made = LLM if name == "ranks" else llm_here
    with made(str(path), dtype="float32", block_size=4, **SETTINGS[name]) as llm:
        assert [each.outputs[0].logprobs for each in answers(llm, path, asked)] == alone


def test_images_side_by_side_are_as_their_processor_has_them(folder: Path) -> None:
    path = folder / "idefics2-beside"
    model = save(path, "idefics2")
    with llm_here(path, dtype="float32", block_size=4) as llm:
        [answer] = answers(llm, path, [("d3 <image><image> e4", (0, 1))])
    expected, _, length = right(model, path, "d3 <image><image> e4", (0, 1))
    assert (list(answer.outputs[0].token_ids), len(answer.prompt_token_ids)) == (expected, length)


def test_newer_names_of_tensors_and_changed_towers(folder: Path) -> None:
    path = folder / "named"
    save(path, "internvl")
    config, own = load_config(path), load_file(path / "model.safetensors")
    torch.manual_seed(0)
    before = seeing.TheirTower(path, config, torch.float32)
    renamed = {
        name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "model.language_model.")
        if name.startswith("language_model.") else f"model.{name}": each
        for name, each in own.items()
    }  # fmt: skip
    assert renamed.keys() & own.keys() <= {"lm_head.weight"}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    after, form = seeing.TheirTower(path, config, torch.float32), TheirForm(path, (VECTOR,))
    read = form.read(PICTURES[0])
    with torch.inference_mode():
        vectors = [tower.vectors(read.tokens, read.span, read.given) for tower in (before, after)]
    assert torch.equal(*vectors) and bool((vectors[0][0] != 0).any())
    with llm_here(path, dtype="float32", block_size=4) as llm:
        assert len(answers(llm, path, [("<image> d3", (0,))])[0].outputs[0].token_ids) == COUNT
    names = {name for name in renamed if "vision_tower" in name or "projector" in name}
    (path / "half").mkdir()
    for file in ("config.json", "tokenizer.json"):
        (path / "half" / file).write_bytes((path / file).read_bytes())
    save_file({name: each for name, each in renamed.items() if name != min(names)}, path / "half" / "model.safetensors")
    with pytest.raises(ModelError, match=f"lacks {min(names)}"):
        seeing.TheirTower(path / "half", config, torch.float32)
    save_file({name: each for name, each in renamed.items() if name not in names}, path / "half" / "model.safetensors")
    assert not has_tower(path / "half", config)
    with open_checkpoint(path) as stored:
        assert set(tower_tensors(stored.rooted(), config)) == names


def test_a_decoder_that_is_given_more_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "more"
    save(path, "llava")
    tower, form = seeing.TheirTower(path, load_config(path), torch.float32), TheirForm(path, (VECTOR,))
    read, stopped = form.read(PICTURES[0]), seeing.Stopped.__init__
    assert len(tower.vectors(read.tokens, read.span, read.given)) == 64
    for more, sentence in (
        ({"position_ids": torch.zeros((3, 1, 2))}, "gives its decoder position_ids beside the vectors"),
        ({"inputs_embeds": torch.ones((1, 66, 48))}, "gives its decoder no vectors in the places"),
        ({"inputs_embeds": None}, "gives its decoder no vectors in the places"),
    ):
        monkeypatch.setattr(seeing.Stopped, "__init__", lambda self, given, more=more: stopped(self, given | more))
        with pytest.raises(ModelError, match=sentence):
            tower.vectors(read.tokens, read.span, read.given)
    with pytest.raises(MediaError, match="^the image is 1 x 300 pixels"):
        form.seen(np.zeros((300, 1, 3), np.uint8), "the image")


def test_images_whose_tokens_turn_lie_in_rows(folder: Path) -> None:
    path = folder / "turned"
    save(path, "qwen2_vl")
    config = load_config(path)
    assert config.rope.axes == (0, 0, 1, 1, 2, 2)
    tower, form = seeing.TheirTower(path, config, torch.float32), TheirForm(path, (VECTOR,))
    read = form.read(PICTURES[0])
    assert (read.rows, read.span) == (3, slice(0, 15)) and form.seen(PICTURES[0], "it").parts[0].rows == 3
    with torch.inference_mode():
        assert len(tower.vectors(read.tokens, read.span, read.given, 3)) == 15
        for rows in (0, 2, 5):
            with pytest.raises(ModelError, match="turns its images' tokens otherwise than by rows and columns from the first one's place"):
                tower.vectors(read.tokens, read.span, read.given, rows)
    older = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 10000.0}  # of files that say all at once
    flat = {key: value for key, value in TEXT.items() if key != "initializer_range"} | older | {"model_type": "qwen2_vl", "image_token_id": VECTOR}
    assert parse_config(flat | {"architectures": ["Qwen2VLForConditionalGeneration"]}, {}).rope == config.rope


def raw_of(name: str, **members: Any) -> dict[str, Any]:
    return getattr(transformers, f"{name}Config")(**members).to_dict() | {"architectures": [f"{name}ForConditionalGeneration"]}


def test_what_cannot_be_served_says_why(folder: Path) -> None:
    gemma = TEXT | {"model_type": "gemma", "head_dim": 12}
    for raw, sentence in (
        (raw_of("Mllama"), "it needs a text that attends to images by layers of its own"),
        (raw_of("PaliGemma", text_config=gemma, vision_config=VISION), "has a decoder of Gemma's, which scales what it is given"),
        (raw_of("HunYuanVL"), "'HunYuanVLForConditionalGeneration' is not supported: it is known and missing here"),
        (raw_of("Glm4v"), "mrope_section is .16, 24, 24. and must be three numbers of sum 32"),
        (raw_of("Llava", text_config=CASES["llava"].text) | {"image_token_id": "x"}, "names no token that stands for images"),
    ):
        with pytest.raises(ModelError, match=sentence):
            parse_config(raw, {})
    with pytest.raises(MediaError, match="cannot make the processor in [^\n]+$"):
        TheirForm(folder, (VECTOR,))


def test_what_an_image_costs_is_counted(folder: Path) -> None:
    path = folder / "counted"
    save(path, "internvl")
    config = load_config(path)
    layers = 2 * 65 * 64 * (4 * 64 + 2 * 96 + 2 * 65)  # of an image's patches and one more, which all see each other
    layers += 2 * 65 * (4 * 65 * stepping.SCORE + 96 * stepping.BENT)
    beside = 64 * 64 * 3 * 16 + 16 * 256 * 48 + 16 * 48 * 48 + 16 * 48 * stepping.BENT
    cost = TheirImages(path, config, torch.float32, folder / "media").cost(config)
    decoder = 2 * 48 * (2 * 6 * 12 + 3 * 80)
    assert cost * decoder * 16 == pytest.approx(layers + beside, rel=1e-6)


def test_a_tower_stops_between_bands_and_what_nobody_asks_for_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "stepped"
    save(path, "internvl")
    store = MediaStore([folder])
    one, other = store.put([Part(each).file for each in PICTURES[:2]], "it")
    made = partial(TheirImages, path, load_config(path), torch.float32, folder / "media")
    layers: list[int] = []

    def counted(images: TheirImages) -> TheirImages:
        for module in images._tower._base.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(lambda *_: layers.append(threading.get_ident()))
        return images

    monkeypatch.setattr("vnext.runtime.rank.their_images.kept_in", lambda _, digest, kind: kept_in(folder, digest, kind))
    monkeypatch.setattr(stepping, "PART", 1 << 17)
    monkeypatch.setattr(stepping, "ROWS", 8)
    monkeypatch.setattr(stepping, "READ", 0)
    before = threading.active_count()
    whole, stepped = counted(made()), counted(made())
    right, layers[:] = [whole.vectors(each) for each in (one, other)], []
    counts = [len(layers) for done in range(1, 13) if stepped.advance(one, done, 12) is None]
    assert counts == 5 * [1] + 7 * [2] and threading.get_ident() not in layers
    stepped.advance(other, 6, 8)
    assert len(layers) == 4 and eventually(lambda: threading.active_count() == before + 1), "the one before is given up, and so is its thread"
    assert torch.equal(stepped.vectors(one), right[0]) and torch.equal(stepped.vectors(other), right[1])
    assert len(layers) == 4 + 2 + 2 and eventually(lambda: threading.active_count() == before) and stepped.computed == whole.computed
    monkeypatch.setattr(type(stepped._tower), "_vectors", lambda *_: 1 / 0)
    stepped._kept.clear()
    with pytest.raises(ZeroDivisionError):
        stepped.vectors(one)
    assert eventually(lambda: threading.active_count() == before)


@pytest.mark.parametrize("name", ["avx2", "avx512_bf16"])
def test_a_tower_is_float32_where_products_of_bfloat16_are_slow(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = folder / name
    save(path, "internvl")
    monkeypatch.setattr("vnext.kernels.cpu.native.level", lambda: Level[name.upper()])
    images = TheirImages(path, load_config(path), torch.bfloat16, folder / "media")
    own = torch.float32 if name == "avx2" else torch.bfloat16
    assert {each.dtype for each in images._tower._base.parameters()} == {own} and images.form.endswith(f", {own}")
    [digest] = MediaStore([folder]).put([Part(PICTURES[0]).file], "it")
    monkeypatch.setattr("vnext.runtime.rank.their_images.kept_in", lambda _, digest, kind: kept_in(folder, digest, kind))
    found = images.vectors(digest)
    assert found.dtype == torch.bfloat16
    read = images._form.read(PICTURES[0])
    with torch.inference_mode():
        exact = seeing.TheirTower(path, load_config(path), own).vectors(read.tokens, read.span, read.given)
    assert torch.equal(found, exact.to(torch.bfloat16))
