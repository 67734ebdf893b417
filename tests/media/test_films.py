"""Videos: frames are those that transformers takes, in its sizes, and what is no video gets one sentence in bounded time and memory."""

from __future__ import annotations

import os
import resource
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.video_utils import VideoMetadata

from tests.models.families.towers.seeing_cases import films_of
from vnext.media import films
from vnext.media.custom import Custom
from vnext.media.films import Choice, Clip, film_of
from vnext.media.grid import form_in
from vnext.media.pairs import FORM_FILE, PairForm
from vnext.media.pictures import MediaError

RNG = np.random.default_rng(17)
KINDS = (("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("webm", "libvpx"), ("avi", "mjpeg"), ("gif", "gif"))
MUTATED = int(os.environ.get("MUTATED_VIDEOS", "20"))


def form(per_second: int, path: Path = Path("/nowhere")) -> PairForm:
    found = form_in(path, 90, 14 if per_second else 16, 2, (128 * 16) ** 2, 93, per_second).films
    assert found is not None
    return found


def written(kind: str = "mp4", codec: str = "libx264", count: int = 20, rate: int = 10, size: tuple[int, int] = (64, 48), turn: tuple[int, ...] = ()) -> bytes:
    av = pytest.importorskip("av", reason="PyAV is missing: pip install 'vnext[video]'")
    file = BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        if turn:
            stream.set_display_matrix([turn[0] << 16, turn[1] << 16, 0, turn[2] << 16, turn[3] << 16, 0, 0, 0, 1 << 30])
        stream.pix_fmt = {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
        for at in range(count):
            pixels = np.full((size[1], size[0], 3), 10 * at % 256, np.uint8)
            pixels[at % size[1] :, : size[0] // 2] = RNG.integers(0, 256, 3)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def every(clip: Clip) -> Choice:
    return Choice(range(clip.frames), clip.height, clip.width, lambda frame: frame)


@pytest.mark.parametrize("per_second", [0, 2])
def test_frames_and_sizes_are_those_of_transformers(per_second: int) -> None:
    own = films_of("qwen2_vl" if per_second else "qwen3_vl")
    kept = own.Qwen2VLVideoProcessor if per_second else own.Qwen3VLVideoProcessor
    processor, ours, least = kept.__new__(kept), form(per_second), 4 * form(per_second).side ** 2
    processor.__dict__.update(num_frames=None, fps=2)
    for frames in (2, 3, 4, 5, 7, 20, 33, 100, 241, 999, 1800, 35999):
        for rate in (0.1, 1.0, 2.0, 7.5, 10.0, 23.976, 24.0, 29.97, 30.0, 60.0, 1000.0):
            height, width = (int(each) for each in RNG.integers(20, 1200, 2))
            found = ours.choose(Clip(frames, rate, height, width), "it")
            right = processor.sample_frames(VideoMetadata(total_num_frames=frames, fps=rate), fps=2)
            assert [*found.numbers] == [int(each) for each in right], (frames, rate)
            size = {"factor": ours.side, "min_pixels": ours.least, "max_pixels": ours.most}
            expected = own.smart_resize(*(() if per_second else (len(right),)), height, width, **size)
            if expected[0] * expected[1] >= least:
                assert (found.height, found.width) == expected, (frames, rate, height, width)
            assert found.height * found.width >= least


@pytest.mark.parametrize("per_second", [0, 2])
def test_frames_of_custom_rates_are_those_of_transformers(per_second: int) -> None:
    own = films_of("qwen2_vl" if per_second else "qwen3_vl")
    kept = own.Qwen2VLVideoProcessor if per_second else own.Qwen3VLVideoProcessor
    processor, ours = kept.__new__(kept), form(per_second)
    processor.__dict__.update(num_frames=None, fps=None)
    for frames in (9, 20, 33, 999):
        for custom in (Custom(fps=0.5), Custom(fps=7.5), Custom(num_frames=4), Custom(num_frames=8)):
            found = ours.customized(custom, "it").choose(Clip(frames, 24.0, 480, 640), "it")
            right = processor.sample_frames(
                VideoMetadata(total_num_frames=frames, fps=24.0), fps=custom.fps or None, num_frames=custom.num_frames or None
            )
            assert [*found.numbers] == [int(each) for each in right], (frames, custom)
    for custom in (Custom(num_frames=1), Custom(num_frames=10**6), Custom(fps=1e6)):
        with pytest.raises(MediaError, match="^it is to be read in "):
            ours.customized(custom, "it")


def test_a_clip_of_one_frame_is_a_pair() -> None:
    for ours in (form(0), form(2)):
        film = film_of((RNG.integers(0, 256, (1, 64, 64, 3), dtype=np.uint8), 24.0), "it", partial(ours.choose, name="it"))
        [part] = ours.seen(film, "it").parts
        assert np.array_equal(*part.pixels)


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_frames_are_those_of_the_file(kind: str, codec: str) -> None:
    data = written(kind, codec)
    av = pytest.importorskip("av")
    with av.open(BytesIO(data)) as container:
        right = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    film = film_of(data, "it", every)
    assert film.clip == (20, 10.0, 48, 64) and np.array_equal(film.frames, right)
    some = film_of(data, "it", lambda clip: Choice([0, 3, 19], 48, 64, lambda frame: frame))
    assert np.array_equal(some.frames, [right[at] for at in (0, 3, 19)])


def test_what_is_no_video_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written()
    hostile: list[tuple[Any, str]] = [
        (b"", "no video that can be read"), (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no video that can be read"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "no video that can be read"), (data[: len(data) // 4], "no video that can be read"),
        (bytes(films.BYTES_MAX + 1), "a video may have"), (np.zeros((2, 4, 4)), "is no video: give"),
        *(((np.zeros((2, 4, 4, 3), np.uint8), rate), "is no video: give") for rate in (0, 5e-324, 1e-30, 1001, float("nan"))),
        (written("mp4", "libx264", 1, size=(4000, 2600)), "one may have"),
        (written("webm", "libvpx", 1, size=(4000, 2600)), "(one may have|can be read)"),
    ]  # fmt: skip
    for video, sentence in hostile:
        with pytest.raises(MediaError, match=f"^it .*{sentence}") as found:
            film_of(video, "it", every)
        assert "\n" not in str(found.value)
    for bound, value, sentence in (
        ("FRAMES_MAX", 19, "has more than 19 frames"), ("SECONDS_MAX", 0.0, "takes more than 0 s"), ("PIXELS_MAX", 61439, "61439 pixels")
    ):
        with monkeypatch.context() as patch, pytest.raises(MediaError, match=sentence):
            patch.setattr(films, bound, value)
            film_of(data, "it", every)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match="^it is a video, and PyAV is missing here: pip install 'vnext\\[video\\]'$"):
        film_of(data, "it", every)


@pytest.mark.parametrize(("turn", "quarters"), [((0, 1, -1, 0), 1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 3)])
def test_films_are_turned_as_their_files_say(turn: tuple[int, ...], quarters: int) -> None:
    """By quarters clockwise: a telephone that was held upright writes the first matrix."""
    state = RNG.bit_generator.state
    plain = film_of(written(), "it", every)
    RNG.bit_generator.state = state
    turned = film_of(written(turn=turn), "it", every)
    assert (turned.clip.height, turned.clip.width) == ((48, 64) if quarters == 2 else (64, 48)), "what forms choose by"
    assert np.array_equal(turned.frames, np.rot90(plain.frames, -quarters, axes=(1, 2)))


def test_what_lasts_too_long_is_refused() -> None:
    ours = form(2)
    film = film_of((np.zeros((4, 64, 64, 3), np.uint8), 1e-4), "it", lambda clip: ours.choose(clip, "it"))
    with pytest.raises(MediaError, match="^it has 20000 s between frames to read: it is too long"):
        ours._replace(per_second=4).seen(film, "it")


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_mutated_videos_end_in_frames_or_one_sentence(kind: str, codec: str) -> None:
    """`MUTATED_VIDEOS=2000` makes twelve thousand of them."""
    data, before, refused = written(kind, codec), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(MUTATED):
        changed = bytearray(data)
        for at in RNG.integers(0, len(data), RNG.integers(1, 12)):
            changed[int(at) % (400 if RNG.random() < 0.5 else len(data))] = int(RNG.integers(256))
        given = bytes(changed[: int(RNG.integers(1, len(data)))] if RNG.random() < 0.2 else changed)
        try:
            film = film_of(given, "it", lambda clip: form(2).choose(clip, "it"))
        except MediaError as error:
            refused += 1
            assert str(error).startswith("it ") and "\n" not in str(error)
        else:
            assert film.frames.dtype == np.uint8 and len(film.frames) == len(film.numbers)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000, "KiB"
    assert refused or kind == "gif", "which lets all colours pass"


def test_a_form_that_is_out_of_order_is_refused(tmp_path: Path) -> None:
    for settings in ('{"fps": "two"}', '{"fps": -1}', '{"min_frames": 1}', '{"size": {"shortest_edge": 9, "longest_edge": 8}}'):
        (tmp_path / FORM_FILE).write_text(settings)
        with pytest.raises(MediaError, match=f"^{FORM_FILE}: "):
            form(2, tmp_path)
