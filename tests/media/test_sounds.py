"""Sounds: WAV in every form that is read, other rates, and what is no sound, which gets one sentence."""

from __future__ import annotations

import struct
import tracemalloc
import wave
from io import BytesIO

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from vnext.media import sounds
from vnext.media.pictures import MediaError
from vnext.media.sounds import resampled, sound_of, spectrogram_of

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(4000) / 16_000)).astype(np.float32)
MUTATIONS, DRAWS = 2_000, 5


def wav(samples: np.ndarray, kind: int, bits: int, rate: int = 16_000, extensible: bool = False) -> bytes:
    """A WAV file of samples [N, channels] in [-1, 1]."""
    if kind == 3:
        body = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        body = (samples * 127 + 128).round().astype(np.uint8).tobytes()
    else:
        whole = (samples.astype(np.float64) * (2 ** (bits - 1) - 1)).round().astype("<i4")
        body = whole.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    channels = samples.shape[1]
    size = channels * bits // 8
    head = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * size, size, bits)
    head += struct.pack("<HHIH", 22, bits, 0, kind) + bytes(14) if extensible else b""
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(head)) + head
    chunks += b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("extensible", [False, True])
def test_every_form_of_wav_is_read(kind: int, bits: int, extensible: bool) -> None:
    both = np.stack((TONE, -TONE / 2), axis=1)
    found = sound_of(wav(both, kind, bits, extensible=extensible), "file")
    assert found.dtype == np.float32 and np.abs(found - both.mean(1)).max() <= 2.5 / 2 ** min(bits, 24)


def test_a_size_that_was_never_filled_in_is_that_of_the_file() -> None:
    whole = wav(TONE[:, None], 1, 16)
    at = whole.index(b"data") + 4
    for size in (0, 2**32 - 1):
        assert np.array_equal(sound_of(whole[:at] + struct.pack("<I", size) + whole[at + 4 :], "file"), sound_of(whole, "file"))


def test_the_standard_librarys_files_are_read() -> None:
    written = BytesIO()
    with wave.open(written, "wb") as file:
        file.setparams((1, 2, 16_000, len(TONE), "NONE", ""))
        file.writeframes((TONE * 32767).astype("<i2").tobytes())
    assert np.abs(sound_of(written.getvalue(), "file") - TONE).max() < 1e-4


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3", "WAV"])
def test_other_files_are_read_by_soundfile(form: str) -> None:
    """Also WAV as telephones write it."""
    soundfile = pytest.importorskip("soundfile", reason="soundfile is missing: pip install 'vnext[audio]'", exc_type=ImportError)
    written, both = BytesIO(), np.stack((TONE, TONE), axis=1)
    soundfile.write(written, both, 16_000, format=form, subtype="ULAW" if form == "WAV" else None)
    found = sound_of(written.getvalue(), "file")
    assert found.dtype == np.float32 and abs(len(found) - len(TONE)) <= (2_000 if form == "MP3" else 0)
    assert np.abs(np.abs(np.fft.rfft(found[:4000])).argmax() - 110) <= 1 and np.abs(found).max() <= 0.6
    if form == "FLAC":
        assert np.abs(found - TONE).max() < 1e-4


RECORDED = {"mp4": ("aac", 44_100), "adts": ("aac", 16_000), "webm": ("libopus", 48_000)}
"""What phones and browsers write: the format and its codec, and the rate."""


def recorded(form: str) -> bytes:
    """A stereo file of a second, 440 Hz on both sides."""
    av = pytest.importorskip("av", reason="PyAV is missing: pip install 'vnext[audio]'")
    codec, rate = RECORDED[form]
    with av.open(written := BytesIO(), "w", format=form) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.layout = "stereo"
        tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate, dtype=np.float32) / rate)
        frame = av.AudioFrame.from_ndarray(np.stack((tone, tone)).astype(np.float32), "fltp", "stereo")
        frame.sample_rate = rate
        fitting = av.AudioResampler(stream.codec_context.format.name, "stereo", rate, stream.codec_context.frame_size or 1_024)
        for each in (*fitting.resample(frame), *fitting.resample(None), None):
            file.mux(stream.encode(each))
    return written.getvalue()


@pytest.mark.parametrize("form", RECORDED)
def test_what_phones_and_browsers_record_is_read(form: str) -> None:
    data = recorded(form)
    found = sound_of(data, "file")
    assert found.dtype == np.float32 and 0 <= len(found) - 16_000 <= 2_300, "silence around it is the codec's"
    assert np.abs(np.fft.rfft(found[:16_000])).argmax() == 440 and 0.3 < np.sqrt(2 * (found[4_000:12_000] ** 2).mean()) < 0.6
    draw, refused = np.random.default_rng(2), 0
    for _ in range(40):
        other = bytearray(data)
        for _ in range(draw.integers(1, 6)):
            other[draw.integers(8, 400 if draw.random() < 0.7 else len(data))] = draw.integers(0, 256)
        try:
            assert np.isfinite(sound_of(bytes(other[: draw.integers(9, 2 * len(data))]), "file")).all()
        except MediaError as error:
            refused += 1
            assert str(error).startswith("file ") and "\n" not in str(error)
    assert refused


