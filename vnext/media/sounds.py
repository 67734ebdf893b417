"""Sounds: bytes of a file -> samples that a model listens to. Owns which WAV files there are, and how long a sound may be.

WAV is read here: whole numbers of 8 to 32 bits and floats of 32 or 64, any rate and channels. What else there is soundfile reads,
and PyAV what phones and browsers record, both the extra `audio`. What is wrong with a sound is one sentence that begins with its
name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from io import BytesIO
from itertools import chain
from math import gcd
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from vnext.media.pictures import MediaError
from vnext.media.store import MediaStore, folder_of
from vnext.state.store.inputs import TOKENS_MIN, input_tokens

SOUND = b"sound\0"
BEGIN, PLACE, END = "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"
SECONDS_MAX = 3600
FRAMES_MAX = 1 << 25
"""Of all of a file, at its own rate: twelve minutes at 48,000 Hz, half an hour at 16,000."""
RATES = range(1_000, 384_001)
CHANNELS_MAX = 32
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
PLAIN = {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}
OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,aac", "protocol_whitelist": "none"}
CODECS = ("aac", "opus", "libopus", "vorbis", "mp3", "mp3float", "flac", "alac", "pcm_s16le", "pcm_s16be")
SECONDS_TO_DECODE = 30.0
ZERO_CROSSINGS, SHAPE = 24, 9.0
"""Of the low-pass filter on either side, and its Kaiser window's."""
BLOCK_FRAMES = 1 << 16
PHASES = 256
"""For so many at once, what neighbours weigh is computed: an odd rate has thousands, where 44,100 Hz has 160."""


class Format(NamedTuple):
    """What a WAV file says of its samples: `kind` is PCM or FLOAT, `width` bytes of one."""

    kind: int
    channels: int
    rate: int
    width: int


def sound_of(data: bytes, name: str) -> np.ndarray:
    """The sound as float32 [N] at SAMPLE_RATE, the mean of its channels. Raises MediaError."""
    wave, rate = _wave(data, name) if data[:4] in (b"RIFF", b"RIFX") and data[8:12] == b"WAVE" else _other(data, name)
    _check_frames(len(wave), name)
    if len(wave) > SECONDS_MAX * rate:
        raise MediaError(f"{name} has more than {SECONDS_MAX} seconds, which a sound may have: send it in parts")
    return as_heard(wave, rate)


