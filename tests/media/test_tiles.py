"""Tests of images as a tower reads them: pixels, tiles and text are transformers'."""

from __future__ import annotations

import time
from io import BytesIO
from itertools import product
from typing import Any

import numpy as np
import pytest

from vnext.media.pictures import BYTES_MAX, MediaError, picture_of, pixels_of
from vnext.media.pixels import numbers_of
from vnext.media.seen import Part, part_in, with_images
from vnext.media.store import digest_of
from vnext.media.tiles import text_of, tile_form, tiles_of

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install -e .[images])")
SMALL = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("size", [(20, 20), (33, 90), (200, 31), (7, 301), (128, 128), (500, 333)])
def test_tiles_are_those_of_transformers(size: tuple[int, int], splits: bool) -> None:
    theirs = pytest.importorskip("transformers.models.idefics3.image_processing_pil_idefics3").Idefics3ImageProcessorPil
    picture, raw = noise(*size), SMALL | {"do_image_splitting": splits, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.5, 0.3]}
    right = theirs(**raw)(Image.fromarray(picture), return_tensors="np", return_row_col_info=True)
    form = tile_form(raw, 4)
    found = tiles_of(picture, form, "it")
    assert (found.rows, found.columns) == (right["rows"][0][0], right["cols"][0][0])
    assert right["pixel_attention_mask"].all()  # no tile is padded
    np.testing.assert_allclose(numbers_of(found.pixels, form.pixels), right["pixel_values"][0], rtol=0, atol=1e-6)


def test_the_text_is_that_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.idefics3.processing_idefics3").Idefics3Processor
    writer = theirs.__new__(theirs)
    writer.fake_image_token, writer.image_token, writer.global_image_tag = "<fake_token_around_image>", "<image>", "<global-img>"
    writer.image_seq_len, form = 3, tile_form(SMALL, 3)
    for tiles in (tiles_of(noise(90, 60), form, "it"), tiles_of(noise(20, 20), form._replace(splits=False), "it")):
        right = writer.replace_image_token({"rows": [[tiles.rows]], "cols": [[tiles.columns]]}, 0)
        assert text_of(tiles, form) == right
        assert with_images("a<image>b", [right], form.mark) == f"a{right}b"


def test_an_image_more_or_less_than_its_places_is_refused() -> None:
    with pytest.raises(MediaError, match="the prompt has 2 times <image> and 0 images"):
        with_images("<image><image>", [], "<image>")


def test_digests_know_the_form_and_each_pixel() -> None:
    picture = noise(4, 6)
    other = picture.copy()
    other[3, 5, 2] ^= 1
    parts = Part(picture), Part(picture.reshape(6, 4, 3)), Part(other), Part(picture, (1,)), Part(picture[None]), Part(picture[None], (1,))
    assert len({digest_of(each.file) for each in parts}) == len(parts)
    for each in parts:
        again = part_in(each.file)
        assert np.array_equal(again.pixels, each.pixels) and again.more == each.more


def test_pictures_are_turned_and_stand_on_white() -> None:
    out, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(noise(3, 5)).save(out, "PNG", exif=exif)
    assert picture_of(out.getvalue(), "it").shape == (5, 3, 3)
    out = BytesIO()
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(out, "PNG")
    assert picture_of(out.getvalue(), "it").tolist() == [[[255] * 3] * 2] * 2


QUARTERS = np.kron(np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [250, 250, 0]]], np.uint8), np.ones((20, 30, 1), np.uint8))


def corners(data: bytes) -> np.ndarray:
    found = picture_of(data, "it").astype(int)
    return found[:: len(found) - 1, :: found.shape[1] - 1]