def test_a_film_without_sound_and_a_codec_that_is_not_read_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded("mp4")
    monkeypatch.setattr(sounds, "SECONDS_TO_DECODE", 0.0)
    with pytest.raises(MediaError, match="^file takes more than 0 s to decode$"):
        sound_of(data, "file")
    monkeypatch.setattr(sounds, "CODECS", ("opus",))
    with pytest.raises(MediaError, match="^file is written in aac, which is not read: send AAC, Opus, MP3 or WAV$"):
        sound_of(data, "file")
    with pytest.raises(MediaError, match="^file is no sound that can be read"):
        sound_of(data.replace(b"soun", b"vide"), "file")


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000])
def test_other_rates_keep_what_is_below_half_of_the_lower_one(rate: int) -> None:
    at = np.arange(rate) / rate
    found = resampled((0.5 * np.sin(2 * np.pi * 1000 * at)).astype(np.float32), rate)
    right = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(len(found)) / 16_000)
    assert len(found) == 16_000 and np.abs(found - right)[500:-500].max() < 1e-4
    if rate > 20_000:
        high = resampled((0.5 * np.sin(2 * np.pi * 9_500 * at)).astype(np.float32), rate)
        assert np.abs(high)[500:-500].max() < 1e-4


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("count", [0, 1, 300, 16_001, 479_999, 480_000])
def test_spectrograms_are_those_of_transformers(bands: int, count: int) -> None:
    theirs = WhisperFeatureExtractor(feature_size=bands)
    samples = (np.random.default_rng(count).standard_normal(count) * 0.1).astype(np.float32)
    whole = np.concatenate((samples, np.zeros(480_000 - count, np.float32)))
    assert np.abs(spectrogram_of(samples, bands, 480_000) - theirs._np_extract_fbank_features(whole[None], "cpu")[0]).max() <= 1e-5


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"RIFF\0\0\0\0WAVE", "file is no whole WAV file: it lacks its format or its samples"),
        (wav(TONE[:0, None], 1, 16), "file has no samples: send a sound"),
        (wav(TONE[:, None], 1, 16)[:50], "file is no whole WAV file: it lacks its format or its samples"),
        (wav(TONE[:, None], 1, 16).replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0\x55\0"),
         "file is no sound that can be read: send WAV, FLAC, Ogg, MP3, M4A or WebM"),
        (wav(TONE[:, None], 1, 16, rate=10), "file has 1 channels at 10 Hz: 32 at 1000 to 384000 are read"),
    ],
)  # fmt: skip
def test_what_is_no_sound_gets_a_sentence(data: bytes, sentence: str) -> None:
    if "M4A" in sentence:
        pytest.importorskip("soundfile", reason="soundfile is missing: pip install 'vnext[audio]'", exc_type=ImportError)
    with pytest.raises(MediaError) as caught:
        sound_of(data, "file")
    assert str(caught.value) == sentence


def test_a_sound_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    file = wav(TONE[:, None], 1, 16)
    monkeypatch.setattr(sounds, "FRAMES_MAX", 3_999)
    with pytest.raises(MediaError, match="^file has 4000 samples of each channel: a sound may have 3999, send it in parts$"):
        sound_of(file, "file")
    monkeypatch.undo()
    monkeypatch.setattr(sounds, "SECONDS_MAX", 0.2)
    with pytest.raises(MediaError, match=r"^file has more than 0.2 seconds, which a sound may have: send it in parts$"):
        sound_of(file, "file")


@pytest.mark.parametrize("seed", range(DRAWS))
def test_mutated_sounds_are_read_or_get_a_sentence(seed: int) -> None:
    draw = np.random.default_rng(seed)
    files = [wav(TONE[:400, None].repeat(2, 1), kind, bits, 8_000, bits > 16) for kind, bits in ((1, 8), (1, 16), (1, 24), (3, 32), (3, 64))]
    counts = {"read": 0, "refused": 0}
    tracemalloc.start()
    for at in range(MUTATIONS):
        data = bytearray(files[at % len(files)])
        for _ in range(draw.integers(1, 5)):
            data[draw.integers(0, 80 if draw.random() < 0.8 else len(data))] = draw.integers(0, 256)
        if draw.random() < 0.2:
            del data[draw.integers(0, len(data)) :]
        try:
            found = sound_of(bytes(data), "file")
        except MediaError as error:
            assert "\n" not in str(error) and str(error).startswith("file ") and len(str(error)) < 160
            counts["refused"] += 1
        else:
            assert found.dtype == np.float32 and np.isfinite(found).all() and np.abs(found).max(initial=0) <= 1
            counts["read"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(counts.values()) > MUTATIONS / 20 and peak < 64 << 20
