"""Spectrograms: what a tower of sounds reads of samples, by the numbers of Whisper (OpenAI, 2022): how loud each band is, as a
logarithm, at each hop of 10 ms.

Sums are float64 in one order, so that no number of threads changes a bit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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