def _wave(data: bytes, name: str) -> tuple[np.ndarray, int]:
    order = "<" if data[:4] == b"RIFF" else ">"
    at, found = 12, None
    while at + 8 <= len(data):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little" if order == "<" else "big")
        if kind == b"data" and not size:  # never filled in by what wrote it to a pipe
            size = len(data)
        body = memoryview(data)[at + 8 : at + 8 + size]
        if kind == b"fmt ":
            if (found := _format(bytes(body[:40]), order, name)) is None:
                return _other(data, name)
        elif kind == b"data":
            if found is None:
                break
            return _mean(np.frombuffer(body[: len(body) // found.width * found.width], np.uint8), found, order, name), found.rate
        at += 8 + size + size % 2
    raise MediaError(f"{name} is no whole WAV file: it lacks its format or its samples")


def _format(body: bytes, order: str, name: str) -> Format | None:
    """None of one that is written otherwise, as telephones do."""
    if len(body) < 16:
        raise MediaError(f"{name} is no whole WAV file: its format is cut off")
    kind, channels = (int(each) for each in np.frombuffer(body[:4], order + "u2"))
    rate, bits = int(np.frombuffer(body[4:8], order + "u4")[0]), int(np.frombuffer(body[14:16], order + "u2")[0])
    if kind == EXTENSIBLE and len(body) >= 26:
        kind = int(np.frombuffer(body[24:26], order + "u2")[0])
    if (kind, bits) not in PLAIN:
        return None
    _check_form(channels, rate, name)
    return Format(kind, channels, rate, bits // 8)


def _mean(raw: np.ndarray, found: Format, order: str, name: str) -> np.ndarray:
    """The mean of the channels, float32 [N], block by block."""
    size = found.width * found.channels
    count = len(raw) // size
    _check_frames(count, name)
    mean = np.empty(count, dtype=np.float32)
    for first in range(0, count, BLOCK_FRAMES):
        block = raw[first * size : min(first + BLOCK_FRAMES, count) * size]
        mean[first : first + len(block) // size] = _numbers(block, found, order).reshape(-1, found.channels).mean(1)
    return mean


def _numbers(raw: np.ndarray, found: Format, order: str) -> np.ndarray:
    """Samples of bytes: float32 in [-1, 1]."""
    if found.kind == FLOAT:
        with np.errstate(all="ignore"):
            heard: np.ndarray = np.clip(np.nan_to_num(raw.view(f"{order}f{found.width}")), -1.0, 1.0)
            return heard.astype(np.float32)
    if found.width == 1:
        return (raw.astype(np.float32) - 128.0) / 128.0
    if found.width == 3:
        wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3) if order == "<" else raw.reshape(-1, 3)[:, ::-1]
        return (wide.reshape(-1).view("<i4") / 2.0**31).astype(np.float32)
    return (raw.view(f"{order}i{found.width}") / 2.0 ** (8 * found.width - 1)).astype(np.float32)


def _check_form(channels: int, rate: int, name: str) -> None:
    if not 1 <= channels <= CHANNELS_MAX or rate not in RATES:
        raise MediaError(f"{name} has {channels} channels at {rate} Hz: {CHANNELS_MAX} at {RATES[0]} to {RATES[-1]} are read")


def _check_frames(count: int, name: str) -> None:
    if not count:
        raise MediaError(f"{name} has no samples: send a sound")
    if count > FRAMES_MAX:
        raise MediaError(f"{name} has {count} samples of each channel: a sound may have {FRAMES_MAX}, send it in parts")


def _other(data: bytes, name: str) -> tuple[np.ndarray, int]:
    in_container = data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or data[:2] in (b"\xff\xf1", b"\xff\xf9")
    try:
        library = import_module("av" if in_container else "soundfile")
    except (ImportError, OSError) as error:
        remedy = "send WAV, or pip install 'vnext[audio]'"
        raise MediaError(f"{name} is no plain WAV file, and what reads others is missing here: {remedy}") from error
    blocks, count, found = [np.zeros(0, np.float32)], 0, SAMPLE_RATE
    try:
        for block, rate in (_in_container if in_container else _in_file)(library, data, name):
            _check_frames(count := count + len(block), name)
            blocks.append(block)
            found = rate
    except MediaError:
        raise
    except Exception as error:  # decoders raise what they like
        raise MediaError(f"{name} is no sound that can be read: send WAV, FLAC, Ogg, MP3, M4A or WebM") from error
    return np.concatenate(blocks), found


def _in_file(soundfile: ModuleType, data: bytes, name: str) -> Iterator[tuple[np.ndarray, int]]:
    """Blocks of the mean of the channels, float32 [n], and their rate, as soundfile reads them."""
    with soundfile.SoundFile(BytesIO(data)) as file:
        _check_form(file.channels, file.samplerate, name)
        while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
            yield block.mean(1), file.samplerate


def _in_container(av: ModuleType, data: bytes, name: str) -> Iterator[tuple[np.ndarray, int]]:
    """As _in_file, of the first track of MP4, WebM or ADTS; PyAV opens nothing beside these bytes."""
    end = time.monotonic() + SECONDS_TO_DECODE
    with av.open(BytesIO(data), options=OPTIONS, timeout=SECONDS_TO_DECODE, metadata_errors="replace") as container:
        stream = container.streams.audio[0]
        codec = stream.codec_context
        if codec.name not in CODECS:
            raise MediaError(f"{name} is written in {codec.name}, which is not read: send AAC, Opus, MP3 or WAV")
        codec.thread_count, floats = 1, av.AudioResampler(format="fltp")
        for frame in chain(container.decode(stream), (None,)):
            for each in floats.resample(frame):
                _check_form(each.layout.nb_channels, each.sample_rate, name)
                yield each.to_ndarray().mean(0), each.sample_rate
            if time.monotonic() > end:
                raise MediaError(f"{name} takes more than {SECONDS_TO_DECODE:.0f} s to decode")


class SoundReader:
    """Puts sounds for one model where its ranks find them. `span`: tokens that stand for a sound; `samples`: of one that the model
    reads whole. Any thread may call it."""

    def __init__(self, sizes: str, addresses: Sequence[str]) -> None:
        """`sizes`: as the engine tells them; `addresses`: of the engines."""
        self.span, self.samples = map(int, sizes.split())
        self._store = MediaStore(map(folder_of, addresses))

    def seen(self, sound: object, name: str) -> np.ndarray:
        """As read_whole."""
        return read_whole(sound, name, self.samples)

    def packed(self, samples: np.ndarray, tokens: Sequence[int], name: str) -> bytes:
        """A prompt, int32 bytes: the tokens of a sound float32 [N], and those behind it. Raises MediaError."""
        (digest,) = self._store.put([file_of(samples)], name)
        return np.concatenate((input_tokens(digest, self.span), np.array(tokens, dtype=np.int32))).tobytes()


class Listened(NamedTuple):
    """A sound among the tokens of a prompt: its samples float32 [N], the text that stands for it, how many tokens that has, and how
    many of them stand for `vectors`."""

    samples: np.ndarray
    text: str
    length: int
    vectors: int


class SoundForm(NamedTuple):
    """How a model reads sounds among the tokens of its prompts: `token` stands for vectors, `samples` are the most of a sound;
    marks as a Form's (seen.py)."""

    token: int
    samples: int
    mark: str = PLACE
    shown: str = BEGIN + PLACE + END

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.token,)

    def heard(self, sound: object, name: str) -> Listened:
        """A sound as read_whole has it. Raises MediaError."""
        samples = read_whole(sound, name, self.samples)
        if (count := states_of(len(samples)) // 2) < TOKENS_MIN:
            least = 4 * TOKENS_MIN * HOP / SAMPLE_RATE
            raise MediaError(f"{name} has {len(samples) / SAMPLE_RATE:.2f} seconds: the model reads {least:g} at least")
        return Listened(samples, self.mark * count, count, count)


def columns_of(samples: int) -> int:
    """The columns of a spectrogram that a sound itself has."""
    return -(-samples // HOP)


def states_of(samples: int) -> int:
    """The states that a tower makes of a sound: one of each two columns, the last of which may be cut."""
    return -(-samples // (2 * HOP))


def read_whole(sound: object, name: str, most: int) -> np.ndarray:
    """The samples float32 [N], N <= most, of a file's bytes, or of (samples [N], their rate), at SAMPLE_RATE. Raises MediaError."""
    if isinstance(sound, bytes):
        found = sound_of(sound, name)
    else:
        samples, rate = sound if isinstance(sound, tuple | list) and len(sound) == 2 else (None, 0)
        wave = np.asarray(samples)
        if wave.ndim != 1 or wave.dtype.kind != "f" or not isinstance(rate, int | float) or int(rate) not in RATES:
            raise MediaError(f"{name} is no sound: give a file's bytes, or (samples as floats [N], their rate)")
        _check_frames(len(wave), name)
        found = as_heard(wave.astype(np.float32), int(rate))
    if len(found) > most:
        seconds = len(found) / SAMPLE_RATE
        raise MediaError(f"{name} has {seconds:.1f} seconds: the model reads {most / SAMPLE_RATE:g} at once, give its parts")
    return found


def as_heard(wave: np.ndarray, rate: int) -> np.ndarray:
    """Samples float32 [N] at a rate, at SAMPLE_RATE and in [-1, 1]."""
    found: np.ndarray = np.clip(resampled(np.nan_to_num(wave, nan=0.0, posinf=1.0, neginf=-1.0), rate), -1.0, 1.0)
    return found


def resampled(wave: np.ndarray, rate: int) -> np.ndarray:
    """The sound float32 [N] at `rate`, at SAMPLE_RATE: by a sinc below half of the lower rate, windowed by Kaiser's window."""
    if rate == SAMPLE_RATE or not len(wave):
        return wave
    up, down = SAMPLE_RATE // gcd(rate, SAMPLE_RATE), rate // gcd(rate, SAMPLE_RATE)
    narrow = min(1.0, SAMPLE_RATE / rate)
    half = int(np.ceil(ZERO_CROSSINGS / narrow))
    count = -(-len(wave) * up // down)
    padded = np.zeros(len(wave) + 2 * half + 2, dtype=np.float32)
    padded[half : half + len(wave)] = wave
    windows, found = sliding_window_view(padded, 2 * half + 1), np.empty(count, dtype=np.float32)
    for begin in range(0, min(up, count), PHASES):
        phases = np.arange(begin, min(begin + PHASES, up, count))
        for phase, weights in zip(phases.tolist(), weights_of(phases * down % up / up, half, narrow)):
            first, place = phase * down // up, found[phase::up]
            for at in range(0, len(place), BLOCK_FRAMES):  # bounded memory
                end = min(at + BLOCK_FRAMES, len(place))
                rows = windows[first + at * down : first + (end - 1) * down + 1 : down]
                place[at:end] = np.einsum("nk,k->n", rows, weights)
    return found


def weights_of(parts: np.ndarray, half: int, narrow: float) -> np.ndarray:
    """What samples up to `half` away weigh, float32 [n, 2 * half + 1], of those that lie these parts of a sample behind one."""
    away = (np.arange(-half, half + 1) - parts[:, None]) * narrow
    inside = np.sqrt(np.maximum(0.0, 1.0 - (away / (half * narrow + 1e-9)) ** 2))
    found: np.ndarray = (np.sinc(away) * np.i0(SHAPE * inside) / np.i0(SHAPE) * narrow).astype(np.float32)
    return found


def file_of(samples: np.ndarray) -> bytes:
    """A sound float32 [N] as it is stored."""
    return SOUND + np.ascontiguousarray(samples, dtype=np.float32).data


def is_sound(path: Path) -> bool:
    """Whether an input's file is a sound's; not where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(len(SOUND)) == SOUND
    except OSError:
        return False


def samples_in(file: bytes) -> np.ndarray:
    """The sound float32 [N] that a file stores."""
    return np.frombuffer(file[len(SOUND) :], np.float32)


# ---- spectrograms ------------------------------------------------------------------------------------------------
# What a tower of sounds reads of samples, by the numbers of Whisper (OpenAI, 2022): how loud each band is, as a logarithm, at each
# hop of 10 ms. Sums are float64 in one order, so that no number of threads changes a bit.

SAMPLE_RATE = 16_000
HOP, WIDTH = 160, 400
"""Samples between two columns, and of one."""
RANGE, FLOOR = 8.0, 1e-10
"""Bels below the loudest, and the least power, beneath which nothing counts."""
MEL_HZ, MEL_LINEAR, MEL_STEP = 1000.0, 15.0, 27.0 / np.log(6.4)
"""Slaney's scale: even below MEL_HZ, which is MEL_LINEAR mel, and even in logarithms above."""


def spectrogram_of(samples: np.ndarray, bands: int, length: int) -> np.ndarray:
    """Of samples float32 [N], N <= length, in [-1, 1], with silence behind them up to `length`: float32 [bands, length / HOP]."""
    whole = np.zeros(length + WIDTH, dtype=np.float64)
    half = WIDTH // 2
    whole[half : half + len(samples)] = samples
    whole[:half], whole[-half:] = whole[2 * half : half : -1], whole[-half - 2 : -WIDTH - 2 : -1]
    columns = sliding_window_view(whole, WIDTH)[: length : HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WIDTH) / WIDTH)
    power = np.abs(np.fft.rfft(columns * window)) ** 2
    loud = np.log10(np.maximum(np.einsum("fb,tf->bt", band_filters(bands), power), FLOOR))
    found: np.ndarray = (np.maximum(loud, loud.max() - RANGE) + 4.0) / 4.0
    return found.astype(np.float32)


@cache
def band_filters(bands: int) -> np.ndarray:
    """How much each frequency counts in each band: float64 [WIDTH / 2 + 1, bands], triangles of one area that begin and end in
    their neighbours' middles."""
    top = MEL_LINEAR + np.log(SAMPLE_RATE / 2 / MEL_HZ) * MEL_STEP
    mel = np.linspace(0.0, top, bands + 2)
    middles = np.where(mel < MEL_LINEAR, mel * MEL_HZ / MEL_LINEAR, MEL_HZ * np.exp((mel - MEL_LINEAR) / MEL_STEP))
    away = middles[None] - np.linspace(0, SAMPLE_RATE / 2, WIDTH // 2 + 1)[:, None]
    apart = np.diff(middles)
    found = np.maximum(0.0, np.minimum(-away[:, :-2] / apart[:-1], away[:, 2:] / apart[1:]))
    return found * (2.0 / (middles[2:] - middles[:-2]))