def test_the_right_picture_whatever_a_camera_writes() -> None:
    """What EXIF turns, print's colours, 16 bits, palettes, the first of several frames: colours of corners, to JPEG's error."""
    right, image = QUARTERS[::39, ::59].astype(int), Image.fromarray(QUARTERS)

    def written(image: Any, kind: str, **more: Any) -> bytes:
        image.save(out := BytesIO(), kind, **more)
        return out.getvalue()

    turned = {1: right, 2: right[:, ::-1], 3: right[::-1, ::-1], 4: right[::-1], 5: right.transpose(1, 0, 2),
              6: np.rot90(right, -1), 7: np.rot90(right, 2).transpose(1, 0, 2), 8: np.rot90(right)}  # fmt: skip
    for (how, colours), kind in product(turned.items(), ("JPEG", "WEBP", "AVIF", "PNG")):
        exif = Image.Exif()
        exif[0x0112] = how
        data = written(image, kind, exif=exif, quality=95)
        assert np.abs(corners(data) - colours).max() <= 12, (how, kind)
        assert np.array_equal(pixels_of(Image.open(BytesIO(data)), "it"), picture_of(data, "it")), "Pillow's image is its file's"
    other = Image.fromarray(QUARTERS[::-1].copy())
    files = [written(image.convert("CMYK"), "JPEG"), written(image.convert("P"), "PNG"), written(image.quantize(8), "GIF")]
    files += [written(image, kind, save_all=True, append_images=[other] * 2) for kind in ("GIF", "PNG", "WEBP", "AVIF")]
    for data in files:
        assert np.abs(corners(data) - right).max() <= 12
    grey = Image.fromarray(np.array([[0, 300], [32_896, 65_535]], np.uint16))
    assert corners(written(grey, "PNG"))[..., 0].tolist() == [[0, 1], [128, 255]], "16 bits"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "JPEG", "AVIF"])
def test_formats(kind: str) -> None:
    assert picture_of(file_of(noise(9, 8), kind), "it").shape == (9, 8, 3)


def test_what_is_wrong_is_one_sentence() -> None:
    big, huge = file_of(np.zeros((50, 50, 3), np.uint8)), file_of(noise(9, 9), "BMP")
    for data, words in (
        (b"", "is no image that can be read"), (b"II*\0" + bytes(90), "is no image"), (file_of(noise(9, 9), "TIFF"), "must be PNG"), (b"<svg/>", "WEBP, GIF, BMP, AVIF$"),
        (bytes(BYTES_MAX + 1), "an image may have 20971520"), (big[:60], "is no image that can be read: its PNG is damaged or cut off"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=f"^messages.*{words}"):
            picture_of(data, "messages[0]")
    with pytest.raises(MediaError, match="it has 50 x 50 pixels: an image may have 2499"):
        picture_of(big, "it", 2499)
    with pytest.raises(MediaError, match="^it has too many pixels: an image may have 40000000"):
        picture_of(huge[:18] + (20_000).to_bytes(4, "little") * 2 + huge[26:], "it")
    with pytest.raises(MediaError, match="it is 300 x 1 pixels: no side may be more than 200 times the other"):
        tiles_of(noise(1, 300), tile_form(SMALL, 4), "it")


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    file = BytesIO()
    Image.new("L", (6_000, 6_000)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan, began_s = data[data.rindex(b"\xff\xda") : -2], time.process_time()
    with pytest.raises(MediaError, match="image has 80.. scans: an image may have 100, save it again"):
        picture_of(data[:-2] + scan * 8_000 + data[-2:], "image")
    assert time.process_time() - began_s < 60, "each would take 15 ms"
    assert picture_of(data, "image").shape == (6_000, 6_000, 3)


def test_mutated_files_are_read_or_refused() -> None:
    rng = np.random.default_rng(5)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF"):
        whole = np.frombuffer(file_of(noise(16, 16), kind), np.uint8)
        for _ in range(30):
            data = whole.copy()
            data[rng.integers(0, len(data), rng.integers(1, 9))] = rng.integers(0, 256, 1, dtype=np.uint8)
            try:
                assert picture_of(data[: rng.integers(1, len(data) + 1)].tobytes(), "it", 1 << 16).ndim == 3
            except MediaError:
                continue


def test_configurations_that_say_nothing_sensible_are_refused() -> None:
    for raw, words in (
        ({"size": {"height": 3}}, "size.longest_edge is None"), ({"max_image_size": {"longest_edge": 0}}, "is 0: it must be 1 to"),
        ({"image_mean": [1]}, "image_mean is"), ({"resample": "x"}, "resample 'x' must be numbers"),
    ):  # fmt: skip
        with pytest.raises(MediaError, match=words):
            tile_form(raw, 4)
