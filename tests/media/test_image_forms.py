"""Tests of forms of images: inputs and the text that stands for them are those of transformers' processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_tiles import noise

from vnext.media.pictures import MediaError
from vnext.media.reader import form_of
from vnext.media.seen import Form, part_in

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install -e .[images])")
SIZES = [(20, 20), (33, 90), (200, 31), (7, 301), (64, 64), (500, 333), (65, 31)]
ANYRES = {
    "size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 96]],
    "image_mean": [0.5, 0.4, 0.3],
}  # fmt: skip
GRID, MOST, PATCH, MERGED = 4, 3, 4, 2


def form_with(folder: Path, sizes: str, raw: dict[str, Any]) -> Form:
    (folder / "preprocessor_config.json").write_text(json.dumps(raw))
    words = [{"id": at, "content": word} for at, word in ((90, "[IMG]"), (91, "[IMG_BREAK]"), (92, "[IMG_END]"))]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": words, "model": {"vocab": {}}}))
    return form_of(folder, sizes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("others", [0, 1])
def test_squares_of_a_grid_are_those_of_transformers(tmp_path: Path, size: tuple[int, int], others: int) -> None:
    kind = pytest.importorskip("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
    writer = pytest.importorskip("transformers.models.llava_onevision.processing_llava_onevision").LlavaOnevisionProcessor
    picture, form = noise(*size), form_with(tmp_path, f"anyres 90 32 {GRID} {MOST}", ANYRES)
    processor = kind.LlavaOnevisionImageProcessorPil(**ANYRES)
    right = processor([[Image.fromarray(picture)] * (1 + others)], return_tensors="np")
    (part,), text = form.seen(picture, "it", not others)
    part = part_in(part.file)
    np.testing.assert_allclose(form.numbers(part), right["pixel_values"][0], rtol=0, atol=1e-6)
    theirs = writer.__new__(writer)
    theirs.image_processor, theirs.num_image_tokens, theirs.vision_aspect_ratio = processor, GRID**2, f"anyres_max_{MOST}"
    theirs.vision_feature_select_strategy, theirs.image_token = "full", "<image>"
    assert text == theirs.replace_image_token(right, 0) and form.spelled(part).tolist() == [90] * text.count("<image>")


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    kind = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    picture, raw = noise(*size), {"size": {"longest_edge": 64}}
    form = form_with(tmp_path, f"rows 90 {PATCH} {MERGED} 64", raw)
    right = kind.PixtralImageProcessorPil(**raw, patch_size=PATCH * MERGED)(Image.fromarray(picture), return_tensors="np")
    (part,), text = form.seen(picture, "it", True)
    part = part_in(part.file)
    np.testing.assert_allclose(form.numbers(part), right["pixel_values"], rtol=0, atol=1e-6)
    rows, columns = (int(each) // (PATCH * MERGED) for each in right["image_sizes"][0])
    lines = ["[IMG]" * columns] * rows
    assert text == "[IMG_BREAK]".join(lines) + "[IMG_END]"
    words = {90: "[IMG]", 91: "[IMG_BREAK]", 92: "[IMG_END]"}
    assert "".join(words[token] for token in form.spelled(part).tolist()) == text


@pytest.mark.parametrize("size", SIZES)
def test_whole_images_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    kind = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3").Gemma3ImageProcessorPil
    picture, raw = noise(*size), {"size": {"height": 32, "width": 32}, "image_std": [0.5, 0.4, 0.3]}
    form = form_with(tmp_path, "whole 90 32 16", raw)
    (part,), text = form.seen(picture, "it", True)
    part = part_in(part.file)
    right = kind(**raw)(Image.fromarray(picture), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(form.numbers(part), right, rtol=0, atol=1e-6)
    assert text == f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
    assert form.spelled(part).tolist() == [90] * 16


@pytest.mark.parametrize("size", SIZES)
def test_grids_are_those_of_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    kind = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").Qwen2VLImageProcessorPil
    picture, raw = noise(*size), {"size": {"shortest_edge": 40**2, "longest_edge": 96**2}, "patch_size": PATCH, "merge_size": MERGED}
    form = form_with(tmp_path, f"grid 90 {PATCH} {MERGED} {128**2}", raw)
    (part,), text = form.seen(picture, "it", True)
    right = kind(**raw)(Image.fromarray(picture), return_tensors="np")
    (_, rows, columns), side = right["image_grid_thw"][0].tolist(), PATCH * MERGED
    assert part.pixels.shape == (rows * PATCH, columns * PATCH, 3) and part.rows == rows // MERGED
    found = form.numbers(part_in(part.file)).reshape(3, rows // MERGED, MERGED, PATCH, columns // MERGED, MERGED, PATCH)
    flat = np.repeat(found.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None], 2, 5).reshape(rows * columns, -1)
    np.testing.assert_allclose(flat, right["pixel_values"], rtol=0, atol=1e-6)
    assert text == "<|image_pad|>" * (part.pixels[..., 0].size // side**2) and form.spelled(part).tolist() == [90] * text.count("<")


def test_large_images_shrink_to_the_towers_room(tmp_path: Path) -> None:
    form = form_with(tmp_path, f"grid 90 {PATCH} {MERGED} {64**2}", {"max_pixels": 96**2, "min_pixels": 16**2})
    for size, wanted in (((64, 64), (64, 64)), ((80, 80), (64, 64)), ((200, 40), (136, 24))):
        (part,), _ = form.seen(noise(*size), "it", True)
        assert part.pixels.shape[:2] == wanted


def test_what_a_file_cannot_mean_is_one_sentence(tmp_path: Path) -> None:
    for sizes, raw, words in (
        ("anyres 90 32 4 3", {"size": {"height": 16, "width": 32}}, "and the tower reads squares of 32 pixels"),
        ("anyres 90 32 4 3", {"image_grid_pinpoints": [[32, 33]]}, "must be heights and widths of 1 to 6 squares of 32"),
        ("rows 90 4 2 64", {"size": {"longest_edge": 65}}, "size.longest_edge is 65: it must be 1 to 64"),
        ("whole 90 32 16", {"size": {"height": 32, "width": 16}}, "and the tower reads squares of 32 pixels"),
        ("whole 90 32 16", {"do_pan_and_scan": True}, "do_pan_and_scan is not supported"),
        ("rows 90 4 2 64", {"image_std": [1, 2]}, "image_std is .* three numbers"),
        ("grid 90 4 2 9216", {"min_pixels": 255}, "has 255 to 1003520 pixels: these must be numbers, in order, of 256 or more"),
        ("grid 90 4 2 9216", {"size": {"shortest_edge": 300, "longest_edge": 299}}, "has 300 to 299 pixels"),
        ("grid 90 4 2 9216", {"patch_size": 14}, "patch_size is 14 and 4 in config.json"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=words):
            form_with(tmp_path, sizes, raw)
    for sizes in ("anyres 90 32 4 3", "rows 90 4 2 64", "whole 90 32 16", "grid 90 4 2 9216"):
        with pytest.raises(MediaError, match="no side may be more than 200 times the other"):
            form_with(tmp_path, sizes, {}).seen(noise(1, 300), "it", True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(MediaError, match=r"lacks \[IMG_BREAK\] or \[IMG_END\]"):
        form_of(tmp_path, "rows 90 4 2 64")
